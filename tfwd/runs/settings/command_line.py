"""Parses a command line of absl flags and a config file; every error is one line.

The flags stand in a `FlagValues` of the program's own, so that the libraries' flags are not among
them. Keys are looked up in the program's table before `ml_collections` reads the overrides, because
its own error is a traceback that knows no dotted names.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
from absl import flags
from ml_collections import config_flags

from tfwd.runs.errors import UserError, suggest
from tfwd.runs.settings.config import Schema

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")


def defined(define: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
    """A new `FlagValues` with what `define` puts there."""
    values = flags.FlagValues()
    define(values)
    return values


def parse(
    argv: Sequence[str],
    define: Callable[[flags.FlagValues], None],
    *,
    schema: Schema | None = None,
    together: bool = True,
) -> flags.FlagValues:
    """Reads a command line.

    Args:
        argv: the command line with the program's name first.
        define: defines the program's flags in the `FlagValues` it is given.
        schema: of `--config`; None if the program has no such flag.
        together: whether the config's values must go together; each must be right in any case.

    Returns:
        The values. `values.config`, if asked for, is checked and locked.

    Raises:
        UserError: an unknown flag or config key, with the near names; a value that is not of its
            flag's type; a config file that cannot be loaded; an argument that is no flag.
    """
    values = defined(define)
    argv = list(argv)
    for argument in argv[1:]:
        if not is_utf8(argument):  # TensorFlow and JSON take nothing else
            raise UserError(f"{argument!r} is not UTF-8; give another name or text")
    if schema:
        argv, contents = _take_config_file(argv, schema)
        argv = _last_of_each(argv)
        for argument in argv[1 : argv.index("--") if "--" in argv else None]:
            found = _OVERRIDE.match(argument)
            if found and not schema.known(found.group(1)):
                raise UserError(schema.unknown(found.group(1)))
    try:
        if schema:
            # An unknown key was an error above. New ones are for optimizer.kwargs alone.
            config_flags.DEFINE_config_dict(
                "config",
                contents,
                flag_values=values,
                lock_config=False,
                accept_new_attributes=True,
                sys_argv=argv,
            )
        rest = values(argv)
    except flags.UnrecognizedFlagError as error:
        raise UserError(_unknown_flag(error.flagname, values)) from error
    # It runs the parsers of absl and of ml_collections, and no code of ours.
    except Exception as error:
        raise UserError(_flag_message(error, schema)) from error
    if rest[1:]:
        raise UserError(
            f"{rest[1][:200]!r} is not a flag; flags begin with --, as --workdir=FOLDER"
        )
    if schema:
        schema.check(schema.lock(values.config), together)
    return values


def is_utf8(text: str) -> bool:
    """Whether a text of the command line or the environment was UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _last_of_each(argv: list[str]) -> list[str]:
    """Leaves out what a later `--config.KEY=VALUE` overrides: a tuple's values would add up."""
    keys = [found[1] if (found := _OVERRIDE.match(a)) and "=" in a else None for a in argv]
    return [a for i, a in enumerate(argv) if keys[i] is None or keys[i] not in keys[i + 1 :]]


def _take_config_file(
    argv: list[str], schema: Schema
) -> tuple[list[str], ml_collections.ConfigDict]:
    """Takes `--config=FILE` out of the command line; returns the rest and the file's config."""
    given, rest = "", []
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("--config", "-config"):
            given = next(arguments, "")
        elif argument.startswith(("--config=", "-config=")):
            given = argument.partition("=")[2]
        else:
            rest.append(argument)
    if not given or given.startswith("-"):
        raise UserError(f"--config is missing; give a file, as --config={schema.example}")
    config = from_file("config", given, "get_config", schema)
    if not isinstance(config, ml_collections.ConfigDict):
        path = given.partition(":")[0]
        raise UserError(f"{path}: get_config() returned no ConfigDict; begin with default_config()")
    schema.check_keys(config)
    frozen = isinstance(config, ml_collections.FrozenConfigDict)
    return rest, ml_collections.ConfigDict(config) if frozen else config


def from_file(flag: str, given: str, function: str, schema: Schema) -> Any:
    """What a function in a Python file returns.

    Args:
        flag: the flag's name, for messages.
        given: the flag's value: a path. What follows a colon is the function's argument.
        function: the function's name.
        schema: of the configuration, for messages about its keys.

    Raises:
        UserError: there is no such file, or it raises; the message names the line.
    """
    path, *arguments = given.split(":", 1)
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        there = [name for name in there if _defines(os.path.join(folder, name), function)]
        names = suggest(os.path.basename(path), there) or there
        hint = f"; {folder} has {', '.join(names)}" if names else ""
        raise UserError(f"--{flag}={given}: there is no such file{hint}")
    module: dict[str, Any] = {"__name__": f"{flag}_file", "__file__": path}
    try:
        with open(path, "rb") as file:  # an import would take bytecode for it that may be older
            exec(compile(file.read(), path, "exec"), module)
        if not callable(module.get(function)):
            raise UserError(f"there is no {function}() in it, which --{flag} needs")
        return module[function](*arguments)
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        where = f"{path}, line {lines[-1]}" if lines else path
        reason = _first_line(error)
        key = re.match(r'Key "(\w+)" does not exist', reason)
        if key:
            raise UserError(f"{where}: {schema.unknown(key.group(1))}") from error
        if isinstance(error, SystemExit):
            raise UserError(f"{where}: it ends the program; return a value instead") from error
        raise UserError(f"{where}: {reason}") from error


def _defines(path: str, function: str) -> bool:
    """Whether a Python file looks as if it has the function: it is not run."""
    if not path.endswith(".py"):
        return False
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return re.search(rf"^def {function}\b", file.read(), re.MULTILINE) is not None
    except OSError:
        return False


def _first_line(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{error.msg} in line {error.lineno}"
    if isinstance(error, OSError):
        return str(error)
    reason: object = error
    while isinstance(reason, BaseException):  # not str(), which adds quotes to that of a KeyError
        reason = reason.args[0] if reason.args else type(reason).__name__
    return str(reason).strip().partition("\n")[0][:500]


def _unknown_flag(name: str, values: flags.FlagValues) -> str:
    names = suggest(name, values) or sorted(values)
    return f"there is no flag --{name}; see --help (near: {', '.join(f'--{n}' for n in names)})"


def _flag_message(error: Exception, schema: Schema | None) -> str:
    """One line for what absl or the config flags object to."""
    text = _first_line(error)
    flag = re.match(r"flag --([^=]*)=(.*?): (.*)", text)
    if not flag:
        return text
    name, value, reason = flag.groups()
    key = name.removeprefix("config.")
    if schema and name != key and key in schema.keys:
        return f"--{name}={value}: give {schema.keys[key].validator.expected}"
    if value == "None" and "must have a value" in reason:
        return f"--{name} is missing; see --help"
    words = {"invalid literal for int": "give a whole number", "could not convert": "give a number"}
    for start, right in words.items():
        reason = right if reason.startswith(start) else reason
    return f"--{name}={value}: {reason}"
