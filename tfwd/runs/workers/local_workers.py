"""Starts all workers of a run as processes on this machine, and ends them together."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO, Any

from tfwd.runs.errors import UserError
from tfwd.runs.workers.connection import LOST
from tfwd.runs.workers.worker_addresses import Cluster

# File descriptor of a pipe whose other end the parent holds. It closes when the parent ends.
PARENT = "TFWD_PARENT_PIPE"
GRACE = 30.0  # seconds that the other workers have to end by themselves after a worker failed
# The worker's program: arguments of `python -c`.
_PROGRAM = "import sys, tfwd_programs; sys.argv[0] = {0!r}; tfwd_programs.{1}()"


def is_started_here(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns True in a worker that `run` started."""
    return PARENT in environment


def end_with_parent() -> None:
    """Ends this process when its parent process ends, for any reason."""
    descriptor = int(os.environ[PARENT])

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(descriptor, 1)
        os._exit(LOST)

    threading.Thread(target=wait, daemon=True).start()


def run(command: str, arguments: Sequence[str], count: int, gpus: Sequence[str] = ()) -> int:
    """Runs a program in `count` processes, and returns the exit code.

    Only the chief writes to the terminal. The output of the other workers is shown after a failure.

    Args:
        command: str. The console script, such as "tfwd-train".
        arguments: the arguments of the program.
        count: int. The number of workers.
        gpus: the GPU of each worker, as `CUDA_VISIBLE_DEVICES` names it; empty for all or none.
    """
    if os.name == "nt":
        raise UserError("--workers starts processes on Linux and macOS only: set TF_CONFIG")
    addresses = tuple(f"127.0.0.1:{port}" for port in free_ports(count))
    code = _PROGRAM.format(command, command.removeprefix("tfwd-"))
    reading, writing = os.pipe()
    workers: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(count - 1)]
        stack.callback(_end, workers)
        with _forwarded(workers):
            for index in range(count):
                environment = {
                    **os.environ,
                    "TF_CONFIG": Cluster(addresses, index).tf_config,
                    PARENT: str(reading),
                    "TF_NUM_INTRAOP_THREADS": str(max(1, _cores() // count)),
                }
                if environment.get("TF_CPP_MIN_LOG_LEVEL") == "1":  # see tfwd_programs
                    environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
                if gpus:
                    environment["CUDA_VISIBLE_DEVICES"] = gpus[index]
                output: Any = None if index == 0 else outputs[index - 1]
                workers.append(
                    subprocess.Popen(
                        [sys.executable, "-c", code, *arguments],
                        env=environment,
                        pass_fds=[reading],
                        start_new_session=True,  # this process forwards Ctrl-C to the workers
                        stdin=None if index == 0 else subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                )
            os.close(reading)
            codes = _wait(workers)
        os.close(writing)
        failed = _first_failed(codes)
        if failed is None:
            return 0
        if codes[0] in (0, LOST) or codes[0] < 0:
            _show(outputs)
        return codes[failed] if codes[failed] > 0 else LOST


def _wait(workers: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Waits until all workers have ended. Kills the others `GRACE` seconds after a failure."""
    limit = None
    while True:
        codes = [worker.poll() for worker in workers]
        if None not in codes:
            return [code for code in codes if code is not None]
        if limit is None and any(codes):
            limit = time.monotonic() + GRACE
        if limit is not None and time.monotonic() > limit:
            _end(workers)
        time.sleep(0.05)


def _first_failed(codes: Sequence[int]) -> int | None:
    """Returns the number of a failed worker. Prefers an error to the loss of another worker."""
    order = [n for n, code in enumerate(codes) if code not in (0, LOST) and code > 0]
    order += [n for n, code in enumerate(codes) if code]
    return order[0] if order else None


def _show(outputs: Sequence[IO[bytes]]) -> None:
    for index, output in enumerate(outputs, 1):
        output.seek(0)
        for line in output.read().decode(errors="replace").splitlines()[-20:]:
            print(f"worker {index}: {line}", file=sys.stderr)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        if worker.poll() is None:
            worker.kill()
        worker.wait()


@contextlib.contextmanager
def _forwarded(workers: Sequence[subprocess.Popen[bytes]]) -> Any:
    """Forwards Ctrl-C and SIGTERM to the workers."""

    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                worker.send_signal(number)

    before = {n: signal.signal(n, forward) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback address that no process uses now."""
    with contextlib.ExitStack() as stack:  # all sockets are open at once, so their ports differ
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
