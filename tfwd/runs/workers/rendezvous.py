"""Waits for all workers before TensorFlow starts, and names a missing or wrong worker.

TensorFlow waits for the workers in C++. This wait cannot be interrupted, and does not say which
worker is missing. The workers therefore first meet through plain sockets at the same addresses.
Each worker listens at its own address and reports to the chief. When all workers have reported, the
chief tests their addresses, and all workers continue. All messages are lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from typing import Any

from tfwd.runs.errors import UserError, reason
from tfwd.runs.workers.worker_addresses import Cluster

_PAUSE = 0.2  # seconds between two attempts to reach the chief
_MOST = 1 << 16  # maximum number of bytes of a message


class WorkerMissing(Exception):
    """Exception for a worker that is missing after the time limit."""


def meet(cluster: Cluster, seconds: float) -> None:
    """Waits until all workers have reported to the chief.

    Args:
        cluster: the workers.
        seconds: float. The time limit.

    Raises:
        UserError: this worker cannot listen at its address. Or two workers have the same number, a
            worker has other addresses, or a worker does not answer at its address. Then all workers
            raise the error.
        WorkerMissing: a worker is missing after the time limit.
    """
    end = time.monotonic() + seconds
    with _listener(cluster) as listener:
        if cluster.number == 0:
            _Chief(cluster, listener).wait(end, seconds)
        else:
            _report(cluster, end, seconds)


def name(cluster: Cluster, number: int | None = None) -> str:
    """Returns the name of a worker for messages. Default: this worker."""
    number = cluster.number if number is None else number
    return f"worker {number} ({cluster.addresses[number]})"


def _listener(cluster: Cluster) -> socket.socket:
    host, port = _split(cluster.addresses[cluster.number])
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
        listener.listen(len(cluster.addresses) + 8)
    except OSError as error:
        listener.close()
        raise UserError(
            f"{name(cluster)} cannot listen at port {port} ({reason(error)}): give each worker its "
            "own number and port"
        ) from error
    return listener


class _Chief:
    def __init__(self, cluster: Cluster, listener: socket.socket):
        self._cluster, self._listener = cluster, listener
        self._present: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()

    def wait(self, end: float, seconds: float) -> None:
        self._selector.register(self._listener, selectors.EVENT_READ)
        try:
            while len(self._present) < len(self._cluster.addresses) - 1:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    self._fail(self._missing(seconds), late=True)
                for key, _ in self._selector.select(min(remaining, 1.0)):
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._remove(key.data)
            for number in self._present:
                self._test_address(number)
            self._send_all({"go": True})
        finally:
            for connection in self._present.values():
                connection.close()
            self._selector.close()

    def _missing(self, seconds: float) -> str:
        missing = [
            name(self._cluster, number)
            for number in range(1, len(self._cluster.addresses))
            if number not in self._present
        ]
        return f"after {seconds:g} seconds, no message from {', '.join(missing)}"

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(5.0)
        message = _read(connection)
        if not isinstance(message, dict) or "number" not in message:  # not a worker
            connection.close()
            return
        number = message["number"]
        if message.get("addresses") != list(self._cluster.addresses):
            problem = f"worker {number} has another list of addresses than the chief: give all"
            problem += " workers the same list"
            _send(connection, {"error": problem})
            connection.close()
            self._fail(problem)
        if number in self._present:
            _send(connection, {"error": f"two workers have the number {number}"})
            connection.close()
            self._fail(f"two workers have the number {number}: give each worker its own index")
        self._present[number] = connection
        self._selector.register(connection, selectors.EVENT_READ, number)

    def _remove(self, number: int) -> None:
        """Removes a worker that has ended. The worker may be started again."""
        connection = self._present.pop(number)
        self._selector.unregister(connection)
        connection.close()

    def _test_address(self, number: int) -> None:
        try:
            with socket.create_connection(_split(self._cluster.addresses[number]), timeout=5.0):
                pass
        except OSError as error:
            self._fail(
                f"{name(self._cluster, number)} does not answer at its address: {reason(error)}"
            )

    def _fail(self, text: str, late: bool = False) -> None:
        self._send_all({"error": text, "late": late})
        raise WorkerMissing(text) if late else UserError(text)

    def _send_all(self, message: dict[str, Any]) -> None:
        for connection in self._present.values():
            _send(connection, message)


def _report(cluster: Cluster, end: float, seconds: float) -> None:
    """Reports this worker to the chief, and waits for the chief's answer."""
    hello = {"number": cluster.number, "addresses": list(cluster.addresses)}
    problem = ""
    while (remaining := end - time.monotonic()) > 0:
        answer = None
        with contextlib.suppress(socket.timeout):
            try:
                address = _split(cluster.addresses[0])
                with socket.create_connection(address, timeout=remaining) as chief:
                    _send(chief, hello)
                    chief.settimeout(max(end - time.monotonic(), 0.0) + 2.0)
                    answer = _read(chief)
            except OSError as error:
                problem = reason(error)
        if isinstance(answer, dict) and answer.get("go"):
            return
        if isinstance(answer, dict) and "error" in answer:
            raise (
                WorkerMissing(answer["error"]) if answer.get("late") else UserError(answer["error"])
            )
        time.sleep(_PAUSE)  # the chief has not started yet, or has ended
    detail = f" ({problem})" if problem else ""
    raise WorkerMissing(
        f"after {seconds:g} seconds, no message from the chief, {name(cluster, 0)}{detail}"
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the receiver has ended
        connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket) -> Any:
    """Returns a message, or `None` if the sender has ended or sent something else."""
    content = b""
    try:
        while not content.endswith(b"\n") and len(content) < _MOST:
            part = connection.recv(4096)
            if not part:
                return None
            content += part
        return json.loads(content)
    except (OSError, ValueError):
        return None
