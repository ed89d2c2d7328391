"""Calls of the four programs with one error in each, and the outcomes that are required.

    python tests/lm/malformed_calls.py [words...]

This runs all calls, or the calls whose names have all the words. A call must end in time and
without a traceback. A refused call prints one line `error: ...`, has a nonzero exit code and does
not change the folders. The programs are imported once. Each call is a fork of that process, in a
folder of its own with a text, a config, a sweep and a trained run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # its tables

# A watchdog: ten times what the slowest call needs.
SECONDS = int(os.environ.get("MALFORMED_SECONDS", "100"))
AT_ONCE = 2

CONFIG = """
from tfwd.lm.config import default_config

def get_config():
    config = default_config()
    config.data.path = "text.txt"
    config.data.batch_size = config.data.eval_batch_size = 2
    config.data.window = 8
    config.model.embedding_dim = 4
    config.model.hidden_units = (4,)
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.01
    config.training.epochs = 1
    config.training.checkpoint_steps = 9
    config.training.log_steps = 3
    config.sample.tokens = 3
    return config
"""
SWEEP = """
from tfwd.lm.sweeps import Choice, Float, Int, Sweep

def get_sweep():
    return Sweep({"model.weight_dropout": Float(0, 0.1, step=0.1)}, max_trials=1)
"""


class Call(NamedTuple):
    """A call, and its required outcome.

    Attributes:
        name: name in the report.
        program: train, tune, evaluate or generate.
        arguments: arguments of the command line, after those that every call has.
        prepare: changes the call's folder, which is the working directory.
        words: a regular expression that the message must match.
        served: True if the call must succeed, False if it must fail, None for either.
        new: True if the workdir does not exist. It must not exist afterwards.
        out: the file that is standard output; "|" is a pipe that nobody reads.
        environment: further environment variables.
        file_size: size of the largest file that can be written, as on a full disk.
        kept: True if a refused call must not change the workdir.
    """

    name: str
    program: str
    arguments: tuple[str | bytes, ...] = ()
    prepare: Callable[[Path], object] = lambda box: None
    words: str = ""
    served: bool | None = False
    new: bool = True
    out: str = ""
    environment: Mapping[str, str] = MappingProxyType({})
    file_size: int = 0
    kept: bool = True


class Outcome(NamedTuple):
    """The end of a call; `problem` is "" if the end is as required."""

    call: Call
    problem: str
    code: int | None
    error: str
    output: str
    seconds: float


def tree(folder: Path) -> dict[str, str]:
    """Returns the content of a folder, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = os.fsencode(path.relative_to(folder)).decode("utf-8", "replace")
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "folder" if path.is_dir() else "special"
    return found


def command(call: Call) -> list[str]:
    """Returns the command line, with the flags that every call has before its own."""
    first = {
        "train": ["--config=config.py"],
        "tune": ["--config=config.py", "--sweep=sweep.py"],
        "evaluate": [],
        "generate": ["--tokens=3"],
    }[call.program]
    workdir = f"--workdir={'new/folder' if call.new else 'run'}"
    return [f"tfwd-{call.program}", *first, workdir, *map(os.fsdecode, call.arguments)]


def run_here(call: Call) -> None:
    """Runs the program in this process, which ends with it."""
    import importlib

    for name in ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT"):
        os.environ.pop(f"KERASTUNER_{name}", None)
    os.environ.update(call.environment)
    sys.argv = command(call)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a machine has other users
    if call.file_size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (call.file_size, call.file_size))
    importlib.import_module(f"tfwd.lm.commands.{call.program}").run()


