"""tfwd-finetune: trains a text classifier on a pretrained encoder, or resumes a stopped run."""

from __future__ import annotations

import math
from typing import Any

from absl import flags

from tfwd.finetune.program import PROGRAM
from tfwd.runs import command_runner
from tfwd.runs.training import several_seeds
from tfwd.runs.training import train_command as training

ABOUT = """
Trains a pretrained encoder of the BERT family to classify texts, and shows its results.

    tfwd-finetune --config=finetune --workdir=runs/finetune
    tfwd-finetune --config=finetune --workdir=runs/mine --config.data.path=FOLDER
    tfwd-finetune --config=finetune --workdir=runs/five --seeds=5
    tfwd-classify --workdir=runs/mine --text="a text to label"

FOLDER has train.tsv, valid.tsv and test.tsv. Each line has a text, a tab and a label. Files in .csv
or .jsonl have named columns: set data.text and data.label. --config.model.pretrained is the folder
of the pretrained model, with config.json, model.safetensors and tokenizer.json as on Hugging Face.

The same command resumes a stopped run from its last checkpoint.
"""


def run() -> None:
    """Runs the console script."""
    command_runner.run(main, define, ABOUT, schema=PROGRAM.schema)


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    training.define(values)
    several_seeds.define(values)


def main(values: flags.FlagValues) -> int:
    """Trains, and returns the exit code."""
    if values.seeds == 1:
        return training.main(PROGRAM, values)
    config, workdir, count = values.config, values.workdir, values.seeds
    return training.main(
        PROGRAM,
        values,
        lambda stop, workers: several_seeds.train(
            PROGRAM, config, workdir, count, stop, numbers_to_compare, workers
        ),
    )


def numbers_to_compare(summary: dict[str, Any]) -> tuple[dict[str, float], str]:
    """Returns the numbers to compare between seeds, and why a run failed ("" if it succeeded).

    A run has failed if its best weights have no higher validation accuracy than a classifier that
    always predicts the most frequent class.
    """
    found = {
        f"{part} {name}": summary["texts"][part][key]
        for part in ("valid", "test")
        for name, key in (("accuracy", "accuracy"), ("macro F1", "macro_f1"), ("loss", "loss"))
    }
    valid = summary["texts"]["valid"]
    failed = (
        "" if valid["accuracy"] > valid["majority"] else "no better than the most frequent class"
    )
    return {k: math.nan if v is None else v for k, v in found.items()}, failed
