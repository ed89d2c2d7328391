"""Mean and standard deviation of the outputs of one batch, over the samples."""

from __future__ import annotations

from typing import Any

import numpy as np


class SampleStatistics:
    """Means and sums of squares of one batch, by Welford's method.

    Args:
        keeps: bool. Also stores all samples.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps, self._count = keeps, 0
        self._kept: list[list[np.ndarray]] = []
        self._dtypes: list[Any] = []
        self._means: list[np.ndarray] = []
        self._squares: list[np.ndarray] = []

    def add(self, outputs: list[np.ndarray]) -> None:
        """Adds the outputs of one sample."""
        if not self._count:
            self._dtypes = [np.float64 if y.dtype == np.float64 else np.float32 for y in outputs]
            self._means = [np.zeros(y.shape) for y in outputs]
            self._squares = [np.zeros(y.shape) for y in outputs]
        self._count += 1
        if self._keeps:
            self._kept.append(outputs)
        for y, mean, squares in zip(outputs, self._means, self._squares, strict=True):
            difference = y - mean  # in float64
            mean += difference / self._count
            squares += difference * (y - mean)

    def means(self) -> list[np.ndarray]:
        """Returns the mean of each output."""
        return [m.astype(dtype) for m, dtype in zip(self._means, self._dtypes, strict=True)]

    def deviations(self) -> list[np.ndarray]:
        """Returns the standard deviation of each output."""
        return [
            np.sqrt(squares / self._count).astype(dtype)
            for squares, dtype in zip(self._squares, self._dtypes, strict=True)
        ]

    def samples(self) -> list[np.ndarray]:
        """Returns all samples of each output, `[n, batch, ...]`."""
        return [np.stack(each) for each in zip(*self._kept, strict=True)]
