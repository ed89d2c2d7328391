"""Runs a program: parses its flags, prints `--help`, and prints each error as one line.

The flags are absl's, in a separate `FlagValues`. `--help` therefore shows only them, and not the
hundreds of flags of the libraries. `--config` is a Python file of `ml_collections`.
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
        main: the program. The values of the flags are attributes, as `flags.workdir`. Its result is
            the exit code (None is 0).
        define: function that defines the program's flags, as `flags.DEFINE_string(...,
            flag_values=values)`.
        about: str. The text of `--help`: the program's purpose, with examples.
        schema: the `Schema` of `--config`. `flags.config` is then a checked and locked
            `ConfigDict`. None if the program has no such flag.
        together: bool. Checks that the values of the config fit together. False if `main` checks
            that.
        argv: the command line, with the program's name first. By default the process's own.

    Raises:
        SystemExit: always. The code is 0 after `--help` or success, and 130 after Ctrl-C. It is 1
            after a `UserError` and after an error of the system (a file, the output, memory). Those
            are printed on stderr as one line, `error: <message>`.
    """
    argv = list(sys.argv if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):  # a letter that the terminal lacks
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError):  # a closed stream is reported when it is written to
                stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        if any(argument in _HELP for argument in argv[1:]):
            print(usage(argv[0], define, about, schema))
        else:
            values = parse(argv, define, schema=schema, together=together)
            code = main(values) or 0
        sys.stdout.flush()  # a closed pipe shows here, and not after the last line
    except UserError as error:
        code = _say(f"error: {error}")
    except KeyboardInterrupt:
        code = _say("stopped", 130)
    except BrokenPipeError:  # as in `tfwd-generate ... | head`
        _discard_output()
    except OSError as error:  # for files without a better message
        what = f"{error.filename}: " if error.filename else "cannot write the output: "
        code = _say(f"error: {what}{error.strerror or error}")
    except Exception as error:
        if not isinstance(error, MemoryError) and type(error).__name__ != "ResourceExhaustedError":
            raise
        code = _say(f"error: there is not enough memory: {str(error)[:200]}")
    sys.exit(code)


def _say(line: str, code: int = 1) -> int:
    """Prints one line on stderr, and prevents another one at Python's end."""
    with contextlib.suppress(OSError):
        print(" ".join(line.split()), file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    return code


def _discard_output() -> None:
    """Discards the buffer of standard output, which would cause a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def usage(
    program: str,
    define: Callable[[flags.FlagValues], None],
    about: str,
    schema: Schema | None = None,
) -> str:
    """Returns the text of `--help`: about, the flags, and the keys of the configuration."""
    values = define_flags(define)
    lines = [textwrap.dedent(about).strip(), "", f"Flags of {os.path.basename(program)}:"]
    if schema:
        lines.append("  --config=NAME_OR_FILE")
        lines.append(
            f"      name of a config of tfwd, as {schema.example}, or Python file with get_config()"
        )
        lines.append("  --config.KEY=VALUE")
        lines.append("      another value for one key of it; the keys are below")
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
            "Config keys, with their defaults (a config file has its own):",
            schema.describe(),
        ]
    return "\n".join(lines)
