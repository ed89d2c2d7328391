"""The plain fine-tuning of `fine_tuning.py` by Hugging Face's BERT in PyTorch, held against ours.

    python experiments/fine_tuning_torch.py --pretrained=.venv/minilm

It needs torch, transformers, tokenizers and safetensors, and nothing of tfwd. It takes the texts
and the learning rate of runs that `fine_tuning.py` made, and does the same by its own code: order
of texts, batches, mean over the text, a new head, Adam, the schedule, clipped gradients, the best
epoch by the validation loss. Heads begin with other random numbers, so that means are compared.
What is finished is not made again. It ends in a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

BATCH, LENGTH, WARMUP, CLIP = 16, 64, 0.1, 1.0
Texts = tuple[list[list[int]], list[int]]


class Classifier(torch.nn.Module):
    """BERT, the mean over the places of the text, and a linear head."""

    def __init__(self, pretrained: str, classes: int):
        super().__init__()
        self.bert = transformers.BertModel.from_pretrained(
            pretrained,
            add_pooling_layer=False,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.head = torch.nn.Linear(self.bert.config.hidden_size, classes)
        torch.nn.init.trunc_normal_(self.head.weight, std=0.02, a=-0.04, b=0.04)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, ids: Any, mask: Any) -> Any:
        hidden = self.bert(ids, attention_mask=mask).last_hidden_state
        weights = mask[:, :, None].to(hidden.dtype)
        return self.head((hidden * weights).sum(1) / weights.sum(1))


def read(folder: Path, tokenizer: Any) -> dict[str, Texts]:
    """The three parts in numbers; labels by the order of their names."""
    parts, classes = {}, None
    for part in ("train", "valid", "test"):
        lines = (folder / f"{part}.tsv").read_text().rstrip("\n").split("\n")
        texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
        classes = classes or sorted(set(labels))
        ids = [tokenizer.encode(text.strip()).ids for text in texts]
        parts[part] = ids, [classes.index(label.strip()) for label in labels]
    return parts


def batches(texts: Texts, order: np.ndarray, size: int) -> Iterator[tuple[Any, Any, Any]]:
    """Ids, where there is text, and labels."""
    ids, labels = texts
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        longest = max(len(ids[i]) for i in chosen)
        padded = np.zeros((len(chosen), longest), np.int64)
        mask = np.zeros((len(chosen), longest), np.int64)
        for row, i in enumerate(chosen):
            padded[row, : len(ids[i])] = ids[i]
            mask[row, : len(ids[i])] = 1
        answer = torch.tensor([labels[i] for i in chosen])
        yield torch.from_numpy(padded), torch.from_numpy(mask), answer


def scores(model: Classifier, texts: Texts) -> tuple[float, float]:
    """The mean loss and the accuracy, in percent."""
    model.eval()
    loss = right = 0.0
    order = np.argsort([-len(ids) for ids in texts[0]], kind="stable")
    with torch.no_grad():
        for ids, mask, labels in batches(texts, order, 64):
            logits = model(ids, mask)
            loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
    return loss / len(order), 100 * right / len(order)


def train(parts: dict[str, Texts], pretrained: str, rate: float, epochs: int, seed: int) -> float:
    """The test accuracy at the epoch with the lowest validation loss."""
    torch.manual_seed(seed)
    model = Classifier(pretrained, max(parts["train"][1]) + 1)
    optimizer = torch.optim.Adam(model.parameters(), rate, eps=1e-7)
    count = len(parts["train"][0])
    steps = epochs * math.ceil(count / BATCH)
    warmup = round(WARMUP * steps)
    step, best, accuracy = 0, math.inf, 0.0
    for epoch in range(epochs):
        model.train()
        order = np.random.default_rng([seed, epoch]).permutation(count)
        for ids, mask, labels in batches(parts["train"], order, BATCH):
            loss = torch.nn.functional.cross_entropy(model(ids, mask), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            factor = (step + 1) / warmup if step < warmup else (steps - step) / (steps - warmup)
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            step += 1
        valid, _ = scores(model, parts["valid"])
        if valid < best:
            best, accuracy = valid, scores(model, parts["test"])[1]
    return accuracy


def ours(folder: Path) -> dict[int, float]:
    """The test accuracy by the seed, of the runs in a folder."""
    found = {}
    for path in folder.glob("*.json"):
        texts = json.loads(path.read_text())["texts"]
        if texts:
            found[int(path.stem)] = 100 * texts["test"]["accuracy"]
    return found


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pretrained", default=".venv/minilm", help="folder of the encoder")
    parser.add_argument("--runs", default="runs/fine_tuning", help="folder of fine_tuning.py")
    parser.add_argument("--cases", nargs="*", default=["trec-300", "sst2-300"], help="of these")
    parser.add_argument("--rate", type=float, default=1e-4, help="the learning rate")
    parser.add_argument("--epochs", type=int, default=5, help="as those runs have")
    parser.add_argument("--seeds", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    """Trains; prints a table and a line of JSON."""
    given = options()
    torch.set_num_threads(1)
    tokenizer = tokenizers.Tokenizer.from_file(f"{given.pretrained}/tokenizer.json")
    tokenizer.no_padding()
    tokenizer.enable_truncation(LENGTH)
    lines = ["| case | tfwd | PyTorch | difference |", "|---|---|---|---|"]
    all_found = {}
    for case in given.cases:
        parts = read(Path(given.runs) / "data" / case, tokenizer)
        kept = Path(given.runs) / case / f"plain-{given.rate:g}" / "torch"
        kept.mkdir(parents=True, exist_ok=True)
        theirs = {}
        for seed in range(given.seeds):
            path = kept / f"{seed}.json"
            if not path.exists():
                found = train(parts, given.pretrained, given.rate, given.epochs, seed)
                path.with_suffix(".writing").write_text(json.dumps(found))
                os.replace(path.with_suffix(".writing"), path)
            theirs[seed] = json.loads(path.read_text())
            print(f"{case}, seed {seed}: {theirs[seed]:.2f}", flush=True)
        mine = ours(kept.parent)
        both = [list(mine.values()), list(theirs.values())]
        errors = [statistics.stdev(one) / math.sqrt(len(one)) for one in both]
        difference = statistics.mean(both[0]) - statistics.mean(both[1])
        shown = [
            f"{statistics.mean(one):.2f} ± {statistics.stdev(one):.2f} ({len(one)} seeds)"
            for one in both
        ]
        error = math.hypot(*errors)
        lines.append(f"| {case} | {' | '.join(shown)} | {difference:+.2f}, error {error:.2f} |")
        all_found[case] = {"tfwd": mine, "torch": theirs, "standard_error": error}
    print("\n".join(lines))
    print(json.dumps({"experiment": "fine_tuning_torch", "test_accuracy": all_found}))


if __name__ == "__main__":
    main()