class Running:
    """A running call, in a process group of its own."""

    def __init__(self, call: Call, box: Path):
        self.call, self.box, self.began = call, box, time.monotonic()
        call.prepare(box)
        self.before = tree(box / "run")
        self.pid = os.fork()
        if self.pid == 0:
            self._child()

    def _child(self) -> None:
        code = 70
        try:
            os.setsid()
            os.chdir(self.box)
            out, err = (os.open(self.box / name, os.O_WRONLY | os.O_CREAT) for name in ("o", "e"))
            if self.call.out == "|":
                reader, out = os.pipe()
                os.close(reader)
            elif self.call.out:
                out = os.open(self.call.out, os.O_WRONLY)
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", errors="backslashreplace")
            run_here(self.call)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            except OSError:
                code = 120  # as Python itself ends
            os._exit(code)

    def poll(self) -> Outcome | None:
        """Returns the outcome; None if the call has not ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        seconds, code = time.monotonic() - self.began, None
        if pid:
            code = os.waitstatus_to_exitcode(status)
        elif seconds < SECONDS:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
        output, error = (
            (self.box / name).read_text(errors="replace") if (self.box / name).exists() else ""
            for name in ("o", "e")
        )
        problem = self._problem(code, output, error)
        return Outcome(self.call, problem, code, error, output, seconds)

    def _problem(self, code: int | None, output: str, error: str) -> str:
        call = self.call
        if code is None:
            return f"it hangs: no end in {SECONDS} s"
        if "Traceback" in error + output or "Exception ignored" in error or code == 70:
            return "a traceback"
        if code < 0:
            return f"it died of signal {-code}"
        if call.served is not None and call.served != (code == 0):
            return f"code {code}"
        lines = error.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        if code == 1 and (len(errors) != 1 or lines[-1:] != errors):
            return "not one line that begins with error:"
        if code == 1 and len(errors[0]) > 3000:
            return "a line of too many letters"
        if call.words and not re.search(call.words, output + error):
            return f"nothing is said of {call.words!r}"
        if code == 1 and call.new and (self.box / "new").exists():
            return f"the workdir is left: {', '.join(tree(self.box / 'new'))}"
        if code == 1 and call.kept and tree(self.box / "run") != self.before:
            now = tree(self.box / "run")
            different = {k for k in {*now, *self.before} if now.get(k) != self.before.get(k)}
            return f"the run is changed: {', '.join(sorted(different))}"
        return ""


def template(folder: Path) -> Path:
    """Returns the folder that each call gets a copy of."""
    box = folder / "template"
    box.mkdir()
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    lines = (" ".join(words[(i * i + 3 * j) % 10] for j in range(3 + i % 5)) for i in range(80))
    (box / "text.txt").write_text("\n".join(lines) + "\n")
    (box / "config.py").write_text(CONFIG)
    (box / "sweep.py").write_text(SWEEP)
    (box / "run").mkdir()
    for program in ("train", "tune"):
        workdir = ("--workdir=sweep",) if program == "tune" else ()
        running = Running(Call("template", program, workdir, served=True, new=False), box)
        while (outcome := running.poll()) is None:
            time.sleep(0.05)
        if outcome.problem:
            raise SystemExit(f"{outcome.problem}\n{outcome.output}\n{outcome.error}")
    for name in ("o", "e"):
        (box / name).unlink()
    return box


def outcomes(calls: list[Call], folder: Path) -> Iterator[Outcome]:
    """Makes the calls, a few at once."""
    whole = template(folder)
    waiting, running = list(reversed(calls)), list[Running]()
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            box = folder / f"call-{len(waiting)}"
            shutil.copytree(whole, box, symlinks=True)
            running.append(Running(waiting.pop(), box))
        for each in list(running):
            if (outcome := each.poll()) is not None:
                running.remove(each)
                shutil.rmtree(each.box, ignore_errors=True)
                yield outcome
        time.sleep(0.02)


def load_programs() -> None:
    """Imports everything that the calls need, so that forks have it."""
    import importlib

    import tfwd_programs

    tfwd_programs.quiet_tensorflow()
    for name in (
        "lm.commands.train",
        "lm.commands.tune",
        "lm.commands.evaluate",
        "lm.sampling",
        "lm.final_report",
        "lm.trainer",
        "runs.storage.trained_model",
        "runs.sweeps.tuner",
        "runs.sweeps.report",
        "runs.sweeps.tensorboard_hparams",
        "runs.training.display",
    ):
        importlib.import_module(f"tfwd.{name}")
    import scipy  # noqa: F401
    import sklearn.gaussian_process  # noqa: F401


def main(words: list[str], every: int = 1) -> int:
    """Makes each `every`-th of the calls whose names have all the words.

    Returns the exit code.
    """
    import malformed_table

    os.nice(int(os.environ.get("MALFORMED_NICE", "0")))
    calls = [c for c in malformed_table.calls() if all(w in f"{c.program} {c.name}" for w in words)]
    calls = calls[::every]
    load_programs()
    wrong, slowest, began = 0, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for outcome in outcomes(calls, Path(folder)):
            slowest.append((round(outcome.seconds, 1), outcome.call.program, outcome.call.name))
            shown = outcome.problem or "-v" in sys.argv
            if shown:
                wrong += bool(outcome.problem)
                call = outcome.call
                print(f"{call.program} {call.name}: {outcome.problem or 'right'}", flush=True)
                last = [line[:300] for line in outcome.error.splitlines()[-3:]]
                print(f"    code {outcome.code}", *last, sep="\n    ")
    print(f"{wrong} of {len(calls)} calls are wrong; {time.monotonic() - began:.0f} s")
    print("the slowest:", *sorted(slowest, reverse=True)[:5])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main([word for word in sys.argv[1:] if word != "-v"]))
