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
    _run("train")


def tune() -> None:
    """The console script `tfwd-tune`."""
    _run("tune")


def evaluate() -> None:
    """The console script `tfwd-evaluate`."""
    _run("evaluate")


def generate() -> None:
    """The console script `tfwd-generate`."""
    _run("generate")


def _run(program: str) -> None:
    try:
        quiet_tensorflow()
        module = importlib.import_module(f"tfwd.lm.{program}")
    except KeyboardInterrupt:  # the program itself knows what to do with it
        print("stopped", file=sys.stderr)
        sys.exit(130)
    module.run()


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
    with tempfile.TemporaryFile() as aside:
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
