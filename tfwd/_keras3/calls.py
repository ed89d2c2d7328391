"""Intercepts calls of layers and reads of variables, for `tfwd.gradients`.

Keras has no hooks. For the time of a pass the `call` of some classes is replaced by a function that
asks the present thread's handler, if there is one, and else goes on as before; so other threads see
nothing of it, and subclasses that call `super().call` and wrappers that call `layer.call` do.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper

from tfwd._keras3.substitution import Substitution
from tfwd._keras3.variables import value
from tfwd._keras_shared import interception, scopes
from tfwd._keras_shared.interception import Handler, calls_of, not_intercepted

__all__ = [
    "Captured",
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

_FUSED = ("_can_attempt_fused_lstm", "_can_attempt_fused_gru")


def intercepted(
    classes: Iterable[type], handler: Handler
) -> contextlib.AbstractContextManager[None]:
    """Within the body, on this thread, a `call` that one of the classes defines goes to `handler`.

    Args:
        classes: classes that define `call`; others are ignored.
        handler: called in place of `call`; it has the original to go on with.
    """
    # A fused pass through both directions of a Bidirectional would pass the two layers by.
    both: Any = keras.layers.Bidirectional
    fused = [(both, name, _refusing) for name in _FUSED if hasattr(both, name)]
    return interception.intercepted(classes, handler, _asking, fused)


def _asking(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        return interception.ask(cls, self, functools.partial(original, self), args, kwargs)

    return call


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attempt(self: keras.Layer, *args: Any, **kwargs: Any) -> bool:
        return interception.present_handler() is None and original(self, *args, **kwargs)

    return attempt


class Draws:
    """What layers draw past their variables in one pass, to be seen by another: on Keras 3 nothing.

    There the state of each generator is a variable, which a pass can set back.
    """

    inside = False

    def __bool__(self) -> bool:
        return False

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Keeps what is drawn in the body."""
        return contextlib.nullcontext()

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """What is drawn in the body is what was kept."""
        return contextlib.nullcontext()


class Observed(scopes.Observing, Substitution):
    """A substitution that tells of every read, update and loss."""


class Captured(scopes.Capturing, Substitution):
    """A substitution that keeps all updates, except in functions that are traced in its body."""


def users_code() -> contextlib.AbstractContextManager[None]:
    """Runs a model as Keras runs it in a function: without AutoGraph."""
    return contextlib.nullcontext()


def is_rematerialized(layer: keras.Layer) -> bool:
    """Whether `keras.remat` runs the layer a second time in backward."""
    return getattr(layer, "_remat_mode", None) is not None


def loss_object(loss: Any) -> keras.losses.Loss:
    """A Keras loss of a name, a function `(y_true, y_pred) -> values`, a config or a loss."""
    found = keras.losses.get(loss)
    if isinstance(found, type):
        found = found()
    return found if isinstance(found, keras.losses.Loss) else LossFunctionWrapper(found)


def loss_arguments(loss: keras.losses.Loss, y: Any, output: Any) -> tuple[Any, Any]:
    """Targets and outputs as Keras gives them to a loss: in its dtype."""
    return tuple(
        tf.nest.map_structure(lambda t: keras.ops.convert_to_tensor(t, loss.dtype), value)
        for value in (y, output)
    )


def to_same_rank(values: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What Keras does to a last axis of size one before it multiplies losses by their weights."""
    return squeeze_or_expand_to_same_rank(values, weights)


def recurrent_arguments(
    layer: Any,
    sequences: tf.Tensor,
    initial_state: Any = None,
    mask: Any = None,
    training: Any = False,
) -> tuple[tf.Tensor, Any, Any, Any] | None:
    """A recurrent layer's inputs, first states, mask and flag; None where the loop is another."""
    return sequences, initial_state, mask, training


def initial_states(layer: Any, sequences: tf.Tensor, given: Any) -> list[tf.Tensor]:
    """The states that a recurrent layer of one cell begins with, as its own call has them."""
    if given is None:
        batch = keras.ops.shape(sequences)[0]
        given = layer.states if layer.stateful else layer.get_initial_state(batch_size=batch)
    given = list(given) if isinstance(given, (list, tuple)) else [given]
    # Of a stateful layer Keras gives the variables, which will hold the last states instead.
    given = [tf.convert_to_tensor(s.value if isinstance(s, keras.Variable) else s) for s in given]
    return [keras.ops.convert_to_tensor(s, dtype=layer.cell.compute_dtype) for s in given]


def recurrent_dropout(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor]
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """What a recurrent layer multiplies its sequences and its states by in one training call."""
    cell = layer.cell
    layer._maybe_config_dropout_masks(cell, sequences[:, 0, :], states)
    inputs = cell.get_dropout_mask(sequences[:, 0, :])
    factor = cell.get_recurrent_dropout_mask(states[0])
    layer._maybe_reset_dropout_masks(cell)
    return None if inputs is None else inputs[:, tf.newaxis], factor


def regularization(model: keras.Model) -> list[tf.Tensor | None]:
    """The gradients of the regularizers of a model's weights, in the order of those it trains."""
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
