"""Losses and regularizers of Keras 2.15: of a compiled model, and one loss on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine.compile_utils import LossesContainer, match_dtype_and_rank
from keras.src.losses import LossFunctionWrapper
from keras.src.utils.generic_utils import to_snake_case

from tfwd._keras2.layers import all_layers
from tfwd._keras2.variables import tf_variable


def default_name(loss: Any) -> str:
    """Returns the name that Keras gives to a loss object without a name: its class, with `_`."""
    return str(to_snake_case(type(loss).__name__))


def compiled_loss(model: keras.Model) -> tuple[Any, Any]:
    """Returns the loss and the loss weights that a model was compiled with, each or None."""
    found = getattr(model, "compiled_loss", None)
    if found is None:
        return None, None
    return found._user_losses, found._user_loss_weights


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
    return LossesContainer(loss, loss_weights=loss_weights, output_names=names)


def loss_object(loss: Any) -> keras.losses.Loss:
    """Returns the Keras loss of a name, a function `(y_true, y_pred) -> values`, or a config."""
    found = keras.losses.get(loss)
    if isinstance(found, type):
        found = found()
    return found if isinstance(found, keras.losses.Loss) else LossFunctionWrapper(found)


def loss_arguments(loss: keras.losses.Loss, y: Any, output: Any) -> tuple[Any, Any]:
    """Returns targets and outputs in the dtype and rank in which Keras passes them to a loss."""
    if not tf.is_tensor(y) or not tf.is_tensor(output):
        return y, output
    y, output, _ = match_dtype_and_rank(y, output, None)
    return y, output


def ignored_class(loss: Any) -> int | None:
    """Returns the label that a loss of Keras leaves out, or None."""
    return getattr(loss, "_fn_kwargs", {}).get("ignore_class")


def to_same_rank(values: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Removes or adds a last axis of size one as Keras does before it weights losses."""
    if weights.shape.rank == values.shape.rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, [-1])
    return values, weights


def regularization(model: keras.Model) -> list[tf.Tensor | None]:
    """Returns the gradients of the regularizers of a model's trainable weights, in their order.

    A layer of Keras 2 stores regularizers as functions without arguments. The layer's list also has
    functions that a user passed to `add_loss`. Their losses are the same for every example too.
    """
    sources = [tf_variable(variable) for variable in model.trainable_variables]
    functions = [function for layer in all_layers(model) for function in layer._callable_losses]
    if not functions:
        return [None] * len(sources)
    with tf.GradientTape() as tape:
        losses = [tf.reduce_sum(loss) for f in functions if (loss := f()) is not None]
    found = tape.gradient(losses, sources)
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]
