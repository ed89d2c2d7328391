"""Configuration of a program: makes, checks and stores it with a table of its keys.

A program adds a key with one row: its default, its validator, its meaning, and whether a run may
resume with another value. A configuration is a locked `ConfigDict`: a key that is not in the table
is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from tfwd.runs.errors import UserError, suggest
from tfwd.runs.settings import validators
from tfwd.runs.settings.config_keys import Key, MayChange
from tfwd.runs.settings.validators import MAPPING, shown
from tfwd.runs.storage.file_access import read_json, write_file


class Schema:
    """Table of a program's config keys, with the checks of their values.

    Args:
        keys: the rows of the table, by dotted key.
        check_together: function that raises a `UserError` for values that do not fit together. The
            second argument is True if the configuration is used for training.
        example: str. The name of a config of the program, for messages.

    Example:
    >>> schema = Schema({"training.epochs": Key(20, validators.COUNT, "passes over the text")})
    >>> config = schema.default()
    >>> config.training.epochs = 0
    >>> schema.check(config)
    Traceback (most recent call last):
    ...
    tfwd.runs.errors.UserError: training.epochs=0: give a whole number, at least 1 and at most \
2147483647
    """

    def __init__(
        self,
        keys: Mapping[str, Key],
        check_together: Callable[[ml_collections.ConfigDict, bool], None] = lambda config, train: (
            None
        ),
        example: str = "quickstart",
    ):
        self.keys = dict(keys)
        self.example = example
        self._check_together = check_together
        self._open = [key for key, row in self.keys.items() if row.default == {}]

    def default(self) -> ml_collections.ConfigDict:
        """Returns a locked configuration with the default of every key."""
        config = ml_collections.ConfigDict()
        for key, row in self.keys.items():
            group, _, name = key.rpartition(".")
            if group and group not in config:
                config[group] = ml_collections.ConfigDict()
            value = ml_collections.ConfigDict(row.default) if key in self._open else row.default
            (config[group] if group else config)[name] = value
        return self.lock(config)

    def lock(self, config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
        """Locks `config` in place, except groups that take any name, and returns it."""
        config.lock()
        for key in self._open:
            get(config, key).unlock()
        return config

    def check(
        self, config: ml_collections.ConfigDict, together: bool = True, to_train: bool = True
    ) -> None:
        """Checks every value.

        Args:
            config: a configuration with the keys of `default`.
            together: bool. Also checks that the values fit together.
            to_train: bool. True if the configuration is used for training. False reads a trained
                model.

        Raises:
            UserError: a value is wrong (the message has the key, the value and the expected value),
                a key is missing or unknown, or values do not fit together.
        """
        self.check_keys(config)
        for key, row in self.keys.items():
            value = _read(config, key)
            if (to_train or not row.only_to_train) and not row.validator.is_valid(value):
                expected = f"{row.validator.expected}{row.validator.hint(value)}"
                raise UserError(f"{key}={shown(value)}: give {expected}")
        for group in self._open:
            for name, value in get(config, group).items():
                if not validators.is_json_value(value):
                    raise UserError(
                        f"{group}.{name}={shown(value)}: give a finite number, a text, true, "
                        "false, None or a list of these; config.json, from which a run resumes, "
                        "cannot store other values"
                    )
        if together and self._check_together is not None:
            self._check_together(config, to_train)

    def check_keys(self, config: ml_collections.ConfigDict) -> None:
        """Checks that the configuration has the keys of the table, and no others.

        Raises:
            UserError: a key is missing, unreadable or unknown.
        """
        for key, row in self.keys.items():
            value = _read(config, key)
            if isinstance(value, int) and abs(value) >> 256:  # Python does not print it
                raise UserError(f"{key}={shown(value)}: give {row.validator.expected}")
        for key in self._open:
            if not isinstance(get(config, key), ml_collections.ConfigDict):
                raise UserError(f"{key}={shown(get(config, key))}: give {MAPPING.expected}")
        try:
            keys = flat_keys(config)
        except TypeError as error:  # ml_collections sorts the keys
            raise UserError(
                f"a key of the configuration is not a text ({error}); give texts as keys"
            ) from error
        for key in keys:
            if not self.known(key):
                raise UserError(self.unknown(key))

    def known(self, key: str) -> bool:
        """Returns True if the dotted `key` is in the table, or in a group that takes any name."""
        return key in self.keys or key.rpartition(".")[0] in self._open

    def unknown(self, key: str) -> str:
        """Returns the error message for an unknown dotted key, with the most similar keys.

        Example:
        >>> keys = {"training.epochs": Key(20, validators.COUNT, "passes over the text")}
        >>> Schema(keys).unknown("training.epoch")
        'there is no config key training.epoch; did you mean training.epochs?'
        """
        if key in {name.rpartition(".")[0] for name in self.keys}:
            within = [name for name in self.keys if name.startswith(f"{key}.")]
            return f"{key} is a group of config keys; its keys are {', '.join(within)}"
        # Compare only the last names, because all keys of a group begin with the group. This also
        # finds a correct name in a wrong group or without a group. Keys of the same group come
        # first.
        own = key.partition(".")[0]
        last_names = dict.fromkeys(name.rpartition(".")[2] for name in self.keys)
        near = suggest(key.rpartition(".")[2], last_names)
        found = [name for last in near for name in self.keys if name.rpartition(".")[2] == last]
        found.sort(key=lambda name: not name.startswith(f"{own}."))
        if found:
            return f"there is no config key {key}; did you mean {' or '.join(found[:3])}?"
        within = [name for name in self.keys if name.startswith(f"{own}.")]
        if within:
            return f"there is no config key {key}; the keys of {own} are {', '.join(within)}"
        groups = dict.fromkeys(name.partition(".")[0] for name in self.keys)
        return f"there is no config key {key}; the groups are {', '.join(groups)} (see --help)"

    def may_change(self, key: str) -> MayChange:
        """Returns when a run or a sweep may resume with another value of `key`."""
        return self.keys[key].may_change if key in self.keys else MayChange.NEVER

    def differences(
        self, before: ml_collections.ConfigDict, now: ml_collections.ConfigDict
    ) -> list[str]:
        """Describes each key that differs, and that a resumed run must not change."""
        lines = []
        for key in dict.fromkeys(flat_keys(before) + flat_keys(now)):
            old, new = get(before, key, "not given"), get(now, key, "not given")
            if _as_json(old) != _as_json(new) and self.may_change(key) == MayChange.NEVER:
                lines.append(f"{key} is {old} in the folder and {new} now")
        return lines

    def describe(self) -> str:
        """Returns the keys, their defaults and their meanings, as text for `--help`."""
        lines: list[str] = []
        group = None
        for key, row in self.keys.items():
            if group not in (None, key.partition(".")[0]):
                lines.append("")
            group = key.partition(".")[0]
            lines.append(f"  {f'{key}={shown(row.default)}':<46} {row.meaning}")
        return "\n".join(lines)

    def load(
        self, path: str | os.PathLike[str], to_train: bool = True
    ) -> ml_collections.ConfigDict:
        """Reads and checks the file that `save` wrote.

        A key that the file lacks gets its default, because the file may be older than the key.

        Args:
            path: path of the file.
            to_train: as in `check`. False accepts the optimizer of a run on the other version of
                Keras, even if this version has no such optimizer.

        Raises:
            UserError: the file is missing or damaged, or has a wrong value or an unknown key.
        """
        content = read_json(path, "configuration")
        config = self.default()
        try:
            for key in [key for key, row in self.keys.items() if isinstance(row.default, tuple)]:
                *groups, name = key.split(".")  # JSON has lists instead
                parent = content
                for group in groups:
                    parent = parent[group]
                parent[name] = tuple(parent[name])
            config.update(content)
        except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
            reason = str(error.args[0] if error.args else error).partition("\n")[0]
            raise UserError(f"{path} is not a configuration of this program: {reason}") from error
        self.check(config, to_train=to_train)
        return config


def save(config: ml_collections.ConfigDict, path: str | os.PathLike[str]) -> None:
    """Writes `config` as JSON in one atomic step. `Schema.load` reads it.

    Raises:
        UserError: the file cannot be written.
    """
    write_file(path, json.dumps(config.to_dict(), indent=2) + "\n")


def get(config: ml_collections.ConfigDict, key: str, default: Any = None) -> Any:
    """Returns the value of a dotted key, or `default` if there is no such key."""
    for name in key.split("."):
        if name not in config:
            return default
        config = config[name]
    return config


def flat_keys(config: ml_collections.ConfigDict, prefix: str = "") -> list[str]:
    """Returns the dotted keys of all values in `config`, including the groups' keys."""
    keys = []
    if prefix.count(".") > 5:  # only a config that contains itself is this deep
        return [prefix.rstrip(".")]
    for name, value in config.items():
        key = f"{prefix}{name}"
        inner = isinstance(value, ml_collections.ConfigDict)
        keys += flat_keys(value, f"{key}.") if inner else [key]
    return keys


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


def _as_json(value: Any) -> Any:
    """Returns the value with lists instead of tuples, as JSON stores it."""
    return [_as_json(each) for each in value] if isinstance(value, (list, tuple)) else value
