"""Losses and regularizers of Keras 3: of a compiled model, and one loss on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.trainers.compile_utils import CompileLoss
from keras.src.utils.naming import to_snake_case

from tfwd._keras3.variables import value


def default_name(loss: Any) -> str:
    """Returns the name that Keras gives to a loss object without a name: its class, with `_`."""
    return str(to_snake_case(type(loss).__name__))


def compiled_loss(model: keras.Model) -> tuple[Any, Any]:
    """Returns the loss and the loss weights that a model was compiled with, each or None."""
    found = getattr(model, "_compile_loss", None)
    if found is None:
        return None, None
    return getattr(found, "_user_loss", None), getattr(found, "_user_loss_weights", None)


def loss_as_compiled(
    model: keras.Model, loss: Any, loss_weights: Any = None
) -> Callable[[Any, Any], Any]:
    """Converts a loss as `compile` does, to a function of labels and outputs.

    Args:
        model: Model with the outputs.
        loss: Loss as in `compile`, but not None.
        loss_weights: Weights as in `compile`. Default None.
    """
    names = getattr(model, "output_names", None)
    return CompileLoss(loss, loss_weights=loss_weights, output_names=names)


def loss_object(loss: Any) -> keras.losses.Loss:
    """Returns the Keras loss of a name, a function `(y_true, y_pred) -> values`, or a config."""
    found = keras.losses.get(loss)
    if isinstance(found, type):
        found = found()
    return found if isinstance(found, keras.losses.Loss) else LossFunctionWrapper(found)


def loss_arguments(loss: keras.losses.Loss, y: Any, output: Any) -> tuple[Any, Any]:
    """Returns targets and outputs in the dtype in which Keras passes them to a loss."""
    return tuple(
        tf.nest.map_structure(lambda t: keras.ops.convert_to_tensor(t, loss.dtype), value)
        for value in (y, output)
    )


def ignored_class(loss: Any) -> int | None:
    """Returns the label that a loss of Keras leaves out, or None."""
    return getattr(loss, "ignore_class", None)


def to_same_rank(values: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Removes or adds a last axis of size one as Keras does before it weights losses."""
    return squeeze_or_expand_to_same_rank(values, weights)


def regularization(model: keras.Model) -> list[tf.Tensor | None]:
    """Returns the gradients of the regularizers of a model's trainable weights, in their order."""
    found: list[tf.Tensor | None] = []
    for variable in model.trainable_variables:
        if variable.regularizer is None:
            found.append(None)
            continue
        raw = value(variable)
        with tf.GradientTape() as tape:
            tape.watch(raw)
            loss = variable.regularizer(raw)
        found.append(tape.gradient(loss, raw))
    return found
