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

    NEVER = "the run must resume with the same value"
    IN_RUNS = "a run may resume with another value, but a sweep may not: its trials would differ"
    ALWAYS = "it does not affect results"


class Key(NamedTuple):
    """Row of the config table.

    Attributes:
        default: the default value. With `{}` the key is a group that takes any names.
        validator: the `Validator` of the values.
        meaning: str. The text for `--help`.
        may_change: when a resumed run or sweep may have another value.
        only_to_train: bool. True if only training needs a valid value. A trained model can be read
            with any value.
        off: the value that disables the key's feature.
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
        "name in keras.optimizers, or a name such as tfa.LAMB",
        only_to_train=True,
    ),
    "optimizer.learning_rate": Key(1.0, POSITIVE, "initial learning rate"),
    "optimizer.kwargs": Key(
        {},
        MAPPING,
        "further arguments, such as optimizer.kwargs.momentum=0.9",
    ),
    "optimizer.weight_decay": Key(
        0.0, NOT_NEGATIVE, "decay rate, decoupled from the gradient; 0: off"
    ),
    "optimizer.decay_scale": Key(
        "learning_rate",
        one_of("absolute", "learning_rate", "schedule"),
        "multiply the decay by 1, by the rate, or by rate / initial rate",
    ),
    "optimizer.decay_include": Key("", PATTERNS, "weights that are decayed; '': all"),
    "optimizer.decay_exclude": Key("", PATTERNS, "weights that are not decayed"),
    "optimizer.decay_multipliers": Key(
        "", MULTIPLIERS, "factors of the decay, such as embeddings=0.5"
    ),
    "optimizer.decay_sparse": Key(
        "table",
        one_of("table", "rows"),
        "decay the whole embedding table, or only the rows of the batch",
    ),
    "optimizer.decay_unused": Key(False, FLAG, "also decay weights that no gradient reaches"),
    "optimizer.l2": Key(0.0, NOT_NEGATIVE, "L2 penalty: add l2 * weight to the gradient; 0: off"),
    "optimizer.non_monotone_interval": Key(
        0,
        WHOLE,
        "average weights (NT-ASGD) after N epochs without improvement; 0: off",
    ),
    "optimizer.steps_per_update": Key(
        1, COUNT, "steps per update, which takes their mean gradient; workers send it once"
    ),
    "optimizer.clip_norm": Key(0.25, NOT_NEGATIVE, "maximum global norm of the gradient; 0: off"),
}

TRAINING_KEYS = {
    "training.epochs": Key(20, COUNT, "maximum number of passes over the training data", IN_RUNS),
    "training.patience": Key(0, WHOLE, "stop after N epochs without improvement; 0: off", IN_RUNS),
    "training.lr_decay_factor": Key(
        1.0,
        FACTOR,
        "factor of the learning rate on a plateau; 1: off",
        IN_RUNS,
    ),
    "training.lr_decay_patience": Key(
        1, COUNT, "number of epochs without improvement that make a plateau", IN_RUNS
    ),
    "training.min_learning_rate": Key(
        0.0, NOT_NEGATIVE, "lower limit of the learning rate", IN_RUNS
    ),
    "training.checkpoint_seconds": Key(
        60.0, NOT_NEGATIVE, "seconds between checkpoints in an epoch; 0: off", ALWAYS
    ),
    "training.checkpoint_steps": Key(
        0, WHOLE, "steps between checkpoints in an epoch; 0: off", ALWAYS
    ),
    "training.keep_checkpoints": Key(2, COUNT, "number of last checkpoints to keep", ALWAYS),
    "training.deterministic": Key(False, FLAG, "use reproducible operations (slower)", IN_RUNS),
    "training.tensorboard": Key(True, FLAG, "write a log for TensorBoard", ALWAYS),
    "training.log_steps": Key(20, COUNT, "steps between entries of the logs", ALWAYS),
    "numerics.check": Key(
        "raise",
        one_of("raise", "skip", "restore", "off"),
        "reaction to a non-finite step: stop, skip it, or restore the last epoch",
        IN_RUNS,
    ),
    "numerics.whole": Key(
        False,
        FLAG,
        "also check the inputs and outputs of each layer",
        IN_RUNS,
    ),
}
