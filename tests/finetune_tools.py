"""A tiny pretrained folder, a toy task of a dozen words, and runs of them in this process."""

import json
import os
import shutil
from pathlib import Path

from tfwd.finetune.config import default_config
from tfwd.runs.storage.metrics import read_metrics

BERT = Path(__file__).parent / "layers" / "transformer" / "published" / "bert"
NICE = ["good", "fine", "great", "superb"]
DULL = ["bad", "poor", "dull", "awful"]
WORDS = ["a", "the", "film", "play", "is", "was", "it", "so"]
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *NICE, *DULL, *WORDS]  # 20, as the encoder has


def write_tokenizer(path, tokens=TOKENS):
    """Writes a `tokenizer.json` of whole words."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    numbers = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    made.enable_padding(length=9)  # published files have it, and it must be ignored
    made.enable_truncation(4)
    made.save(str(path))


def write_pretrained(folder):
    """Writes a folder in Hugging Face's form: a random BERT and a tokenizer."""
    os.makedirs(folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(BERT / name, folder)
        (folder / name).chmod(0o644)
    write_tokenizer(folder / "tokenizer.json")
    return folder


def lines(words, start=0, count=8):
    """Returns texts. One word of each text decides the label."""
    found = []
    for number in range(start, start + count):
        filler = [WORDS[(number * k + k) % len(WORDS)] for k in range(1, 2 + number % 4)]
        filler.insert(number % 2, words[number % len(words)])
        found.append(" ".join(filler))
    return found


def write_data(folder, parts=(("train", 0, 8), ("valid", 3, 4), ("test", 5, 4))):
    """Writes `train.tsv`, `valid.tsv` and `test.tsv`."""
    os.makedirs(folder, exist_ok=True)
    for name, start, count in parts:
        rows = [f"{text}\tpos\n" for text in lines(NICE, start, count)]
        rows += [f"{text}\tneg\n" for text in lines(DULL, start, count)]
        (folder / f"{name}.tsv").write_text("".join(rows))
    return folder


def make_config(data, pretrained, **changes):
    """Returns a configuration for the toy task; `group__name=value` changes a key."""
    config = default_config()
    config.data.update({"path": str(data), "batch_size": 4, "max_length": 10})
    config.model.update({"pretrained": str(pretrained), "pooling": "mean"})
    config.model.update({"dropout": 0.0, "attention_dropout": 0.0, "head_dropout": 0.0})
    config.optimizer.update({"learning_rate": 0.02, "warmup": 0.1})
    config.training.update({"epochs": 2, "log_steps": 2, "tensorboard": False})
    config.training.checkpoint_seconds = 0.0  # a slow machine would save more often
    for key, value in changes.items():
        group, _, name = key.partition("__")
        (config[group] if name else config)[name or group] = value
    return config


LEARNT = {
    "model__dropout": 0.05,
    "model__attention_dropout": 0.05,
    "model__head_dropout": 0.05,
    "optimizer__layer_decay": 0.9,
    "training__epochs": 15,
    "training__tensorboard": True,
}


def log(workdir):
    """Returns a run's log, without clock times."""
    found = read_metrics(Path(workdir) / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in found]


def summary(workdir):
    """Returns a run's summary, without clock times."""
    found = json.loads((Path(workdir) / "report" / "summary.json").read_text())
    return {k: v for k, v in found.items() if k != "texts_per_second"}
