"""The console scripts: they load TensorFlow without its notes, and then run the program.

TensorFlow writes notes on the processor as soon as it is loaded, and the package `tfwd` loads it.
So this module stands outside the package.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator


def train() -> None:
    """The console script `tfwd-train`."""
    _run("lm.commands.train")


def tune() -> None:
    """The console script `tfwd-tune`: of `tfwd-train`, or with `--program=finetune` of that one."""
    programs = {"train": "lm.commands.tune", "finetune": "finetune.commands.tune"}
    name, rest = "train", sys.argv[:1]
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag not in ("--program", "-program"):
            rest.append(argument)
        else:
            name = value if equals else next(arguments, "")
    sys.argv = rest
    if name not in programs:
        print(f"error: --program={name[:200]}: give train or finetune", file=sys.stderr)
        sys.exit(1)
    _run(programs[name])


def evaluate() -> None:
    """The console script `tfwd-evaluate`."""
    _run("lm.commands.evaluate")


def finetune() -> None:
    """The console script `tfwd-finetune`."""
    _run("finetune.commands.train")


def classify() -> None:
    """The console script `tfwd-classify`."""
    _run("finetune.commands.classify")


def generate() -> None:
    """The console script `tfwd-generate`."""
    _run("lm.commands.generate")


def pretrained() -> None:
    """The console script `tfwd-pretrained`."""
    _run("conversion.program")


def _run(program: str) -> None:
    try:
        open_closed_streams()
        quiet_tensorflow()
        module = importlib.import_module(f"tfwd.{program}")
    except KeyboardInterrupt:  # the program itself knows what to do with it
        print("stopped", file=sys.stderr)
        sys.exit(130)
    module.run()


def open_closed_streams() -> None:
    """Standard streams that were closed, as by `>&-`, become the null device.

    Else the next file that is opened would get their number, and what TensorFlow prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, open(number, "r" if name == "stdin" else "w"))  # noqa: SIM115


def quiet_tensorflow() -> None:
    """Loads TensorFlow without its notes on the processor; a failure to load is shown whole.

    The notes are written by C++ before a logging level can be set, so stderr is put aside for
    as long as the loading takes. After it, warnings and errors are shown and notes are not.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if "tensorflow" not in sys.modules:
        with _stderr_aside():
            import tensorflow  # noqa: F401


@contextlib.contextmanager
def _stderr_aside() -> Iterator[None]:
    sys.stderr.flush()
    try:
        aside = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    except OSError:  # no room for it, or nowhere: the notes are shown
        yield
        return
    with aside:
        kept = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            yield
        except BaseException:
            aside.seek(0)
            os.write(kept, aside.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
