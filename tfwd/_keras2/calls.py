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
from keras.src.engine.compile_utils import match_dtype_and_rank
from keras.src.losses import LossFunctionWrapper
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import record

from tfwd._keras2.draws import Draws  # noqa: F401
from tfwd._keras2.layers import Perturbs, all_layers
from tfwd._keras2.substitution import Substitution, original, present_graph
from tfwd._keras2.variables import tf_variable, tf_variables

# handler(owner class, layer, its own call, args, kwargs)
Handler = Callable[[type, keras.layers.Layer, Callable[..., Any], tuple, dict[str, Any]], Any]

_here = threading.local()
_lock = threading.Lock()
_patched: dict[tuple[type, str], tuple[int, Any]] = {}  # how often, and what stood there


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
    with _lock:
        for cls, name in wanted:
            count, original = _patched.get((cls, name), (0, vars(cls)[name]))
            if not count:
                setattr(cls, name, _asking(cls, original))
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
    @autograph.autograph_artifact  # so that AutoGraph rewrites what is in it and not itself
    @functools.wraps(original)
    def call(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(original, self)
        if not tf.executing_eagerly() and not isinstance(self, Perturbs):
            own = autograph.tf_convert(own, ag_ctx.control_status_ctx())
        handler = getattr(_here, "handler", None)
        if handler is None:
            return own(*args, **kwargs)
        return handler(cls, self, own, args, kwargs)

    return call


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
        values: list[tuple[tf.Variable, tf.Tensor]],
        on_read: Callable[[tf.Variable], tf.Tensor | None],
        on_update: Callable[[tf.Variable], None],
        on_loss: Callable[[tf.Tensor], None],
    ) -> None:
        super().__init__(values, capture=False)
        self._on_read, self._on_update, self._on_loss = on_read, on_update, on_loss

    def get_current_value(self, variable: tf.Variable) -> tf.Tensor | None:
        fallback = self._on_read(variable)
        value = super().get_current_value(variable)
        return fallback if value is None else value

    def add_update(self, update: tuple[tf.Variable, tf.Tensor]) -> None:
        self._on_update(update[0])
        super().add_update(update)

    def add_loss(self, loss: tf.Tensor) -> None:
        self._on_loss(loss)


class Captured(Substitution):
    """Keeps all updates, except in functions that are traced in its body.

    These outlive it: they read and update the variables themselves, as without it.
    """

    def __init__(self) -> None:
        super().__init__([], capture=True)

    def get_current_value(self, variable: tf.Variable) -> tf.Tensor | None:
        return super().get_current_value(variable) if self._is_here() else None

    def add_update(self, update: tuple[tf.Variable, tf.Tensor]) -> None:
        if self._is_here():
            super().add_update(update)
        else:
            original(update[0]).assign(update[1])

    def _is_here(self) -> bool:
        return present_graph() is self._graph


class Accesses(record.VariableWatcher):
    """Notes the `tf.Variable`s that are read in its body, directly or by a traced function."""

    def has(self, variable: tf.Variable) -> bool:
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


def users_code() -> contextlib.AbstractContextManager[Any]:
    """Runs a model as Keras runs it in a function: with AutoGraph, which tfwd does without."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Whether Keras runs the layer a second time in backward, which Keras 2 never does."""
    return False


def loss_object(loss: Any) -> keras.losses.Loss:
    """A Keras loss of a name, a function `(y_true, y_pred) -> values`, a config or a loss."""
    found = keras.losses.get(loss)
    if isinstance(found, type):
        found = found()
    return found if isinstance(found, keras.losses.Loss) else LossFunctionWrapper(found)


def loss_arguments(loss: keras.losses.Loss, y: Any, output: Any) -> tuple[Any, Any]:
    """Targets and outputs as Keras gives them to a loss: in the outputs' dtype and rank."""
    if not tf.is_tensor(y) or not tf.is_tensor(output):
        return y, output
    y, output, _ = match_dtype_and_rank(y, output, None)
    return y, output


def to_same_rank(values: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """What Keras does to a last axis of size one before it multiplies losses by their weights."""
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
    """A recurrent layer's inputs, first states, mask and flag; None where the loop is another."""
    if not isinstance(sequences, tf.Tensor) or constants is not None or layer.time_major:
        return None
    return sequences, initial_state, mask, training


def initial_states(layer: Any, sequences: tf.Tensor, given: Any) -> list[tf.Tensor]:
    """The states that a recurrent layer of one cell begins with, as its own call has them."""
    _, given, _ = layer._process_inputs(sequences, given, None)
    # Of a stateful layer Keras gives the variables, which will hold the last states instead.
    return [tf.cast(tf.convert_to_tensor(s), layer.cell.compute_dtype) for s in given]


# How many masks Keras draws in a layer's call, of which its products need one.
_MASKS = {keras.layers.SimpleRNN: 1, keras.layers.GRU: 3, keras.layers.LSTM: 4}


def recurrent_dropout(
    layer: Any, sequences: tf.Tensor, states: list[tf.Tensor]
) -> tuple[tf.Tensor | None, tf.Tensor | None]:
    """What a recurrent layer multiplies its sequences and its states by in one training call."""
    count = next(number for kind, number in _MASKS.items() if isinstance(layer, kind))

    def first(masks: Any) -> tf.Tensor | None:
        return masks[0] if isinstance(masks, (list, tuple)) else masks

    if getattr(layer, "_could_use_gpu_kernel", False):
        # The layer drops all time steps itself, each with a mask of its own.
        layer.reset_dropout_mask()
        return first(layer.get_dropout_mask_for_cell(sequences, True, count=count)), None
    cell = layer.cell
    layer._maybe_reset_cell_dropout_mask(cell)
    inputs = first(cell.get_dropout_mask_for_cell(sequences[:, 0, :], True, count=count))
    factor = first(cell.get_recurrent_dropout_mask_for_cell(states[0], True, count=count))
    return None if inputs is None else inputs[:, tf.newaxis], factor


def regularization(model: keras.Model) -> list[tf.Tensor | None]:
    """The gradients of the regularizers of a model's weights, in the order of those it trains.

    Keras 2 has them as functions of no arguments that a layer keeps, with others that a user gave
    to `add_loss`, which are the same for every example too.
    """
    sources = [tf_variable(variable) for variable in model.trainable_variables]
    functions = [function for layer in all_layers(model) for function in layer._callable_losses]
    if not functions:
        return [None] * len(sources)
    with tf.GradientTape() as tape:
        losses = [tf.reduce_sum(loss) for f in functions if (loss := f()) is not None]
    found = tape.gradient(losses, sources)
    return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]
