"""Processes that a test starts and always ends; a limit on the clock is only a watchdog."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfwd.runs.workers.local_workers import free_ports

# Seconds. Ten times the slowest process: it ends processes that hang, and does not test speed.
WATCHDOG = 1200

# A program's first lines: with SIGNAL_AT=9:40 it sends itself signal 9 when step 40 is done. So
# the moment does not depend on the scheduler.
SIGNAL_AT = """
import os
if "SIGNAL_AT" in os.environ:
    from tfwd.lm.trainer import Trainer
    number, step = map(int, os.environ["SIGNAL_AT"].split(":"))
    show = Trainer._show_progress
    def send(self, lengths):
        if self.progress.step == step:
            os.kill(os.getpid(), number)
        show(self, lengths)
    Trainer._show_progress = send
"""


def clusters(count: int = 2) -> list[dict[str, Any]]:
    """Returns the content of TF_CONFIG of each worker."""
    workers = [f"127.0.0.1:{port}" for port in free_ports(count)]
    return [
        {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        for index in range(count)
    ]


class Processes:
    """Starter of processes in groups of their own, which ends all of them on leaving."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def python(
        self,
        code: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Runs Python's `-c code arguments`; both outputs go to `stdout`."""
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})},
            **options,
        )
        self._started.append(process)
        return process

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Waits until the condition holds, while all of the processes run."""
        end = time.monotonic() + WATCHDOG
        while not condition():
            assert time.monotonic() < end, f"waited in vain for {what}"
            for process in self._started:
                assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for the end, and returns the exit code and the output."""
    output, _ = process.communicate(timeout=WATCHDOG)
    return process.returncode, output
