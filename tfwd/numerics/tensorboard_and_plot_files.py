"""Log files of `FiniteCheck`: TensorBoard's events and a plot."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.checked_tensors import Frame
from tfwd.numerics.magnitude_plot import Magnitudes
from tfwd.numerics.tensorboard_debug_info import DebugInfo


class Log:
    """Log files of one training.

    If a file cannot be written, for example because the disk is full, the log ends with a warning.
    Training continues.

    Args:
        model: the compiled model.
        log_dir: path of a folder for TensorBoard, or None.
        plot: path of a file for the plot of magnitudes, or None.
        every: int. Log one step in every N to TensorBoard, starting with the first. If that step is
            not checked, the next checked step is logged.
        due: int. Number of the next step to log, from the log of an earlier training. Default None.

    Attributes:
        due: int. Number of the next step to log, or None before the first step.
    """

    def __init__(
        self,
        model: keras.Model,
        log_dir: str | os.PathLike[str] | None,
        plot: str | os.PathLike[str] | None,
        every: int,
        due: int | None = None,
    ):
        self.plot, self._every, self.due = plot, every, due
        self.magnitudes = Magnitudes()
        if plot is not None:
            try:
                Path(plot).parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"plot={os.fspath(plot)!r} cannot be written: {error}") from error
        self._writer: Any = None
        if log_dir is not None:
            try:
                self._writer = tf.summary.create_file_writer(os.fspath(log_dir))
            except tf.errors.OpError as error:
                raise ValueError(
                    f"log_dir={os.fspath(log_dir)!r} cannot be written: {error.message}"
                ) from error
        self._info = None if log_dir is None else DebugInfo(model)

    @property
    def wants_magnitudes(self) -> bool:
        """Returns True if `step` must be called with the largest values."""
        return self.plot is not None or self._writer is not None

    def before_step(self, batch: Any, step: int) -> None:
        """Logs the tensors of the next step to TensorBoard, if the step is due."""
        past = (step - 1) % self._every  # number of steps since one that is a multiple
        if self.due is None:
            self.due = step - past + self._every * (past > 0)
        if self._info is not None and step >= self.due:
            self.due = step - past + self._every
            info, writer = self._info, self._writer
            self._safely(lambda: info.write(batch, writer, step))

    def step(self, step: int, largest: Iterable[tuple[Frame, float]]) -> None:
        """Stores the largest values of the tensors in a step."""
        self.magnitudes.add(step, largest)

    def report(self, report: Report) -> None:
        """Writes a report, and the plot up to the step of the report."""
        known = self.magnitudes.rows
        self.magnitudes.add(
            report.step,
            [
                (one.frame, one.detail.summary.abs_max if one.is_finite else float("inf"))
                for one in report.found
                if not known or one.frame.label in known
            ],
        )
        if self._writer is not None:
            with self._writer.as_default(step=report.step):
                self._safely(lambda: tf.summary.text("finite_check", f"```\n{report}\n```"))
        self._draw(report.step)

    def close(self, step: int) -> None:
        """Writes the plot, and flushes the log to the disk."""
        if self.magnitudes.steps:
            self._draw(step)
        if self._writer is not None:
            self._safely(self._writer.close)

    def _draw(self, step: int) -> None:
        if self.plot is not None:
            path = self.plot
            self._safely(lambda: self.magnitudes.write_plot(path))
        if self._writer is not None:
            image = tf.io.decode_png(self.magnitudes.png(), channels=3)
            with self._writer.as_default(step=step):
                self._safely(lambda: tf.summary.image("magnitudes", image[tf.newaxis]))

    def _safely(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except (OSError, tf.errors.OpError) as error:
            self._writer = self._info = self.plot = None
            warnings.warn(
                f"FiniteCheck stops its log, because a file cannot be written: {error}",
                stacklevel=2,
            )


def check_plot(plot: str | os.PathLike[str]) -> None:
    """Raises a ValueError if a plot cannot be written to a file with this suffix."""
    # Imported here, because it is slow.
    known = importlib.import_module("matplotlib.backend_bases").FigureCanvasBase.filetypes
    ending = Path(plot).suffix.removeprefix(".").lower()
    if ending not in known:
        raise ValueError(f"plot={os.fspath(plot)!r}: give a file that ends in .png, .svg or .pdf")
