"""Effect of decoupled decay and averaging on a language model's perplexity.

    python experiments/decay_and_averaging.py strength --data=FOLDER
    python experiments/decay_and_averaging.py decay --data=FOLDER
    python experiments/decay_and_averaging.py averaging --data=FOLDER

Each question has one model and one budget. FOLDER has train.txt, valid.txt and test.txt.

- strength: no decay, coupled L2 and decoupled decay, with two strengths each and one seed. Coupled
  L2 adds l2 * w to the gradient, which Adam then divides by its second moment. It uses Adam without
  weight dropout.
- decay: the same with several seeds. Each decay has the strength with the better validation loss.
- averaging: plain SGD, and SGD with averaged weights (NT-ASGD). Averaging begins when the
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
# Plain SGD at a large constant rate, as in the paper. The interval is short for these few epochs.
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
    """Runs the experiment that the first argument names."""
    if len(sys.argv) < 2 or sys.argv[1] not in EXPERIMENTS:
        sys.exit(
            "the first argument must be the name of an experiment: "
            f"python {sys.argv[0]} {'|'.join(EXPERIMENTS)} --data=FOLDER"
        )
    language_model_experiment.answer(EXPERIMENTS[sys.argv.pop(1)], __doc__.splitlines()[0])


if __name__ == "__main__":
    main()
