"""Shows a run: a progress bar on a terminal, or a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from tfwd.runs.interfaces import Score


class Output(Console):
    """Rich console that calls `on_reader_gone` if the reader of a pipe has ended, such as `head`.

    Afterwards it prints nothing. rich itself would end the process, and the training since the last
    checkpoint would be lost.
    """

    on_reader_gone: Callable[[], None] | None = None

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if self.on_reader_gone is None:
            raise BrokenPipeError
        self.on_reader_gone()


class Display:
    """Progress display of a run: the current epoch, and lines of text above it.

    Args:
        score: how a loss is shown.
        console: the console. Standard output by default.
        seconds: float. Time between two lines if the output is not a terminal.
        clock: function that returns the time in seconds. Tests replace it.

    Example:
    >>> import io, math
    >>> out = io.StringIO()
    >>> display = Display(Score("perplexity", math.exp, "token"), Console(file=out), seconds=0)
    >>> with display:
    ...     display.epoch("epoch 1/3", windows=8, done=0)
    ...     display.window(4, loss=2.0, tokens_per_second=1234.5, seconds_left=75)
    >>> print(out.getvalue(), end="")
    epoch 1/3  50%  loss 2.000  perplexity 7.39  1,234 tokens/s  1:15 left
    """

    def __init__(
        self,
        score: Score,
        console: Console | None = None,
        seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.console, self._score = console or Output(), score
        self._seconds, self._clock = seconds, clock
        self._title, self._windows, self._last = "", 1, clock()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            transient=True,
            expand=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("", total=1, facts="", visible=False)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def line(self, text: str) -> None:
        """Prints a line."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def epoch(self, title: str, windows: int, done: int) -> None:
        """Starts the display of an epoch."""
        self._title, self._windows = title, max(windows, 1)
        self._bar.update(self._task, description=title, total=windows, completed=done, visible=True)

    def window(
        self,
        done: int,
        loss: float | None = None,
        tokens_per_second: float | None = None,
        seconds_left: float | None = None,
    ) -> None:
        """Updates the position in the epoch, and shows the last known numbers."""
        facts = []
        if loss is not None:
            shown = f"{self._score.name} {self._score.of_loss(loss):.2f}"
            facts.append(f"loss {loss:.3f}" + (f"  {shown}" if self._score.name != "loss" else ""))
        if tokens_per_second is not None:
            facts.append(f"{int(tokens_per_second):,} {self._score.unit}s/s")
        if seconds_left is not None:
            facts.append(f"{duration_text(seconds_left)} left")
        self._bar.update(self._task, completed=done, facts="  ".join(facts))
        if not self.console.is_terminal and self._clock() - self._last >= self._seconds:
            self._last = self._clock()
            self.line("  ".join([self._title, f"{done / self._windows:.0%}", *facts]))


def duration_text(seconds: float) -> str:
    """Returns a time span as h:mm:ss or m:ss.

    Example:
    >>> duration_text(75.4), duration_text(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
