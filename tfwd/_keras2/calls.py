"""Intercepts calls of layers and reads of variables, for `tfwd.gradients`.

Keras has no hooks. During a pass, the `call` of some classes is replaced by a function that uses
the present thread's handler, or the original call. Other threads are not affected. Subclasses that
call `super().call`, and wrappers that call `layer.call`, are intercepted too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine.compile_utils import match_dtype_and_rank
from keras.src.losses import LossFunctionWrapper
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from tfwd._keras2.draws import Draws
from tfwd._keras2.layers import NoAutographLayer, all_layers
from tfwd._keras2.substitution import Substitution
from tfwd._keras2.variables import tf_variable
from tfwd._keras_shared import interception, scopes
from tfwd._keras_shared.interception import Handler, calls_of, not_intercepted

__all__ = [
    "Captured",
    "Discarded",
    "Draws",
    "Handler",
    "Observed",
    "calls_of",
    "initial_states",
    "intercepted",
    "is_rematerialized",
    "loss_arguments",
    "loss_object",
    "not_intercepted",
    "recurrent_arguments",
    "recurrent_dropout",
    "regularization",
    "to_same_rank",
    "users_code",
]


def intercepted(
    classes: Iterable[type], handler: Handler
) -> contextlib.AbstractContextManager[None]:
    """Sends each `call` that one of the classes defines to `handler`, in the body, on this thread.

    Args:
        classes: Classes. Those that do not define `call` are ignored.
        handler: Function that is called in place of `call`. It gets the original.
    """
    return interception.intercepted(classes, handler, _asking)


def _asking(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @autograph.autograph_artifact  # so that AutoGraph converts its content and not itself
    @functools.wraps(original)
    def call(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(original, self)
        if not tf.executing_eagerly() and not isinstance(self, NoAutographLayer):
            own = autograph.tf_convert(own, ag_ctx.control_status_ctx())
        return interception.ask(cls, self, own, args, kwargs)

    return call


class Observed(scopes.Observing, Substitution):
    """A substitution that reports every read, update and loss."""


class Captured(scopes.Capturing, Substitution):
    """A substitution that stores all updates, except in functions that are traced in its body."""


class Discarded(scopes.Discarding, Substitution):
    """A substitution that discards all updates, except of chosen variables."""


def users_code() -> contextlib.AbstractContextManager[Any]:
    """Runs a model as Keras runs it in a function: with AutoGraph, which tfwd does not use."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Returns True if Keras runs the layer a second time in backward. Keras 2 never does."""
    return False


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


def to_same_rank(values: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Removes or adds a last axis of size one as Keras does before it weights losses."""
    if weights.shape.rank == values.shape.rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, [-1])
    return values, weights


def recurrent_arguments(
    layer: Any,
    sequences: Any,
    mask: Any = None,
    training: Any = None,
    initial_state: Any = None,
    constants: Any = None,
) -> tuple[tf.Tensor, Any, Any, Any] | None:
    """Returns a recurrent layer's inputs, first states, mask and flag, or None for another loop."""
    if not isinstance(sequences, tf.Tensor) or constants is not None or layer.time_major:
        return None
    return sequences, initial_state, mask, training


def initial_states(layer: Any, sequences: tf.Tensor, given: Any) -> list[tf.Tensor]:
    """Returns the first states of a recurrent layer with one cell, as its call computes them."""
    _, given, _ = layer._process_inputs(sequences, given, None)
    # For a stateful layer Keras passes the variables, which the last states will overwrite.
    return [tf.cast(tf.convert_to_tensor(s), layer.cell.compute_dtype) for s in given]


# Number of masks that Keras draws in a layer's call. The products need one of them.
_MASKS = {keras.layers.SimpleRNN: 1, keras.layers.GRU: 3, keras.layers.LSTM: 4}


def recurrent_dropout(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor]
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """Returns the dropout factors of a recurrent layer's inputs and states in one training call."""
    count = next(number for kind, number in _MASKS.items() if isinstance(layer, kind))

    def first(masks: Any) -> tf.Tensor | None:
        return masks[0] if isinstance(masks, (list, tuple)) else masks

    if getattr(layer, "_could_use_gpu_kernel", False):
        # The layer itself applies dropout to all time steps, with a separate mask for each.
        layer.reset_dropout_mask()
        return first(layer.get_dropout_mask_for_cell(sequences, True, count=count)), None
    cell = layer.cell
    layer._maybe_reset_cell_dropout_mask(cell)
    inputs = first(cell.get_dropout_mask_for_cell(sequences[:, 0, :], True, count=count))
    factor = first(cell.get_recurrent_dropout_mask_for_cell(states[0], True, count=count))
    return None if inputs is None else inputs[:, tf.newaxis], factor


def regularization(model: keras.Model) -> list[tf.Tensor | None]:
    """Returns the gradients of the regularizers of a model's trainable weights, in their order.

    Keras 2 stores them in a layer as functions without arguments. The list also has functions that
    a user passed to `add_loss`, which are the same for every example too.
    """
    sources = [tf_variable(variable) for variable in model.trainable_variables]
    functions = [function for layer in all_layers(model) for function in layer._callable_losses]
    if not functions:
        return [None] * len(sources)
    with tf.GradientTape() as tape:
        losses = [tf.reduce_sum(loss) for f in functions if (loss := f()) is not None]
    found = tape.gradient(losses, sources)
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]
