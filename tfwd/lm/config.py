"""The configuration of the programs: made, checked, saved and loaded.

The keys stand in `tfwd.lm.keys`. A file in `configs/` begins with `default_config()` and changes
what is its own. The result is locked: a key that is not in the table is an error. Only
`optimizer.kwargs` is open, as it takes whatever the chosen optimizer takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

import ml_collections

from tfwd.lm import validators
from tfwd.lm.errors import UserError, suggest
from tfwd.lm.files import read_json, write_atomically
from tfwd.lm.keys import KEYS, known, shown, unknown


def default_config() -> ml_collections.ConfigDict:
    """The configuration with every key at its default; `tfwd.lm.keys` explains the keys.

    Returns:
        A `ConfigDict`, locked except for `optimizer.kwargs`. Assigning a value of another type
        is an error too (a whole number for a float is taken).

    Example:
        >>> config = default_config()
        >>> config.model.weight_dropout = 0.3
        >>> config.model.hidden_units
        (256, 128)
    """
    config = ml_collections.ConfigDict()
    for key, (default, _, _) in KEYS.items():
        group, _, name = key.rpartition(".")
        if group and group not in config:
            config[group] = ml_collections.ConfigDict()
        holder = config[group] if group else config
        holder[name] = ml_collections.ConfigDict(default) if isinstance(default, dict) else default
    return lock(config)


def lock(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Locks `config` against new keys, in place, except for `optimizer.kwargs`; returns it."""
    config.lock()
    config.optimizer.kwargs.unlock()
    return config


def check(config: ml_collections.ConfigDict, together: bool = True, to_train: bool = True) -> None:
    """Verifies every value.

    Args:
        config: a configuration with the keys of `default_config`.
        together: whether to verify too that they go together.
        to_train: whether the optimizer, which a trained model needs no more, must be there too.

    Raises:
        UserError: for the first wrong value: the key, the value, and what is right. Also for a
            key that is missing or unknown, and for two values that do not go together.

    Example:
        >>> config = default_config()
        >>> config.model.weight_dropout = 1.0
        >>> check(config)
        Traceback (most recent call last):
        ...
        tfwd.lm.errors.UserError: model.weight_dropout=1.0: give a rate: at least 0, below 1
    """
    check_keys(config)
    for key, (_, validator, _) in KEYS.items():
        value = _read(config, key)
        if not validator.is_valid(value) and (to_train or key != "optimizer.name"):
            raise UserError(
                f"{key}={shown(value)}: give {validator.expected}{validator.hint(value)}"
            )
    for name, value in config.optimizer.kwargs.items():
        if not validators.written(value):
            raise UserError(
                f"optimizer.kwargs.{name}={shown(value)}: give a finite number, a text, true, "
                "false, None or a list of them; config.json, by which a run goes on, holds no other"
            )
    if together:
        _check_together(config, to_train)


def check_keys(config: ml_collections.ConfigDict) -> None:
    """Verifies that the configuration has the keys of the table, and no others.

    Raises:
        UserError: a key is missing, cannot be read, or does not exist.
    """
    for key, (_, validator, _) in KEYS.items():
        value = _read(config, key)
        if isinstance(value, int) and abs(value) >> 256:  # Python does not write it, absl would
            raise UserError(f"{key}={shown(value)}: give {validator.expected}")
    if not isinstance(config.optimizer.kwargs, ml_collections.ConfigDict):
        given = shown(config.optimizer.kwargs)
        raise UserError(f"optimizer.kwargs={given}: give {validators.MAPPING.expected}")
    try:
        keys = flat_keys(config)
    except TypeError as error:  # ml_collections sorts them
        raise UserError(f"a key of the configuration is no text: {error}") from error
    for key in keys:
        if not known(key):
            raise UserError(unknown(key))


def _read(config: Any, key: str) -> Any:
    value = config
    for name in key.split("."):
        if not isinstance(value, ml_collections.ConfigDict) or name not in value:
            raise UserError(f"the configuration has no {key}; begin with default_config()")
        try:
            value = value[name]
        except Exception as error:  # a placeholder, or a reference that cannot be computed
            reason = str(error).partition("\n")[0]
            raise UserError(f"{key} of the configuration has no value: {reason}") from error
    return value


def _check_together(config: ml_collections.ConfigDict, to_train: bool) -> None:
    model, data = config.model, config.data
    if model.tie_weights and model.hidden_units[-1] != model.embedding_dim:
        raise UserError(
            f"model.hidden_units={shown(model.hidden_units)}: with model.tie_weights the last "
            f"layer must be as wide as model.embedding_dim={model.embedding_dim}"
        )
    if data.random_windows and data.window < 5:
        raise UserError(
            f"data.window={data.window}: with data.random_windows a window has at least 5 steps"
        )
    name = config.optimizer.name
    for argument in config.optimizer.kwargs if to_train else ():
        there = validators.arguments(name)
        if argument not in there:
            raise UserError(
                f"optimizer.kwargs.{argument}: {name} has no such argument; "
                f"{_alternatives(argument, there)}"
            )
        value = config.optimizer.kwargs[argument]
        right = validators.same_kind(value, there[argument])
        if right:
            raise UserError(f"optimizer.kwargs.{argument}={shown(value)}: {name} takes {right}")


def flat_keys(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
    """The dotted keys of all values in `config`, groups opened."""
    keys = []
    if prefix.count(".") > 5:  # no config is so deep but one that holds itself
        return [prefix.rstrip(".")]
    for name, value in config.items():
        key = f"{prefix}{name}"
        inner = isinstance(value, ml_collections.ConfigDict)
        keys += flat_keys(value, f"{key}.") if inner else [key]
    return keys


def save(config: ml_collections.ConfigDict, path: str | os.PathLike[str]) -> None:
    """Writes `config` as JSON, in one step; `load` reads it.

    Raises:
        UserError: the file cannot be written.
    """
    write_atomically(path, json.dumps(config.to_dict(), indent=2) + "\n")


def load(path: str | os.PathLike[str], to_train: bool = True) -> ml_collections.ConfigDict:
    """Reads what `save` wrote, and checks it.

    A key that the file does not have (it may be older than the key) gets its default.

    Args:
        path: the file.
        to_train: as in `check`. The other Keras may have had another optimizer.

    Raises:
        UserError: the file is missing, damaged, or has a wrong value or an unknown key.
    """
    content = read_json(path, "configuration")
    config = default_config()
    try:
        content["model"]["hidden_units"] = tuple(content["model"]["hidden_units"])
        config.update(content)
    except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
        reason = str(error.args[0] if error.args else error).partition("\n")[0]
        raise UserError(f"{path} is not a configuration of this program: {reason}") from error
    check(config, to_train=to_train)
    return config


def _alternatives(name: str, there: Iterable[str]) -> str:
    found = suggest(name, there)
    return f"did you mean {' or '.join(found)}?" if found else f"it has {', '.join(there)}"
