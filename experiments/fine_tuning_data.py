"""Texts, batches and the initial head of the fine-tuning experiment, equal for each framework."""

from __future__ import annotations

from pathlib import Path

import ml_collections
import numpy as np
from fine_tuning_plan import BATCH, EXAMPLES, LENGTH, TASKS, TEST, VALID

from tfwd.finetune.config import default_config
from tfwd.finetune.data import batches
from tfwd.finetune.data.corpus import Corpus, Encoded, read_corpus

POOL = 4  # number of batches whose texts are sorted together by length
DEVIATION = 0.02  # standard deviation of the head's initial weights


def configuration(data: Path, pretrained: Path) -> ml_collections.ConfigDict:
    """Returns the configuration of `tfwd-finetune` for one folder of texts, without dropout."""
    config = default_config()
    config.data.update({"path": str(data), "train_examples": EXAMPLES, "max_length": LENGTH})
    config.data.batch_size = BATCH
    config.model.update({"pretrained": str(pretrained), "pooling": "mean"})
    for name in ("dropout", "attention_dropout", "head_dropout"):
        config.model[name] = 0.0
    return config


def read_texts(data: Path, pretrained: Path) -> dict[str, Corpus]:
    """Returns the texts of each task, which do not depend on the seed.

    Args:
        data: Path. Folder with the folders of `TASKS`. Each has train.tsv, test.tsv and possibly
            valid.tsv, with lines of text, a tab, and the label.
        pretrained: Path. Folder of the encoder, for its tokenizer.

    Raises:
        UserError: If a file is missing or has a wrong line.
    """
    found = {}
    for task in TASKS:
        corpus = read_corpus(configuration(data / task, pretrained))
        encoded = {
            "train": corpus.encoded["train"],
            "valid": _some(corpus.encoded["valid"], VALID),
            "test": _some(corpus.encoded["test"], TEST),
        }
        found[task] = corpus._replace(encoded=encoded)
    return found


def _some(part: Encoded, count: int) -> Encoded:
    chosen = np.sort(np.random.default_rng(0).permutation(len(part.ids))[:count])
    return Encoded([part.ids[number] for number in chosen], part.labels[chosen])


def epoch_batches(part: Encoded, seed: int, epoch: int) -> list[np.ndarray]:
    """Returns the numbers of the texts of each batch of an epoch.

    The order is random. Then the texts of every `POOL` batches are sorted by length, so that a
    batch has texts of similar length, and the batches are shuffled.
    """
    order = batches.order(len(part.ids), seed, epoch)
    lengths = np.array([len(ids) for ids in part.ids])
    found = []
    for start in range(0, len(order), POOL * BATCH):
        pool = order[start : start + POOL * BATCH]
        pool = pool[np.argsort(lengths[pool], kind="stable")]
        found += [pool[first : first + BATCH] for first in range(0, len(pool), BATCH)]
    shuffled = np.random.default_rng([seed, epoch, 1]).permutation(len(found))
    return [found[number] for number in shuffled]


def first_head(seed: int, hidden: int, classes: int) -> np.ndarray:
    """Returns the head's initial kernel `[hidden, classes]`, drawn from a truncated normal."""
    generator = np.random.default_rng([seed, 2])
    values = generator.normal(size=(hidden, classes))
    while (far := np.abs(values) > 2).any():
        values[far] = generator.normal(size=int(far.sum()))
    return (DEVIATION * values).astype(np.float32)
