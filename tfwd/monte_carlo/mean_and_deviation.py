"""Mean and standard deviation of the outputs of one batch, over the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


class Sums:
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


def dense(output: Any) -> np.ndarray:
    """Returns an output as an array.

    Raises:
        ValueError: If the output is not a dense tensor of real numbers, or has no axis of examples.
    """
    kind = type(output).__name__
    if isinstance(output, tf.Tensor):
        real = output.dtype.is_floating or output.dtype.is_integer or output.dtype.is_bool
        if real and output.shape.rank:
            return output.numpy()
        kind = f"tensor of dtype {output.dtype.name} and shape {tuple(output.shape)}"
    raise ValueError(
        f"the model returns a {kind}: expected dense tensors of real numbers, with the examples on "
        "the first axis. Use a model that returns such outputs"
    )


def concatenated(parts: tuple[np.ndarray, ...], axis: int) -> np.ndarray:
    """Concatenates the outputs of several batches.

    Raises:
        ValueError: If the outputs of the batches have different shapes.
    """
    shapes = {part.shape[axis + 1 :] for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"the outputs of the batches differ in shape: {' and '.join(map(str, sorted(shapes)))} "
            "for each example. Pad all batches of x to one length, or predict each batch separately"
        )
    return np.concatenate(parts, axis)
