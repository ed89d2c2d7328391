"""The table of the configuration: every key, its default, its validator and its meaning.

It is the one source of the defaults, of the check of values and of the text of `--help`.
"""

from __future__ import annotations

from typing import Any

from tfwd.lm import validators
from tfwd.lm.errors import suggest
from tfwd.lm.validators import (
    COUNT,
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    TEXT,
    UNITS,
    WHOLE,
    one_of,
)

# key: (default, validator, meaning)
KEYS: dict[str, tuple[Any, validators.Validator, str]] = {
    "seed": (0, validators.SEED, "of everything that is random: weights, masks, window lengths"),
    "data.path": (
        "",
        TEXT,
        "folder of train.txt, valid.txt, test.txt, or one file; '': embedded",
    ),
    "data.level": ("word", one_of("word", "char"), "what a token is"),
    "data.min_count": (2, COUNT, "rarer tokens of the training text are unknown tokens"),
    "data.batch_size": (32, COUNT, "columns that the training text is cut into"),
    "data.eval_batch_size": (10, COUNT, "columns that the other texts are cut into"),
    "data.window": (35, COUNT, "steps of truncated back-propagation (the mean, if random)"),
    "data.random_windows": (True, FLAG, "draw each window's length anew"),
    "data.eval_window": (70, COUNT, "steps of one window in evaluation; no influence on results"),
    "model.embedding_dim": (128, COUNT, "size of a token's vector"),
    "model.hidden_units": ((256, 128), UNITS, "units of each LSTM layer"),
    "model.tie_weights": (True, FLAG, "the softmax uses the embedding's matrix"),
    "model.weight_dropout": (0.5, RATE, "on each recurrent kernel, once a window"),
    "model.variational_noise": (0.0, NOT_NEGATIVE, "deviation of the noise on recurrent kernels"),
    "model.noise_start_step": (0, WHOLE, "training step with which the noise begins"),
    "model.embedding_dropout": (0.1, RATE, "on whole rows of the embedding"),
    "model.input_dropout": (0.4, RATE, "on the first layer's input, one mask a window"),
    "model.hidden_dropout": (0.25, RATE, "between the layers, one mask a window"),
    "model.output_dropout": (0.4, RATE, "on the last layer's output, one mask a window"),
    "model.activation_regularization": (2.0, NOT_NEGATIVE, "alpha: on the size of the output"),
    "model.temporal_activation_regularization": (1.0, NOT_NEGATIVE, "beta: on its changes"),
    "model.recompute": (
        True,
        FLAG,
        "draw masks again in the backward pass, keep only seeds",
    ),
    "model.init_scale": (0.1, POSITIVE, "embedding weights start uniform in [-scale, scale]"),
    "model.dtype_policy": ("float32", one_of(*validators.DTYPE_POLICIES), "Keras's dtype policy"),
    "optimizer.name": (
        "sgd",
        validators.OPTIMIZER,
        "of keras.optimizers, or tfa.LAMB and the like",
    ),
    "optimizer.learning_rate": (1.0, POSITIVE, "at the start"),
    "optimizer.kwargs": (
        {},
        validators.MAPPING,
        "further arguments, as optimizer.kwargs.momentum=0.9",
    ),
    "optimizer.weight_decay": (0.0, NOT_NEGATIVE, "decoupled from the gradient; 0: off"),
    "optimizer.decay_scale": (
        "learning_rate",
        one_of("absolute", "learning_rate", "schedule"),
        "decay times 1, the rate, or the rate over the first one",
    ),
    "optimizer.decay_include": ("", validators.PATTERNS, "weights that are decayed; '': all"),
    "optimizer.decay_exclude": ("", validators.PATTERNS, "weights that are not decayed"),
    "optimizer.decay_multipliers": ("", validators.MULTIPLIERS, "of the decay, as embeddings=0.5"),
    "optimizer.decay_sparse": (
        "table",
        one_of("table", "rows"),
        "decay the whole embedding, or the window's words",
    ),
    "optimizer.decay_unused": (False, FLAG, "decay weights that no gradient reaches too"),
    "optimizer.l2": (0.0, NOT_NEGATIVE, "times the weight, added to the gradient; 0: off"),
    "optimizer.non_monotone_interval": (
        0,
        WHOLE,
        "average weights (NT-ASGD) after epochs without a better one; 0: off",
    ),
    "optimizer.clip_norm": (0.25, NOT_NEGATIVE, "largest global norm of the gradient; 0: off"),
    "optimizer.scale_lr_by_window": (True, FLAG, "learning rate times length over data.window"),
    "training.epochs": (20, COUNT, "passes over the training text, at most"),
    "training.patience": (0, WHOLE, "stop after so many epochs without a better one; 0: off"),
    "training.lr_decay_factor": (
        1.0,
        validators.FACTOR,
        "times the learning rate on a plateau; 1: off",
    ),
    "training.lr_decay_patience": (1, COUNT, "epochs without a better one that make a plateau"),
    "training.min_learning_rate": (0.0, NOT_NEGATIVE, "the decay stops here"),
    "training.checkpoint_seconds": (60.0, NOT_NEGATIVE, "between checkpoints in an epoch; 0: off"),
    "training.checkpoint_steps": (0, WHOLE, "between checkpoints in an epoch; 0: off"),
    "training.keep_checkpoints": (2, COUNT, "last checkpoints that are kept"),
    "training.deterministic": (False, FLAG, "operations with the same bits each time (slower)"),
    "training.tensorboard": (True, FLAG, "write a log for TensorBoard"),
    "training.log_steps": (20, COUNT, "steps between entries of the logs"),
    "gradients.every": (
        0,
        WHOLE,
        "steps between measurements of the gradient's moments and noise; 0: off",
    ),
    "sample.tokens": (
        60,
        validators.TOKENS,
        "tokens of the sample at the end of training; 0: none",
    ),
    "sample.temperature": (
        0.8,
        NOT_NEGATIVE,
        "1: as the model says; lower: surer; 0: likeliest",
    ),
    "sample.top_k": (0, WHOLE, "draw among the k likeliest only; 0: among all"),
    "sample.prompt": ("", TEXT, "text that the sample goes on from"),
}


