"""Creates weights and inputs for trials: a few examples, with values that are not zero.

Zeros hide to which example a row belongs: no gradient passes a head whose weights are zero. A trial
therefore uses other weights and inputs: first close to the real values, then far from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.gradients.batch_data import Data

# Sizes for an axis of unknown size. They are tried until the model accepts the inputs.
UNKNOWN_AXES = (8, 4, 2, 1)

Values = dict[int, tf.Tensor]  # keyed by the weights' ids


class TrialExamples(NamedTuple):
    """Examples for a trial.

    Attributes:
        x: Inputs, tensors with values.
        size: int. Number of examples.
    """

    x: Any
    size: int


def settings(model: keras.Model, data: Data) -> Iterator[TrialExamples]:
    """Yields examples in several numbers and sizes, to try until the model accepts them."""
    size = data.size if isinstance(data.size, int) else None
    counts = [_fixed_batch(model), 2 if size is None else min(2, size), size]
    for count in dict.fromkeys(counts):
        # A single example shows nothing. It is used only if the batch has one example.
        if count is None or (size is not None and count > size) or (count == 1 != size):
            continue
        if all(hasattr(t, "numpy") for t in tf.nest.flatten(data.x) if t is not None):
            yield TrialExamples(data.part(0, count).x, count)
            continue
        flat = [t for t in tf.nest.flatten(data.x) if t is not None]
        known = all(t.shape[1:].is_fully_defined() for t in flat)
        for unknown in UNKNOWN_AXES[:1] if known else UNKNOWN_AXES:
            yield TrialExamples(_made_up(data.x, count, unknown), count)


def attempts(model: keras.Model, x: Any) -> Iterator[tuple[Values, Any]]:
    """Yields weights and inputs. The first ones are the most likely to give a result."""
    yield _weights(model, _near), _changed(x, _near_input)
    yield _weights(model, _near), _changed(x, _finite)
    # With only positive numbers no unit is inactive, and nothing cancels.
    yield _weights(model, _positive), _changed(x, _filled)
    yield _weights(model, _far), _changed(x, _filled)


def _fixed_batch(model: keras.Model) -> int | None:
    """Returns the number of examples that the model is built for, or None for any number."""
    for tensor in tf.nest.flatten(getattr(model, "inputs", None)):
        if tensor is not None and tensor.shape[0] is not None:
            return tensor.shape[0]
    for layer in _keras.layers.all_layers(model):
        states = tf.nest.flatten(getattr(layer, "states", None))
        if getattr(layer, "stateful", False) and states and states[0] is not None:
            return states[0].shape[0]
    return None


def _made_up(x: Any, count: int, unknown: int) -> Any:
    def made(tensor: Any) -> Any:
        if tensor is None:
            return None
        shape = [count, *(unknown if n is None else n for n in tensor.shape[1:])]
        if tensor.dtype == tf.string:
            return tf.fill(shape, "")
        values = tf.random.stateless_normal(shape, [0, 1])
        return tf.cast(values if tensor.dtype.is_floating else values > 0, tensor.dtype)

    return tf.nest.map_structure(made, x)


def _weights(model: keras.Model, change: Callable[[tf.Tensor, int], tf.Tensor]) -> Values:
    found = {}
    for number, variable in enumerate(model.trainable_variables):
        value = _keras.variables.value(variable)
        if value.dtype.is_floating:
            changed = tf.cast(change(tf.cast(value, tf.float32), number), value.dtype)
            found[id(variable)] = changed
    return found


def _changed(x: Any, change: Callable[[tf.Tensor, int], tf.Tensor]) -> Any:
    def changed(tensor: Any, number: int) -> Any:
        if not isinstance(tensor, tf.Tensor) or not (
            tensor.dtype.is_floating or tensor.dtype.is_integer
        ):
            return tensor
        result = change(tensor, number)
        mask = _keras.layers.get_mask(tensor)
        if mask is not None:
            _keras.layers.set_mask(result, mask)
        return result

    flat = [changed(tensor, number) for number, tensor in enumerate(tf.nest.flatten(x))]
    return tf.nest.pack_sequence_as(x, flat)


def _uniform(like: tf.Tensor, low: float, high: float, number: int) -> tf.Tensor:
    shape = tf.shape(like)
    return low + (high - low) * tf.random.stateless_uniform(shape, [number, 2])


def _breadth(value: tf.Tensor) -> float:
    """Returns the number of entries that are summed for one output, as the shape shows it."""
    inner = value.shape[:-1].num_elements() if value.shape.rank else 1
    return max(1, inner)


def _near(value: tf.Tensor, number: int) -> tf.Tensor:
    """Returns weights with the same signs. Zeros and NaNs are replaced by small values."""
    small = _uniform(value, -1, 1, number) / _breadth(value) ** 0.5
    usable = tf.math.is_finite(value) & (value != 0)
    return tf.where(usable, value * _uniform(value, 0.75, 1.25, number), small)


def _positive(value: tf.Tensor, number: int) -> tf.Tensor:
    return _uniform(value, 0.1, 2, number) / _breadth(value)


def _far(value: tf.Tensor, number: int) -> tf.Tensor:
    return _uniform(value, -2, 2, number) / _breadth(value) ** 0.5


def _finite(tensor: tf.Tensor, number: int) -> tf.Tensor:
    if not tensor.dtype.is_floating:
        return tensor
    return tf.where(tf.math.is_finite(tensor), tensor, tf.zeros_like(tensor))


def _near_input(tensor: tf.Tensor, number: int) -> tf.Tensor:
    """Returns inputs slightly above the real inputs, so that an id as a float stays the same."""
    if not tensor.dtype.is_floating:
        return tensor
    return _finite(tensor, number) + tf.cast(_uniform(tensor, 0.1, 0.4, number), tensor.dtype)


def _filled(tensor: tf.Tensor, number: int) -> tf.Tensor:
    """Returns random floats between 0.1 and 1. Ids of 0, the usual padding, are replaced."""
    if tensor.dtype.is_floating:
        return tf.cast(_uniform(tensor, 0.1, 1, number), tensor.dtype)
    return tf.where(tensor == 0, tf.reduce_max(tensor), tensor)
