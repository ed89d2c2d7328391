"""Plain runs of the fine-tuning experiment with Hugging Face's BERT in PyTorch.

    python experiments/fine_tuning_torch.py --data=FOLDER

Run it in the environment of the benchmarks, after the selection runs of `fine_tuning.py`. Texts,
tokens, batches, their order, the initial head, the schedule and the learning rate are the same. The
model, its gradients and Adam are PyTorch's. Finished runs are lines of the same file, with
peer="pytorch". A finished run is not repeated.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

# PyTorch must be imported before TensorFlow, which tfwd imports. Otherwise the process may crash.
# isort: off
import torch
from transformers import BertModel, __version__ as transformers_version

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import fine_tuning_data as data

# isort: on
import fine_tuning_plan as planning
import fine_tuning_results_file as lines_file
import numpy as np
from fine_tuning import options, perform
from fine_tuning_plan import BATCH, CLIP, EPOCHS, WARMUP, Run
from fine_tuning_results_file import Lines
from rich.console import Console

from tfwd.finetune import learning_rate_schedule, scores
from tfwd.finetune.data import batches
from tfwd.finetune.data.corpus import Encoded


class Classifier(torch.nn.Module):
    """BERT, the mean over the tokens of the text, and a linear head.

    Args:
        pretrained: Path. Folder of the encoder.
        classes: int. Number of classes.
        seed: int. Seed of the head.
    """

    def __init__(self, pretrained: Path, classes: int, seed: int):
        super().__init__()
        self.bert = BertModel.from_pretrained(
            pretrained,
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        hidden = self.bert.config.hidden_size
        self.head = torch.nn.Linear(hidden, classes)
        kernel = data.first_head(seed, hidden, classes)
        with torch.no_grad():
            self.head.weight.copy_(torch.from_numpy(kernel.T))
            self.head.bias.zero_()

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = self.bert(ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


class Training:
    """A callable that makes a run: `training(run)` returns the fields of the run's line."""

    def __init__(self, folder: Path, pretrained: Path):
        self._pretrained = pretrained
        self._texts = data.read_texts(folder, pretrained)
        self.fingerprints = {task: texts.fingerprint() for task, texts in self._texts.items()}

    def __call__(self, run: Run) -> dict[str, Any]:
        corpus = self._texts[run.task]
        padding = corpus.vocabulary.padding_id
        model = Classifier(self._pretrained, len(corpus.vocabulary), run.seed)
        began = time.perf_counter()
        loss = train(model, corpus.encoded["train"], run, padding)
        diverged = not math.isfinite(loss)
        result: dict[str, Any] = {"diverged": diverged, "train_loss": None if diverged else loss}
        for part in ("valid", "test"):
            encoded = corpus.encoded[part]
            found = (None, None) if diverged else evaluate(model, encoded, padding)
            result[f"{part}_accuracy"], result[f"{part}_loss"] = found
            result[f"{part}_majority"] = scores.majority(encoded.labels)
        return {
            **result,
            "seconds": round(time.perf_counter() - began, 2),
            "data": self.fingerprints[run.task],
            "torch": torch.__version__,
            "transformers": transformers_version,
        }


def batch(part: Encoded, chosen: np.ndarray, padding: int) -> tuple[Any, Any, Any]:
    """Returns token ids, the attention mask, and labels."""
    texts = [part.ids[number] for number in chosen]
    ids = batches.pad(texts, padding, data.LENGTH).astype(np.int64)
    lengths = np.array([len(text) for text in texts])
    mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
    labels = part.labels[chosen].astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(labels)


def train(model: Classifier, part: Encoded, run: Run, padding: int) -> float:
    """Trains for all epochs, and returns the mean loss of the last epoch."""
    optimizer = torch.optim.Adam(model.parameters(), run.rate, eps=1e-7)
    steps = EPOCHS * len(batches.sizes(len(part.ids), BATCH))
    warmup = learning_rate_schedule.warmup_steps(steps, WARMUP)
    step, total = 0, 0.0
    model.train()
    for epoch in range(EPOCHS):
        total = 0.0
        for chosen in data.epoch_batches(part, run.seed, epoch):
            ids, mask, labels = batch(part, chosen, padding)
            loss = torch.nn.functional.cross_entropy(model(ids, mask), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            factor = (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup)
            optimizer.param_groups[0]["lr"] = run.rate * factor
            optimizer.step()
            step += 1
            total += loss.item() * len(chosen)
    return total / len(part.ids)


def evaluate(model: Classifier, part: Encoded, padding: int) -> tuple[float, float]:
    """Returns the accuracy and the mean loss."""
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for chosen in batches.by_length(part.ids, 64):
            ids, mask, labels = batch(part, chosen, padding)
            logits = model(ids, mask)
            loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
    return right / len(part.ids), loss / len(part.ids)


def main() -> int:
    """Makes the runs."""
    parser = options(__doc__ or "", planning.PEER_SEEDS)
    given: argparse.Namespace = parser.parse_args()
    missing = planning.undecided(lines_file.read(given.results))
    if missing:
        print(
            f"{given.results}: {len(missing)} selection runs are missing, which select the "
            "learning rates: run experiments/fine_tuning.py first",
            file=sys.stderr,
        )
        return 1

    def plan(lines: Lines) -> list[Run]:
        return planning.peer_plan(lines, given.seeds)

    return perform(given, plan, Training, Console())


if __name__ == "__main__":
    sys.exit(main())
