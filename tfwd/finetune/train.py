"""tfwd-finetune: trains a classifier of texts on a pretrained encoder, or goes on with a run."""

from __future__ import annotations

from absl import flags

from tfwd.finetune.program import PROGRAM
from tfwd.runs import app
from tfwd.runs import train as training

ABOUT = """
Trains a pretrained encoder, of the BERT family, to classify texts, and shows what came out.

    tfwd-finetune --config=configs/finetune.py --workdir=runs/finetune
    tfwd-finetune --config=configs/finetune.py --workdir=runs/mine --config.data.path=FOLDER
    tfwd-finetune --config=configs/finetune.py --workdir=runs/five --seeds=5
    tfwd-classify --workdir=runs/mine --text="a text to label"

FOLDER has train.tsv, valid.tsv and test.tsv: lines of text, a tab, and the label. The same as .csv
or .jsonl has names of columns, which data.text and data.label say. --config.model.pretrained names
the folder of the pretrained model: config.json, model.safetensors and tokenizer.json, as Hugging
Face has them.

A run that was stopped, by Ctrl-C or by anything else, goes on where its last checkpoint stood
when the same command is given again.
"""


def run() -> None:
    """The console script."""
    app.run(main, define, ABOUT, schema=PROGRAM.schema)


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    training.define(values)


def main(values: flags.FlagValues) -> int:
    """Trains; returns the exit code."""
    return training.main(PROGRAM, values)
