"""Connects this process with the other workers, and ends it if a worker is missing or lost."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from tfwd.runs.errors import UserError, reason
from tfwd.runs.workers import rendezvous
from tfwd.runs.workers.worker_addresses import Cluster

# EX_TEMPFAIL of sysexits.h: the same command may succeed later. Orchestrators restart on it.
LOST = 75
_OF_PEERS = re.compile(r"coordination service|heartbeat|socket closed|connection re", re.IGNORECASE)
# Program with three arguments: a process id, seconds and a line. Closing its stdin ends it.
_WATCHER = """
import os, select, sys
pid, seconds, line = sys.argv[1:]
if not select.select([sys.stdin], [], [], float(seconds))[0]:
    print(line, file=sys.stderr, flush=True)
    os.kill(int(pid), 9)
"""


def connect(cluster: Cluster, start_timeout: float, heartbeat_timeout: float) -> Any:
    """Starts TensorFlow's server of this worker, and waits for the other workers.

    Ends the process with exit code 75 and one line if a worker is missing after `start_timeout`.

    Args:
        cluster: the workers.
        start_timeout: float. Seconds in which all workers must start.
        heartbeat_timeout: float. Seconds after which a silent worker counts as lost.

    Returns:
        The `tf.distribute.MultiWorkerMirroredStrategy`.

    Raises:
        UserError: this worker cannot listen at its address, or cannot join the others.
    """
    import tensorflow as tf

    try:
        rendezvous.meet(cluster, start_timeout)
    except rendezvous.WorkerMissing as late:
        end(
            f"error: {rendezvous.name(cluster)}: {late}; start all workers, check their addresses, "
            "or give a longer --start_timeout",
            LOST,
        )
    os.environ["TF_CONFIG"] = cluster.tf_config
    late_line = (
        f"error: {rendezvous.name(cluster)}: another worker ended while TensorFlow connected; "
        "start all workers again"
    )
    try:
        with (
            _ended_after(start_timeout, late_line),
            _interruptible(),
            _timeouts(start_timeout, heartbeat_timeout),
        ):
            return tf.distribute.MultiWorkerMirroredStrategy()
    except tf.errors.UnknownError as error:  # the server cannot start
        raise UserError(
            f"{rendezvous.name(cluster)} cannot join the other workers: {reason(error)}"
        ) from error
    except tf.errors.OpError:
        end(late_line, LOST)


@contextlib.contextmanager
def ends_if_lost(resume: str) -> Iterator[None]:
    """Ends the process with exit code 75 and one line if another worker is lost.

    TensorFlow's own shutdown would wait for the lost worker.

    Args:
        resume: str. The hint to print.
    """
    import tensorflow as tf

    try:
        yield
    except tf.errors.OpError as error:
        if not _is_loss(error):
            raise
        end(f"error: another worker was lost ({type(error).__name__}); {resume}", LOST)


def end(line: str, code: int) -> None:
    """Prints a line on stderr, and ends the process at once."""
    with contextlib.suppress(OSError, ValueError):
        print(" ".join(line.split()), file=sys.stderr, flush=True)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


def _is_loss(error: Any) -> bool:
    import tensorflow as tf

    errors = tf.errors
    loss = (
        errors.UnavailableError,
        errors.AbortedError,
        errors.CancelledError,
        errors.DeadlineExceededError,
    )
    # Other errors may be defects of the program, which a restart would repeat.
    return isinstance(error, loss) or bool(_OF_PEERS.search(error.message or ""))


@contextlib.contextmanager
def _ended_after(seconds: float, line: str) -> Iterator[None]:
    """Kills this process, and prints a line, if the body takes longer than `seconds`.

    While TensorFlow connects, no Python code runs in this process. A second process therefore
    watches the time.
    """
    if os.name == "nt":  # Windows cannot wait for a pipe with a time limit
        yield
        return
    command = [sys.executable, "-c", _WATCHER, str(os.getpid()), str(seconds), line]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as watcher:
        try:
            yield
        finally:
            assert watcher.stdin is not None
            watcher.stdin.close()  # ends the watcher


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process while TensorFlow waits."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _timeouts(start: float, heartbeat: float) -> Iterator[None]:
    """Sets the time limits of TensorFlow's coordination service, which has no public setting."""
    from tensorflow.python.eager import context

    present = context.context()
    present.configure_coordination_service = functools.partial(
        present.configure_coordination_service,
        cluster_register_timeout_in_ms=int(start * 1000),
        heartbeat_timeout_in_ms=int(heartbeat * 1000),
        shutdown_barrier_timeout_in_ms=int(heartbeat * 1000),
    )
    try:
        yield
    finally:
        del present.configure_coordination_service
