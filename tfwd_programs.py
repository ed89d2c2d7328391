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
    """Runs the console script `tfwd-tune`. `--program=finetune` tunes `tfwd-finetune`."""
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


# Packages of the extra `programs`. The keys are the import names.
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
    except KeyboardInterrupt:  # during the imports; later, the program handles it
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
    """Replaces closed standard streams, such as after `>&-`, with the null device.

    Otherwise the next opened file would get the file descriptor of the closed stream. TensorFlow
    would then write its output into that file.
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
    TensorFlow is loaded. Later, TensorFlow shows only warnings and errors. With several workers, it
    shows only fatal errors, because it logs a dozen lines for a lost worker. The program reports
    the lost worker in one line.
    """
    level = "3" if os.environ.get("TF_CONFIG") else "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level)
    if "tensorflow" not in sys.modules:
        with _captured_stderr():
            import tensorflow  # noqa: F401


@contextlib.contextmanager
def _captured_stderr() -> Iterator[None]:
    sys.stderr.flush()
    try:
        captured = tempfile.TemporaryFile()  # noqa: SIM115 (closed below)
    except OSError:  # show the log lines, because the disk is full or read-only
        yield
        return
    with captured:
        original = os.dup(2)
        os.dup2(captured.fileno(), 2)
        try:
            yield
        except BaseException:
            captured.seek(0)
            os.write(original, captured.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            os.close(original)
