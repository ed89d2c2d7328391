"""Checks and joins the outputs of the batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf


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
