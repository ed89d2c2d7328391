"""Runs a program: parses its flags, prints `--help`, and prints each error as one line.

The program's absl flags are in a separate `FlagValues`. `--help` therefore shows only these flags,
and not the hundreds of flags of the libraries. `--config` is a Python file of `ml_collections`.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

from tfwd.runs.errors import UserError
from tfwd.runs.settings.command_line import define_flags, parse
from tfwd.runs.settings.config import Schema

_HELP = ("-h", "-help", "--help", "-helpshort", "--helpshort", "-helpfull", "--helpfull")


def run(
    main: Callable[[flags.FlagValues], int | None],
    define: Callable[[flags.FlagValues], None],
    about: str,
    *,
    schema: Schema | None = None,
    together: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Parses the command line, calls `main`, and ends the process with an exit code.

    Args:
        main: function that runs the program. The values of the flags are attributes of its
            argument, such as `flags.workdir`. It returns the exit code, or None for 0.
        define: function that defines the program's flags, such as `flags.DEFINE_string(...,
            flag_values=values)`.
        about: str. The text of `--help`: the program's purpose, with examples.
        schema: the `Schema` of `--config`. `flags.config` is then a checked and locked
            `ConfigDict`. None if the program has no such flag.
        together: bool. True checks that the values of the config fit together. Pass False if `main`
            does this check.
        argv: the command line, with the program's name first. Default: `sys.argv`.

    Raises:
        SystemExit: always. The code is 0 after `--help` or success, and 130 after Ctrl-C. It is 1
            after a `UserError` and after an error of the system (a file, the output, memory). Each
            of these errors is printed on stderr as one line, `error: <message>`.
    """
    argv = list(sys.argv if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # escape letters that the terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # the first write to a closed stream reports it
                stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        if any(argument in _HELP for argument in argv[1:]):
            print(usage(argv[0], define, about, schema))
        else:
            values = parse(argv, define, schema=schema, together=together)
            code = main(values) or 0
        sys.stdout.flush()  # a closed pipe raises here, and not when Python exits
    except UserError as error:
        code = _print_error(f"error: {error}")
    except KeyboardInterrupt:
        code = _print_error("stopped", 130)
    except BrokenPipeError:  # such as in `tfwd-generate ... | head`
        _discard_output()
    except OSError as error:  # of a file that has no message of its own
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        code = _print_error(f"error: {what}{error.strerror or error}")
    except Exception as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "ResourceExhaustedError":
            raise
        code = _print_error(f"error: there is not enough memory: {str(error)[:200]}")
    sys.exit(code)


def _print_error(line: str, code: int = 1) -> int:
    """Prints one line on stderr. Prevents a second error message when Python exits."""
    with contextlib.suppress(OSError):
        print(" ".join(line.split()), file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return code


def _discard_output() -> None:
    """Discards the buffer of standard output, because writing it would cause a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def usage(
    program: str,
    define: Callable[[flags.FlagValues], None],
    about: str,
    schema: Schema | None = None,
) -> str:
    """Returns the text of `--help`: `about`, the flags, and the config keys."""
    values = define_flags(define)
    lines = [textwrap.dedent(about).strip(), "", f"Flags of {os.path.basename(program)}:"]
    if schema:
        lines.append("  --config=NAME_OR_FILE")
        lines.append(
            f"      name of a config of tfwd, such as {schema.example}, or a Python file with "
            "get_config()"
        )
        lines.append("  --config.KEY=VALUE")
        lines.append("      changes one key of the config; the keys are listed below")
    for name in values:
        flag = values[name]
        default = "" if flag.default in (None, "") else f" (default: {flag.default_as_str})"
        lines.append(f"  --{name}" if flag.boolean else f"  --{name}={flag.flag_type().upper()}")
        lines += textwrap.wrap(
            flag.help + default, 94, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    if schema:
        lines += [
            "",
            "Config keys with their defaults (a config file can set other values):",
            schema.describe(),
        ]
    return "\n".join(lines)
