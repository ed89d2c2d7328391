"""Turns Ctrl-C and SIGTERM into a request to stop after the current step and a checkpoint."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# The signal of a closed pipe, by its POSIX number: Windows has no such signal.
CLOSED_PIPE = 13


class Stopped(Exception):
    """Exception of a run that was asked to stop and has saved a checkpoint."""

    def __init__(self, signal_number: int):
        super().__init__(_name(signal_number))
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """Returns the exit code: 130 after Ctrl-C, 143 after SIGTERM, 141 after a closed pipe."""
        return 128 + self.signal_number


class StopRequest:
    """Handler of SIGINT and SIGTERM. In its context, the first signal only sets `number`.

    A second signal has its usual effect, so that it can end a program that hangs.

    Example:
    >>> import os, signal
    >>> with StopRequest() as request:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     bool(request), request.number == signal.SIGTERM
    (True, True)
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.number is not None

    def output_is_gone(self) -> None:
        """Requests a stop because the reader of the output has ended."""
        self.number = CLOSED_PIPE

    def error(self) -> Stopped:
        """Returns the exception to raise once the run has stopped."""
        assert self.number is not None
        return Stopped(self.number)

    def __enter__(self) -> StopRequest:
        # Python allows only the main thread to set handlers. Elsewhere the caller handles signals.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore_handlers()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def _name(number: int) -> str:
    return "SIGPIPE" if number == CLOSED_PIPE else signal.Signals(number).name
