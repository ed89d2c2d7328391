"""Effect of decoupled decay and averaging on a language model's perplexity.

    python experiments/decay_and_averaging.py strength --data=FOLDER
    python experiments/decay_and_averaging.py decay --data=FOLDER
    python experiments/decay_and_averaging.py averaging --data=FOLDER

Each question has one model and one budget. FOLDER has train.txt, valid.txt and test.txt.

- strength, with Adam and without weight dropout: none, coupled L2 (l2 * w added to the gradient,
  which Adam then divides by its second moment) and decoupled decay, two strengths each, one seed;
- decay: the better strength of each by the validation text, several seeds;
- averaging, with SGD: plain SGD, and SGD with averaged weights (NT-ASGD). Averaging begins when the
  validation loss is no better than the best of all epochs except the last few.

Output: a table in Markdown, a plot, and one line of JSON.
"""

from __future__ import annotations

import sys

import language_model_experiment

CONFIG = "configs/wikitext2_small.py"
# Without weight dropout, so that decay has an overfitting model to regularize.
BARE = {"model.weight_dropout": 0.0}
STRENGTH = {
    "no decay": BARE,
    "coupled L2 1e-6": {**BARE, "optimizer.l2": 1e-6},
    "coupled L2 1e-5": {**BARE, "optimizer.l2": 1e-5},
    "decoupled decay 0.1": {**BARE, "optimizer.weight_decay": 0.1},
    "decoupled decay 0.3": {**BARE, "optimizer.weight_decay": 0.3},
}
CHOSEN = ("no decay", "coupled L2 1e-5", "decoupled decay 0.1")
DECAY = {kind: STRENGTH[kind] for kind in CHOSEN}
# As in the paper, plain SGD at a large constant rate; the interval is short for so few epochs.
SGD = {
    "optimizer.name": "sgd",
    "optimizer.learning_rate": 20.0,
    "training.lr_decay_factor": 1.0,
    "training.epochs": 16,
}
AVERAGING = {
    "SGD": SGD,
    "NT-ASGD": {**SGD, "optimizer.non_monotone_interval": 3},
}
EXPERIMENTS = {
    "strength": language_model_experiment.Experiment(
        "strength", CONFIG, STRENGTH, "no decay", "decay", seeds=1, runs="decay"
    ),
    "decay": language_model_experiment.Experiment("decay", CONFIG, DECAY, "no decay", "decay"),
    "averaging": language_model_experiment.Experiment(
        "averaging", CONFIG, AVERAGING, "SGD", "optimizer"
    ),
}


def main() -> None:
    """Reads which question is meant, and answers it."""
    if len(sys.argv) < 2 or sys.argv[1] not in EXPERIMENTS:
        sys.exit(f"say which: python {sys.argv[0]} {'|'.join(EXPERIMENTS)} --data=FOLDER")
    language_model_experiment.answer(EXPERIMENTS[sys.argv.pop(1)], __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