def known(key: str) -> bool:
    """Whether the dotted `key` is one of the table, or an argument in `optimizer.kwargs`."""
    return key in KEYS or (key.startswith("optimizer.kwargs.") and key.count(".") == 2)


def unknown(key: str) -> str:
    """The error message for a dotted key that does not exist: it lists the near ones.

    Example:
        >>> unknown("training.epoch")
        'there is no config key training.epoch; did you mean training.epochs?'
    """
    if key in {name.rpartition(".")[0] for name in KEYS}:
        within = [name for name in KEYS if name.startswith(f"{key}.")]
        return f"{key} is a group of config keys; its keys are {', '.join(within)}"
    # By the last names alone: those of one group begin alike. A right name in another group, or
    # without its group, is found too; those of the key's own group come first.
    own = key.partition(".")[0]
    lasts = suggest(key.rpartition(".")[2], dict.fromkeys(name.rpartition(".")[2] for name in KEYS))
    found = [name for last in lasts for name in KEYS if name.rpartition(".")[2] == last]
    found.sort(key=lambda name: not name.startswith(f"{own}."))
    if found:
        return f"there is no config key {key}; did you mean {' or '.join(found[:3])}?"
    within = [name for name in KEYS if name.startswith(f"{own}.")]
    if within:
        return f"there is no config key {key}; those of {own} are {', '.join(within)}"
    groups = dict.fromkeys(name.partition(".")[0] for name in KEYS)
    return f"there is no config key {key}; the groups are {', '.join(groups)} (see --help)"


def describe() -> str:
    """The keys, their defaults and what they mean, as text for `--help`."""
    lines: list[str] = []
    group = None
    for key, (default, _, meaning) in KEYS.items():
        if group not in (None, key.partition(".")[0]):
            lines.append("")
        group = key.partition(".")[0]
        lines.append(f"  {f'{key}={shown(default)}':<46} {meaning}")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A value as it would be given on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value[:200] or "''"
    if isinstance(value, int):
        text = hex(value) if abs(value) > 1 << 256 else str(value)  # Python writes no longer one
    else:
        text = "{}" if not isinstance(value, float) and not value else repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
