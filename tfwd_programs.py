"""Console scripts: they load TensorFlow without its log lines, and then run the program.

TensorFlow logs messages about the processor as soon as it is loaded, and the package `tfwd` loads
it. This module is therefore outside the package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator


def train() -> None:
    """Runs the console script `tfwd-train`."""
    _run("lm.commands.train")


def tune() -> None:
    """Runs the console script `tfwd-tune`, for `tfwd-finetune` with `--program=finetune`."""
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
    """Runs the console script `tfwd-evaluate`."""
    _run("lm.commands.evaluate")


def finetune() -> None:
    """Runs the console script `tfwd-finetune`."""
    _run("finetune.commands.train")


def classify() -> None:
    """Runs the console script `tfwd-classify`."""
    _run("finetune.commands.classify")


def generate() -> None:
    """Runs the console script `tfwd-generate`."""
    _run("lm.commands.generate")


def pretrained() -> None:
    """Runs the console script `tfwd-pretrained`."""
    _run("conversion.show_or_convert")


# The packages of the extra `programs`, by the names that are imported.
PACKAGES = {
    "absl": "absl-py",
    "matplotlib": "matplotlib",
    "ml_collections": "ml-collections",
    "rich": "rich",
    "tensorboard": "tensorboard",
}


def _run(program: str) -> None:
    try:
        open_closed_streams()
        check_packages()
        quiet_tensorflow()
        module = importlib.import_module(f"tfwd.{program}")
    except KeyboardInterrupt:  # the program itself handles it
        print("stopped", file=sys.stderr)
        sys.exit(130)
    module.run()


def check_packages() -> None:
    """Ends the process with one line if packages of the extra `programs` are missing."""
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        print(
            f"error: {os.path.basename(sys.argv[0])} needs {', '.join(missing)}: in a checkout of "
            "tfwd, pip install '.[programs]'",
            file=sys.stderr,
        )
        sys.exit(1)


def open_closed_streams() -> None:
    """Replaces standard streams that were closed, as by `>&-`, with the null device.

    Otherwise the next opened file would get their number, and TensorFlow's output.
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
    """Loads TensorFlow without its log lines. An error while loading is shown in full.

    C++ writes the log lines before a logging level can be set. stderr is therefore redirected while
    TensorFlow is loaded. Later, warnings and errors are shown, and other log lines are not. With
    several workers, a lost worker causes a dozen lines of C++. The program says it in one line.
    """
    level = "3" if os.environ.get("TF_CONFIG") else "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)
    if "tensorflow" not in sys.modules:
        with _stderr_aside():
            import tensorflow  # noqa: F401


@contextlib.contextmanager
def _stderr_aside() -> Iterator[None]:
    sys.stderr.flush()
    try:
        aside = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    except OSError:  # the disk is full or read-only: the log lines are shown
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
