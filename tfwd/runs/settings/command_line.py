"""Parses a command line of absl flags and a config file; every error is one line.

The flags are in a separate `FlagValues`, without the flags of the libraries. Keys are looked up in
the program's table before `ml_collections` reads the overrides. The error of `ml_collections` for
an unknown key is a traceback without the dotted key.
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

import tfwd
from tfwd.runs.errors import UserError, suggest
from tfwd.runs.settings import config as configs
from tfwd.runs.settings.config import Schema

# Folders inside tfwd with the files whose names a flag takes.
_FOLDERS = {"config": "configs", "sweep": os.path.join("configs", "sweeps")}
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)")


def define_flags(define: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
    """Returns a new `FlagValues` with the flags that `define` defines."""
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
    """Parses a command line.

    Args:
        argv: the command line, with the program's name first.
        define: function that defines the program's flags in a given `FlagValues`.
        schema: the `Schema` of `--config`. None if the program has no such flag.
        together: bool. True checks that the config's values fit together. Each single value is
            always checked.

    Returns:
        The values of the flags. If there is a schema, `config` is a checked and locked config.

    Raises:
        UserError: a flag or config key is unknown (the message has similar names), a value has the
            wrong type, a config file cannot be loaded, or an argument is not a flag.
    """
    values = define_flags(define)
    argv = list(argv)
    for argument in argv[1:]:
        if not is_utf8(argument):  # TensorFlow and JSON take only UTF-8
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
            # Unknown keys were rejected above. Only optimizer.kwargs takes new keys.
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
    # Only the parsers of absl and ml_collections can raise here, and no code of tfwd.
    except Exception as error:
        raise UserError(_flag_message(error, schema)) from error
    if rest[1:]:
        raise UserError(
            f"{rest[1][:200]!r} is not a flag; flags begin with --, such as --workdir=FOLDER"
        )
    if schema:
        schema.check(schema.lock(values.config), together)
    return values


def is_utf8(text: str) -> bool:
    """Returns True if the bytes of a command-line or environment text were UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _last_of_each(argv: list[str]) -> list[str]:
    """Keeps only the last `--config.KEY=VALUE` of each key. Otherwise tuples would be joined."""
    keys = [found[1] if (found := _OVERRIDE.match(a)) and "=" in a else None for a in argv]
    return [a for i, a in enumerate(argv) if keys[i] is None or keys[i] not in keys[i + 1 :]]


def _take_config_file(
    argv: list[str], schema: Schema
) -> tuple[list[str], ml_collections.ConfigDict]:
    """Removes `--config=FILE` from the command line. Returns the rest and the file's config."""
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
        raise UserError(
            f"--config is missing; give a name or a file, such as --config={schema.example}"
        )
    config = call_function_in_file("config", given, "get_config", schema)
    if not isinstance(config, ml_collections.ConfigDict):
        path = given.partition(":")[0]
        raise UserError(f"{path}: get_config() returned no ConfigDict; begin with default_config()")
    present = configs.flat_keys(config) if given.isidentifier() else schema.keys
    # A group that takes any names has no key here if it is empty.
    missing = [key for key, row in schema.keys.items() if key not in present and row.default != {}]
    if missing:
        raise UserError(
            f"--config={given} is a config of another program: it has no {missing[0]}; give a "
            f"config of this program, such as --config={schema.example}"
        )
    schema.check_keys(config)
    frozen = isinstance(config, ml_collections.FrozenConfigDict)
    return rest, ml_collections.ConfigDict(config) if frozen else config


def call_function_in_file(flag: str, given: str, function: str, schema: Schema) -> Any:
    """Calls a function in a Python file, and returns its result.

    Args:
        flag: str. The flag's name, for messages.
        given: str. The flag's value: a path, or the name of a file in `tfwd.configs`. Text after
            a colon is the function's argument.
        function: str. The function's name.
        schema: the `Schema` of the configuration, for messages about its keys.

    Raises:
        UserError: there is no such file, or its code raises an exception. The message has the line.
    """
    path, *arguments = given.split(":", 1)
    if not os.path.exists(path) and path.isidentifier():
        path = _path_of_name(flag, path, function)
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        files = [name for name in files if _defines(os.path.join(folder, name), function)]
        names = suggest(os.path.basename(path), files) or files
        hint = f"; {folder} has {', '.join(names)}" if names else ""
        raise UserError(f"--{flag}={given}: there is no such file{hint}")
    module: dict[str, Any] = {"__name__": f"{flag}_file", "__file__": path}
    try:
        with open(path, "rb") as file:  # an import could use outdated bytecode
            exec(compile(file.read(), path, "exec"), module)
        if not callable(module.get(function)):
            raise UserError(f"the file has no function {function}(), which --{flag} calls; add it")
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
            raise UserError(f"{where}: this ends the program; return a value instead") from error
        raise UserError(f"{where}: {reason}") from error


def _path_of_name(flag: str, name: str, function: str) -> str:
    """Returns the path of the file with this name in `tfwd.configs`.

    Raises:
        UserError: there is no such file. The message lists the names.
    """
    # In a checkout, configs/ is beside tfwd/.
    folders = [os.path.join(place, _FOLDERS[flag]) for place in tfwd.__path__]
    paths = [
        os.path.join(folder, file)
        for folder in folders
        if os.path.isdir(folder)
        for file in sorted(os.listdir(folder))
    ]
    known = {os.path.basename(p)[: -len(".py")]: p for p in paths if _defines(p, function)}
    if name not in known:
        raise UserError(
            f"--{flag}={name}: there is no such file, and tfwd has no {flag} of this name; "
            f"give a path, or one of these names: {', '.join(known)}"
        )
    return known[name]


def _defines(path: str, function: str) -> bool:
    """Returns True if the text of a Python file seems to define the function."""
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
    while isinstance(reason, BaseException):  # str() would add quotes to the text of a KeyError
        reason = reason.args[0] if reason.args else type(reason).__name__
    return str(reason).strip().partition("\n")[0][:500]


def _unknown_flag(name: str, values: flags.FlagValues) -> str:
    similar = suggest(name, values)
    flag_names = ", ".join(f"--{n}" for n in similar or sorted(values))
    return (
        f"there is no flag --{name}; {'similar' if similar else 'known'} flags: {flag_names} "
        "(see --help)"
    )


def _flag_message(error: Exception, schema: Schema | None) -> str:
    """Returns an error of absl or of the config flags as one line."""
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
    plain = {"invalid literal for int": "give a whole number", "could not convert": "give a number"}
    for start, advice in plain.items():
        reason = advice if reason.startswith(start) else reason
    return f"--{name}={value}: {reason}"
