"""Configuration of the language model: the table of its keys, and values that must fit together.

A file in `configs/` starts with `default_config()` and changes some keys. A new switch needs a row
of `KEYS`, and code that uses it. The model gets the keys under `model.` as its `options`.
"""

from __future__ import annotations

import ml_collections

from tfwd.runs.errors import UserError
from tfwd.runs.settings.config import Schema
from tfwd.runs.settings.config_keys import OPTIMIZER_KEYS, TRAINING_KEYS, Key, MayChange
from tfwd.runs.settings.validators import (
    COUNT,
    DTYPE_POLICIES,
    FLAG,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    SEED,
    TEXT,
    WHOLE,
    Validator,
    is_whole_number,
    one_of,
    shown,
)
from tfwd.runs.training.optimizer import check_arguments

ALWAYS, IN_RUNS = MayChange.ALWAYS, MayChange.IN_RUNS

# Tokens are drawn one by one, a few thousand per second.
TOKENS = Validator(
    "a whole number, at least 0 and at most 1000000", lambda v: is_whole_number(v, 0, 10**6)
)
UNITS = Validator(
    "whole numbers of at least 1, one per layer, such as 300,150",
    lambda v: isinstance(v, tuple) and len(v) > 0 and all(is_whole_number(u, 1) for u in v),
)

KEYS = {
    "seed": Key(0, SEED, "seed of all random numbers: weights, masks, window lengths"),
    "data.path": Key(
        "",
        TEXT,
        "folder of train.txt, valid.txt, test.txt, or one file; '': embedded",
        ALWAYS,
    ),
    "data.level": Key("word", one_of("word", "char"), "kind of token"),
    "data.min_count": Key(2, COUNT, "tokens that are rarer in the training text become <unk>"),
    "data.batch_size": Key(32, COUNT, "number of columns into which the training text is cut"),
    "data.eval_batch_size": Key(10, COUNT, "number of columns of the other texts"),
    "data.window": Key(35, COUNT, "steps of truncated back-propagation (the mean, if random)"),
    "data.random_windows": Key(True, FLAG, "draw a random length for each window"),
    "data.eval_window": Key(
        70, COUNT, "steps of a window in evaluation; does not affect results", ALWAYS
    ),
    "model.embedding_dim": Key(128, COUNT, "size of a token's vector"),
    "model.hidden_units": Key((256, 128), UNITS, "units of each LSTM layer"),
    "model.tie_weights": Key(True, FLAG, "use the embedding's matrix in the softmax"),
    "model.weight_dropout": Key(
        0.5, RATE, "drop rate on each recurrent kernel, once per window", off=0.0
    ),
    "model.variational_noise": Key(
        0.0, NOT_NEGATIVE, "standard deviation of the noise on recurrent kernels"
    ),
    "model.noise_start_step": Key(0, WHOLE, "training step from which variational_noise acts"),
    "model.embedding_dropout": Key(0.1, RATE, "drop rate on whole rows of the embedding", off=0.0),
    "model.input_dropout": Key(
        0.4, RATE, "drop rate on the first input, one mask per window", off=0.0
    ),
    "model.hidden_dropout": Key(
        0.25, RATE, "drop rate between layers, one mask per window", off=0.0
    ),
    "model.output_dropout": Key(
        0.4, RATE, "drop rate on the last output, one mask per window", off=0.0
    ),
    "model.activation_regularization": Key(
        2.0, NOT_NEGATIVE, "alpha: factor of the penalty on large outputs"
    ),
    "model.temporal_activation_regularization": Key(
        1.0, NOT_NEGATIVE, "beta: factor of the penalty on changes of the output over time"
    ),
    "model.recompute": Key(
        True,
        FLAG,
        "draw masks again in the backward pass, store only seeds",
    ),
    "model.init_scale": Key(0.1, POSITIVE, "embedding weights start uniform in [-scale, scale]"),
    "model.dtype_policy": Key("float32", one_of(*DTYPE_POLICIES), "Keras's dtype policy"),
    **OPTIMIZER_KEYS,
    "optimizer.scale_lr_by_window": Key(
        True, FLAG, "multiply the learning rate by the window's length / data.window"
    ),
    **TRAINING_KEYS,
    "gradients.every": Key(
        0,
        WHOLE,
        "steps between measurements of the gradient's moments and noise; 0: off",
        IN_RUNS,
    ),
    "sample.tokens": Key(
        60,
        TOKENS,
        "tokens of the sample at the end of training; 0: none",
        ALWAYS,
    ),
    "sample.temperature": Key(
        0.8,
        NOT_NEGATIVE,
        "1: draw by the model's probabilities; 0: take the most likely token",
        ALWAYS,
    ),
    "sample.top_k": Key(0, WHOLE, "draw from the k most likely tokens; 0: from all", ALWAYS),
    "sample.prompt": Key("", TEXT, "text that the sample continues", ALWAYS),
}


def default_config() -> ml_collections.ConfigDict:
    """Returns the configuration with every key at its default; `KEYS` explains the keys.

    Returns:
        A `ConfigDict`, locked except for `optimizer.kwargs`. Assigning a value of another type is
        an error, except a whole number for a float.

    Example:
    >>> config = default_config()
    >>> config.model.weight_dropout = 0.3
    >>> config.model.hidden_units
    (256, 128)
    """
    return SCHEMA.default()


def _check_together(config: ml_collections.ConfigDict, to_train: bool) -> None:
    model, data = config.model, config.data
    if model.tie_weights and model.hidden_units[-1] != model.embedding_dim:
        raise UserError(
            f"model.hidden_units={shown(model.hidden_units)}: with model.tie_weights the last "
            f"layer must be as wide as model.embedding_dim={model.embedding_dim}"
        )
    if data.random_windows and data.window < 5:
        raise UserError(
            f"data.window={data.window}: with data.random_windows a window has at least 5 steps; "
            "give at least 5"
        )
    if to_train:
        check_arguments(config.optimizer)


SCHEMA = Schema(KEYS, _check_together)
