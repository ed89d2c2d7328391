"""The loss of each example of a batch, for any reduction of the loss object.

For values `v_bp` of a loss at the positions `p` of an example (one, or time steps, or pixels), with
masks `m` and sample weights `w`:

    l_b = sum_p m_bp w_bp v_bp / sum_p m_bp

A Keras loss with the reduction "sum_over_batch_size" returns the same value for the example alone.
The losses of several outputs are summed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import losses as _keras_losses


class OutputLoss(NamedTuple):
    """Loss of one output.

    Attributes:
        name: Name of the output, for messages.
        loss: Keras loss.
        weight: Factor of the output's losses.
    """

    name: str
    loss: keras.losses.Loss
    weight: float


class Losses:
    """Per-example losses of a model's outputs.

    Args:
        loss: Name, function `(y_true, y_pred) -> values`, or Keras loss. For a model with several
            outputs also a list or dict in the outputs' structure, with None for an output without a
            loss.
        weights: Factors of several outputs' losses, as a list or dict in their structure. Default
            None.
        names: Keras's names of the outputs. Needed for dicts, if the outputs are a list. Default
            None.

    Raises:
        ValueError: If `loss` is none of these, or if a loss overrides `__call__`.
    """

    def __init__(self, loss: Any, weights: Any = None, names: Sequence[str] | None = None) -> None:
        self._loss, self._weights = loss, weights
        self._names = None if names is None else list(names)
        for one in tf.nest.flatten(loss):
            if one is not None:
                _checked(one, "the output")
        if not any(one is not None for one in tf.nest.flatten(loss)):
            raise ValueError("loss is None: pass a Keras loss, its name or a function")

    def __call__(self, y: Any, outputs: Any, sample_weight: Any) -> tf.Tensor:
        """Returns the losses `[B]`.

        Raises:
            ValueError: If targets and outputs do not match, or if a loss has no value per example.
        """
        total = None
        for name, part, target, output, weight in self._matched(y, outputs, sample_weight):
            losses = _of_output(name, part.loss, target, output, weight)
            losses = losses if part.weight == 1 else losses * part.weight
            total = losses if total is None else total + losses
        return total

    def _matched(self, y: Any, outputs: Any, sample_weight: Any) -> list[tuple]:
        names = _names(outputs)
        flat_outputs = _spread(outputs, names)
        several = len(names) > 1
        loss, factors, y, sample_weight = (
            self._numbered(value, names) for value in (self._loss, self._weights, y, sample_weight)
        )
        losses = _spread(loss, names, "loss", same=True)
        unused = [name for name in names if losses[name] is None]
        targets = _spread(y, names, "y", optional=unused)
        weights = _spread(factors, names, "loss_weights", same=True)
        samples = _spread(sample_weight, names, "sample_weight", same=True)
        found = []
        for name in names:
            if losses[name] is None:
                continue
            where = f"output {name!r}" if several else "the output"
            part = OutputLoss(where, _checked(losses[name], where), _number(weights[name]))
            found.append((where, part, targets[name], flat_outputs[name], samples[name]))
        return found

    def _numbered(self, value: Any, names: list[Any]) -> Any:
        """Replaces output names by output indices in a dict, if the model returns a list."""
        ours = self._names
        if not isinstance(value, Mapping) or ours is None or names != list(range(len(ours))):
            return value
        return {ours.index(key) if key in ours else key: inner for key, inner in value.items()}


def _names(outputs: Any) -> list[Any]:
    if isinstance(outputs, Mapping):
        return list(outputs)
    return list(range(len(outputs))) if isinstance(outputs, (list, tuple)) else [0]


def _spread(
    value: Any,
    names: list[Any],
    what: str = "",
    same: bool = False,
    optional: Sequence[Any] = (),
) -> dict[Any, Any]:
    """Returns one value per output, from a dict, a list, or a common value."""
    if isinstance(value, Mapping):
        unknown = [key for key in value if key not in names]
        missing = [key for key in names if key not in value and key not in optional]
        if unknown or (missing and not same):
            raise ValueError(
                f"{what} has the keys {list(value)}, but the model's outputs are {names}"
            )
        return {name: value.get(name) for name in names}
    if isinstance(value, (list, tuple)) and (len(names) > 1 or len(value) == 1):
        if len(value) != len(names):
            raise ValueError(f"{what} has {len(value)} entries for {len(names)} outputs {names}")
        return dict(zip(names, value, strict=True))
    if len(names) > 1 and not same:
        raise ValueError(f"{what} must be a list or dict: the model has the outputs {names}")
    return dict.fromkeys(names, value)


def _checked(loss: Any, where: str) -> keras.losses.Loss:
    try:
        found = _keras_losses.loss_object(loss)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"the loss {loss!r} of {where} is not a Keras loss, its name or a function"
        ) from error
    if type(found).__call__ is not keras.losses.Loss.__call__:
        raise ValueError(
            f"the loss {type(found).__name__} of {where} overrides __call__, so the examples' "
            "losses are unknown: override call(), which returns a value per example"
        )
    return found


def _number(weight: Any) -> float:
    return 1.0 if weight is None else float(weight)


def _of_output(
    where: str, loss: keras.losses.Loss, y: Any, output: Any, sample_weight: Any
) -> tf.Tensor:
    mask = _keras.layers.get_mask(output)
    target, prediction = _keras_losses.loss_arguments(loss, y, output)
    values = tf.convert_to_tensor(loss.call(target, prediction))
    if values.shape.rank == 0:
        raise ValueError(
            f"the loss of {where} returns one number for the whole batch; it must return a value "
            "per example, of shape [batch] or [batch, ...], and leave the reduction to tfwd"
        )
    for found in (_keras.layers.get_mask(values),):
        mask = found if mask is None else mask if found is None else mask & found
    count: Any = None
    if mask is not None:
        values, mask = _aligned(values, tf.cast(mask, values.dtype))
        values = values * mask
        count = tf.broadcast_to(mask, tf.shape(values))
        count = tf.reduce_sum(tf.reshape(count, [tf.shape(count)[0], -1]), 1)
    if sample_weight is not None:
        values, weight = _aligned(values, tf.cast(sample_weight, values.dtype))
        values = values * weight
    batch = tf.shape(values)[0]
    flat = tf.reshape(values, [batch, -1])
    if count is None:
        return tf.reduce_mean(flat, 1)
    return tf.math.divide_no_nan(tf.reduce_sum(flat, 1), count)


def _aligned(values: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns both with equal ranks, so that weights broadcast along the last axes."""
    values, weights = _keras_losses.to_same_rank(values, weights)
    rank = max(values.shape.rank, weights.shape.rank)
    for _ in range(rank - weights.shape.rank):
        weights = weights[..., tf.newaxis]
    for _ in range(rank - values.shape.rank):
        values = values[..., tf.newaxis]
    return values, weights
