"""Training throughput: tokens a second, without the time of logging, saving and evaluation."""

from __future__ import annotations

import time
from collections.abc import Callable


class ThroughputMeter:
    """Counts tokens and seconds of training steps.

    A lap begins after a step, so that the first one, which traces, is in none. It ends before
    anything that is not training: a log entry, a checkpoint, an evaluation.

    Args:
        wait: called before a lap is timed; waits for the device to be done.
        clock: for tests.

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
        self._recent = (0.0, 0.0)  # tokens and seconds, older laps counting less and less

    @property
    def tokens_per_second(self) -> float | None:
        """The throughput of the last laps, a long one counting more; `None` before the first."""
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
        """Ends the lap; returns its tokens and seconds, (0, 0.0) if nothing was timed."""
        tokens, began = self._tokens, self._began
        self._began, self._tokens = None, 0
        if began is None or not tokens:
            return 0, 0.0
        self._wait()
        seconds = max(self._clock() - began, 1e-9)
        self._recent = (0.7 * self._recent[0] + tokens, 0.7 * self._recent[1] + seconds)
        return tokens, seconds
