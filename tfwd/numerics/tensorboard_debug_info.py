"""Scalars and histograms of a model's tensors for TensorBoard, like Caffe's `debug_info`.

    abs mean of each output, weight and gradient      mean(|t|)
    share of zeros                                    100 * #(t = 0) / #t
    ratio of update to weight                         mean(|w' - w|) / mean(|w|)

For this, the batch runs once more, and the step is undone. Training does not change. Only these
numbers and a sample of the elements are stored for each tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.numerics.checked_step import CheckedStep
from tfwd.numerics.checked_tensors import Frame

KINDS = {
    "output": "output",
    "weight": "weight",
    "gradient": "gradient",
    "weight gradient": "gradient",
    "update": "update",
}
SAMPLE = 4096  # number of elements of a tensor that its histogram shows


class Measured(NamedTuple):
    """Measurement of a tensor.

    Attributes:
        abs_mean: the mean of absolute values. For an update, the mean absolute change of the
            weight, divided by the mean absolute value of the weight.
        zeros: the percentage of elements that are 0.
        sample: elements at regular intervals.
    """

    abs_mean: Any
    zeros: Any
    sample: Any


class DebugInfo:
    """Writer of the measurements of a compiled model's tensors, for a training batch.

    Args:
        model: the compiled model, as in `fit`.
    """

    def __init__(self, model: keras.Model):
        self._weights: dict[str, tf.Tensor] = {}
        self._step = CheckedStep(model, self._measure)

    def write(self, data: Any, writer: Any, step: int) -> None:
        """Writes the measurements for a batch.

        Args:
            data: the batch, as the dataset of `fit` yields it.
            writer: a summary writer of TensorFlow.
            step: int. The step's number in TensorBoard.
        """
        outcome = self._step(data)
        pairs = list(zip(outcome.frames, outcome.found[0], strict=True))
        # Gradients of outputs contain the loss scale. Gradients of weights do not contain it.
        scales = [found.abs_mean for frame, found in pairs if frame.kind == "loss scale"] or [1.0]
        with writer.as_default(step=step):
            for frame, found in pairs:
                kind = KINDS.get(frame.kind)
                if kind is None or (kind == "update" and frame.name not in self._weights):
                    continue
                if kind == "update":
                    tf.summary.scalar(f"update_to_weight/{frame.name}", found.abs_mean)
                    continue
                scale = scales[0] if frame.kind == "gradient" else 1.0
                name = f"{kind}/{frame.path}"
                tf.summary.scalar(f"abs_mean/{name}", found.abs_mean / scale)
                tf.summary.scalar(f"zeros_percent/{name}", found.zeros)
                tf.summary.histogram(name, np.asarray(found.sample, np.float64) / scale)

    def _measure(self, frame: Frame, tensor: Any, sequence: Any) -> Measured:
        values = tf.convert_to_tensor(tensor)  # adds rows of a `tf.IndexedSlices`
        size = tf.maximum(tf.size(values), 1)
        magnitude = at_least_float32(tf.abs(values))
        mean = tf.reduce_sum(magnitude) / tf.cast(size, magnitude.dtype)
        if frame.kind == "weight":
            self._weights[frame.name] = values
        elif frame.kind == "update":
            before = self._weights.get(frame.name, values)
            size_before = tf.reduce_mean(at_least_float32(tf.abs(before)))
            change = tf.reduce_mean(at_least_float32(tf.abs(values - before)))
            mean = tf.math.divide_no_nan(change, size_before)
        zeros = tf.reduce_sum(tf.cast(values == 0, tf.float32)) / tf.cast(size, tf.float32)
        flat = tf.reshape(values, [-1])
        return Measured(mean, 100.0 * zeros, flat[:: tf.maximum(size // SAMPLE, 1)])
