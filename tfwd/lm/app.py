"""What the programs share: flags, `--help`, and one line for an error.

The flags are absl's, in a `FlagValues` of the program's own, so that `--help` shows them and not
the hundreds that the libraries define; `--config` is a Python file of `ml_collections`.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence

from absl import flags

from tfwd.lm.command_line import defined, parse
from tfwd.lm.errors import UserError
from tfwd.lm.keys import describe

_HELP = ("-h", "-help", "--help", "-helpshort", "--helpshort", "-helpfull", "--helpfull")


def run(
    main: Callable[[flags.FlagValues], int | None],
    define: Callable[[flags.FlagValues], None],
    about: str,
    *,
    config: bool = False,
    together: bool = True,
    argv: Sequence[str] | None = None,
) -> None:
    """Reads the command line, calls `main`, and ends the process with an exit code.

    Args:
        main: the program; what the flags hold is an attribute, as `flags.workdir`. Its result is
            the exit code (None is 0).
        define: defines the program's flags, as `flags.DEFINE_string(..., flag_values=values)`.
        about: the text of `--help`: what the program does, with examples.
        config: whether the program has `--config`; then `flags.config` is a checked and locked
            `ConfigDict`.
        together: whether the values of the config must go together, or `main` looks at that.
        argv: the command line with the program's name first; None is the process's own.

    Raises:
        SystemExit: always. 0 after `--help` or success, 1 after a `UserError`, which is printed
            as one line `error: <message>` on stderr, 130 after Ctrl-C.
    """
    argv = list(sys.argv if argv is None else argv)
    try:
        if any(argument in _HELP for argument in argv[1:]):
            print(usage(argv[0], define, about, config))
            code = 0
        else:
            values = parse(argv, define, config=config, together=together)
            code = main(values) or 0
            sys.stdout.flush()  # a closed pipe shows here, and not after the last line
    except UserError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # as in `tfwd-generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 0
    sys.exit(code)


def usage(
    program: str, define: Callable[[flags.FlagValues], None], about: str, config: bool = False
) -> str:
    """The text of `--help`: about, the flags, and the keys of the configuration."""
    values = defined(define)
    lines = [textwrap.dedent(about).strip(), "", f"Flags of {os.path.basename(program)}:"]
    if config:
        lines.append("  --config=FILE")
        lines.append("      Python file with get_config(), as configs/quickstart.py")
        lines.append("  --config.KEY=VALUE")
        lines.append("      another value for one key of it; the keys are below")
    for name in values:
        flag = values[name]
        default = "" if flag.default in (None, "") else f" (default: {flag.default_as_str})"
        lines.append(f"  --{name}" if flag.boolean else f"  --{name}={flag.flag_type().upper()}")
        lines += textwrap.wrap(
            flag.help + default, 94, initial_indent=" " * 6, subsequent_indent=" " * 6
        )
    if config:
        lines += ["", "Config keys, with their defaults (a config file has its own):", describe()]
    return "\n".join(lines)
