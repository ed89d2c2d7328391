"""Rows of the config table, and the keys of all programs: optimizer, training and numerics.

A program changes a default with `key._replace(default=...)` in its own table.
"""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from tfwd.runs.settings.validators import (
    COUNT,
    FACTOR,
    FLAG,
    MAPPING,
    MULTIPLIERS,
    NOT_NEGATIVE,
    PATTERNS,
    POSITIVE,
    WHOLE,
    Validator,
    one_of,
)
from tfwd.runs.training.optimizer import OPTIMIZER


class MayChange(enum.Enum):
    """When a resumed run or sweep may have another value of a key."""

    NEVER = "the run must go on with the same value"
    IN_RUNS = "a run may go on with another value; a sweep may not, as its trials would differ"
    ALWAYS = "it has no influence on results"


class Key(NamedTuple):
    """Row of the config table.

    Attributes:
        default: the default value. With `{}` the key is a group that takes any names.
        validator: the `Validator` of the values.
        meaning: str. The text for `--help`.
        may_change: when a resumed run or sweep may have another value.
        only_to_train: bool. True if a trained model can be read with any value.
        off: the value that switches the key's feature off.
    """

    default: Any
    validator: Validator
    meaning: str
    may_change: MayChange = MayChange.NEVER
    only_to_train: bool = False
    off: Any = None


ALWAYS, IN_RUNS = MayChange.ALWAYS, MayChange.IN_RUNS

OPTIMIZER_KEYS = {
    "optimizer.name": Key(
        "sgd",
        OPTIMIZER,
        "of keras.optimizers, or tfa.LAMB and the like",
        only_to_train=True,
    ),
    "optimizer.learning_rate": Key(1.0, POSITIVE, "at the start"),
    "optimizer.kwargs": Key(
        {},
        MAPPING,
        "further arguments, as optimizer.kwargs.momentum=0.9",
    ),
    "optimizer.weight_decay": Key(0.0, NOT_NEGATIVE, "decoupled from the gradient; 0: off"),
    "optimizer.decay_scale": Key(
        "learning_rate",
        one_of("absolute", "learning_rate", "schedule"),
        "decay times 1, the rate, or the rate over the first one",
    ),
    "optimizer.decay_include": Key("", PATTERNS, "weights that are decayed; '': all"),
    "optimizer.decay_exclude": Key("", PATTERNS, "weights that are not decayed"),
    "optimizer.decay_multipliers": Key("", MULTIPLIERS, "of the decay, as embeddings=0.5"),
    "optimizer.decay_sparse": Key(
        "table",
        one_of("table", "rows"),
        "decay the whole embedding, or the window's words",
    ),
    "optimizer.decay_unused": Key(False, FLAG, "decay weights that no gradient reaches too"),
    "optimizer.l2": Key(0.0, NOT_NEGATIVE, "times the weight, added to the gradient; 0: off"),
    "optimizer.non_monotone_interval": Key(
        0,
        WHOLE,
        "average weights (NT-ASGD) after epochs without a better one; 0: off",
    ),
    "optimizer.clip_norm": Key(0.25, NOT_NEGATIVE, "largest global norm of the gradient; 0: off"),
}

TRAINING_KEYS = {
    "training.epochs": Key(20, COUNT, "passes over the training text, at most", IN_RUNS),
    "training.patience": Key(
        0, WHOLE, "stop after so many epochs without a better one; 0: off", IN_RUNS
    ),
    "training.lr_decay_factor": Key(
        1.0,
        FACTOR,
        "times the learning rate on a plateau; 1: off",
        IN_RUNS,
    ),
    "training.lr_decay_patience": Key(
        1, COUNT, "epochs without a better one that make a plateau", IN_RUNS
    ),
    "training.min_learning_rate": Key(0.0, NOT_NEGATIVE, "the decay stops here", IN_RUNS),
    "training.checkpoint_seconds": Key(
        60.0, NOT_NEGATIVE, "between checkpoints in an epoch; 0: off", ALWAYS
    ),
    "training.checkpoint_steps": Key(0, WHOLE, "between checkpoints in an epoch; 0: off", ALWAYS),
    "training.keep_checkpoints": Key(2, COUNT, "last checkpoints that are kept", ALWAYS),
    "training.deterministic": Key(
        False, FLAG, "operations with the same bits each time (slower)", IN_RUNS
    ),
    "training.tensorboard": Key(True, FLAG, "write a log for TensorBoard", ALWAYS),
    "training.log_steps": Key(20, COUNT, "steps between entries of the logs", ALWAYS),
    "numerics.check": Key(
        "raise",
        one_of("raise", "skip", "restore", "off"),
        "stop at a step that is not finite, leave it out, or go back",
        IN_RUNS,
    ),
    "numerics.whole": Key(
        False,
        FLAG,
        "look for it in each layer too, besides loss, gradient and rate",
        IN_RUNS,
    ),
}
