"""Calls of layers and reads of variables, as they are made: what `tfwd.gradients` sees of a model.

Keras has no hooks. For the time of a pass the `call` of some classes is replaced by a function that
asks the present thread's handler, if there is one, and else goes on as before; so other threads see
nothing of it, and subclasses that call `super().call` and wrappers that call `layer.call` do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.losses.losses import LossFunctionWrapper
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import record

from tfwd._keras3.substitution import Substitution, present_graph
from tfwd._keras3.variables import tf_variables, value

# handler(owner class, layer, its own call, args, kwargs)
Handler = Callable[[type, keras.Layer, Callable[..., Any], tuple, dict[str, Any]], Any]

_here = threading.local()
_lock = threading.Lock()
_patched: dict[tuple[type, str], tuple[int, Any]] = {}  # how often, and what stood there
_FUSED = ("_can_attempt_fused_lstm", "_can_attempt_fused_gru")


def calls_of(cls: type) -> type:
    """The class in which the `call` of a class is defined."""
    return next(c for c in cls.__mro__ if "call" in vars(c))


@contextlib.contextmanager
def intercepted(classes: Iterable[type], handler: Handler) -> Iterator[None]:
    """Within the body, on this thread, a `call` that one of the classes defines goes to `handler`.

    Args:
        classes: classes that define `call`; others are ignored.
        handler: called in place of `call`; it has the original to go on with.
    """
    wanted = [(cls, "call") for cls in dict.fromkeys(classes) if "call" in vars(cls)]
    # A fused pass through both directions of a Bidirectional would pass the two layers by.
    wanted += [
        (keras.layers.Bidirectional, n) for n in _FUSED if hasattr(keras.layers.Bidirectional, n)
    ]
    with _lock:
        for cls, name in wanted:
            count, original = _patched.get((cls, name), (0, vars(cls)[name]))
            if not count:
                setattr(
                    cls, name, _asking(cls, original) if name == "call" else _refusing(original)
                )
            _patched[cls, name] = count + 1, original
    before = getattr(_here, "handler", None)
    _here.handler = handler
    try:
        yield
    finally:
        _here.handler = before
        with _lock:
            for cls, name in wanted:
                count, original = _patched[cls, name]
                _patched[cls, name] = count - 1, original
                if count == 1:
                    del _patched[cls, name]
                    setattr(cls, name, original)


@contextlib.contextmanager
def not_intercepted() -> Iterator[None]:
    """Within the body, on this thread, nothing is intercepted."""
    before = getattr(_here, "handler", None)
    _here.handler = None
    try:
        yield
    finally:
        _here.handler = before


def _asking(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        handler = getattr(_here, "handler", None)
        if handler is None:
            return original(self, *args, **kwargs)
        return handler(cls, self, functools.partial(original, self), args, kwargs)

    return call


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attempt(self: keras.Layer, *args: Any, **kwargs: Any) -> bool:
        return getattr(_here, "handler", None) is None and original(self, *args, **kwargs)

    return attempt


class Observed(Substitution):
    """A substitution that tells of every read and update.

    Args:
        values: pairs of a variable and the tensor to be read in its place.
        on_read: called with each variable that is read; a tensor that it returns is read in place
            of the variable, unless `values` has it.
        on_update: called with each variable that is updated.
        on_loss: called with each loss that a layer adds.
    """

    def __init__(
        self,
        values: list[tuple[keras.Variable, tf.Tensor]],
        on_read: Callable[[keras.Variable], tf.Tensor | None],
        on_update: Callable[[keras.Variable], None],
        on_loss: Callable[[tf.Tensor], None],
    ) -> None:
        super().__init__(values, capture=False)
        self._on_read, self._on_update, self._on_loss = on_read, on_update, on_loss

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        fallback = self._on_read(variable)
        value = super().get_current_value(variable)
        return fallback if value is None else value

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        self._on_update(update[0])
        super().add_update(update)

    def add_loss(self, loss: tf.Tensor) -> None:
        self._on_loss(loss)


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


class Captured(Substitution):
    """Keeps all updates, except in functions that are traced in its body.

    These outlive it: they read and update the variables themselves, as without it.
    """

    def __init__(self) -> None:
        super().__init__([], capture=True)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        return super().get_current_value(variable) if self._is_here() else None

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        if self._is_here():
            super().add_update(update)
        else:
            update[0]._direct_assign(update[1])

    def _is_here(self) -> bool:
        return present_graph() is self._graph


class Accesses(record.VariableWatcher):
    """Notes the `tf.Variable`s that are read in its body, directly or by a traced function."""

    def has(self, variable: keras.Variable) -> bool:
        """Whether the `tf.Variable` behind a Keras variable was among them."""
        parts = tf_variables(variable)
        return any(part is other for other in self.watched_variables() for part in parts)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Runs the body as it runs outside of functions, tapes included, whatever is being traced."""
    if tf.executing_eagerly():
        yield
        return
    with tf.init_scope():
        # This scope stops all tapes of the thread, its own too.
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


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
