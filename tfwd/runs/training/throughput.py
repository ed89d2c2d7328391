"""Measures throughput (tokens per second), excluding logging, saving and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable


class ThroughputMeter:
    """Meter of the items (tokens or texts) per second of training steps.

    A lap starts after a step, so no lap includes the first step, which traces. A lap ends before a
    log entry, a checkpoint or an evaluation.

    Args:
        wait: function that waits for the device. Called before a lap is timed.
        clock: function that returns the time in seconds. Tests replace it.

    Example:
    >>> now = iter([0.0, 2.0])
    >>> meter = ThroughputMeter(clock=lambda: next(now))
    >>> meter.step(100); meter.step(100); meter.step(100)
    >>> meter.end_lap()
    (200, 2.0)
    >>> meter.tokens_per_second
    100.0
    """

    def __init__(
        self,
        wait: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._wait, self._clock = wait, clock
        self._began: float | None = None
        self._tokens = 0
        self._recent = (0.0, 0.0)  # tokens and seconds, in which older laps count less

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the throughput of the last laps, or `None` before the first.

        A longer lap counts more.
        """
        tokens, seconds = self._recent
        return tokens / seconds if seconds else None

    def step(self, tokens: int) -> None:
        """Counts a step that was just made."""
        if self._began is None:
            self._wait()
            self._began = self._clock()
        else:
            self._tokens += tokens

    def end_lap(self) -> tuple[int, float]:
        """Ends the lap. Returns its tokens and seconds, or (0, 0.0) if nothing was timed."""
        tokens, began = self._tokens, self._began
        self._began, self._tokens = None, 0
        if began is None or not tokens:
            return 0, 0.0
        self._wait()
        seconds = max(self._clock() - began, 1e-9)
        self._recent = (0.7 * self._recent[0] + tokens, 0.7 * self._recent[1] + seconds)
        return tokens, seconds
