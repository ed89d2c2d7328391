"""Intercepts calls of layers and reads of variables, for `tfwd.gradients`.

Keras has no hooks. During a pass, a function replaces the `call` of some classes. The function uses
the current thread's handler, or the original call if there is no handler. Other threads are not
affected. Subclasses that call `super().call`, and wrappers that call `layer.call`, are intercepted
too.

Keras 2 draws with operations whose state is not in a variable. So the state cannot be restored. But
all layers of Keras draw through one class. The methods of this class are replaced too. They record
the draws of one pass, and replay them in another pass.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import RandomGenerator
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from tfwd._keras2.layer_wrappers import NoAutographLayer
from tfwd._keras2.substitution import Substitution, present_scope
from tfwd._keras_shared import method_replacement, substitution_scopes
from tfwd._keras_shared.method_replacement import Handler, patched

_METHODS = ("random_normal", "random_uniform", "truncated_normal", "dropout")

_here = threading.local()
_numbers = itertools.count(1)


class DrawRecording:
    """The draws of one pass, in their order. The object is true if there are draws.

    Attributes:
        inside: bool. True if the inner graph of a loop or a branch has drawn. No other pass can
            use such a draw.
    """

    def __init__(self) -> None:
        self.inside = False
        self._drawn: list[tuple[str, tf.Tensor]] = []
        self._next: int | None = None  # number of the next draw to replay
        self._graph: tf.Graph | None = None

    def __bool__(self) -> bool:
        return self.inside or bool(self._drawn)

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Records the draws in the body."""
        return self._installed(None)

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """Repeats the recorded draws in the body, if they have the same shapes."""
        return self._installed(0)

    @contextlib.contextmanager
    def _installed(self, first: int | None) -> Iterator[None]:
        before = getattr(_here, "draws", None)
        _here.draws, self._next, self._graph = self, first, substitution_scopes.present_graph()
        try:
            with patched(_PATCHES):
                yield
        finally:
            _here.draws = before

    def draw(self, name: str, generator: RandomGenerator, args: tuple, kwargs: dict) -> tf.Tensor:
        """Replaces a method of Keras's generator."""
        if name == "dropout":
            inputs, *rest = args
            mask = self._value(name, generator, (tf.ones_like(inputs), *rest), kwargs)
            return tf.where(mask > 0, inputs * mask, tf.zeros_like(inputs))
        return self._value(name, generator, args, kwargs)

    def _value(self, name: str, generator: RandomGenerator, args: tuple, kwargs: dict) -> tf.Tensor:
        if _is_captured():
            generator = _without_side_effects()
        if substitution_scopes.present_graph() is not self._graph:
            self.inside = True
            return _OWN[name](generator, *args, **kwargs)
        if self._next is None:
            value = _OWN[name](generator, *args, **kwargs)
            self._drawn.append((name, value))
            return value
        number, self._next = self._next, self._next + 1
        fresh = functools.partial(_OWN[name], generator, *args, **kwargs)
        if number >= len(self._drawn) or self._drawn[number][0] != name:
            return fresh()
        kept = self._drawn[number][1]
        shape = tf.TensorShape(args[0].shape if name == "dropout" else _shape(args, kwargs))
        return kept if shape.is_compatible_with(kept.shape) else fresh()


def _shape(args: tuple, kwargs: dict) -> Any:
    shape = args[0] if args else kwargs["shape"]
    return tf.get_static_value(shape) if tf.is_tensor(shape) else shape


def _is_captured() -> bool:
    """Returns True if the current call must have no side effects."""
    scope = present_scope()
    while scope is not None:
        if scope.capture:
            return True
        scope = scope.original_scope
    return False


def _without_side_effects() -> RandomGenerator:
    """Returns a generator whose draws change neither the layer's state nor TensorFlow's."""
    number = next(_numbers)
    seed: Any = number
    if not tf.executing_eagerly():  # otherwise a tf.function would draw the same in each call
        seed = tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32, seed=number)
    return RandomGenerator(seed, rng_type=RandomGenerator.RNG_STATELESS)


def _drawing(name: str, own: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(own)
    def method(self: RandomGenerator, *args: Any, **kwargs: Any) -> tf.Tensor:
        draws = getattr(_here, "draws", None)
        if draws is None:
            return own(self, *args, **kwargs)
        return draws.draw(name, self, args, kwargs)

    return method


_OWN = {name: getattr(RandomGenerator, name) for name in _METHODS}
_PATCHES = [(RandomGenerator, name, functools.partial(_drawing, name)) for name in _METHODS]


def intercepted(
    classes: Iterable[type], handler: Handler
) -> contextlib.AbstractContextManager[None]:
    """Sends each `call` that one of the classes defines to `handler`, in the body, on this thread.

    Args:
        classes: Classes. A class that does not define `call` is ignored.
        handler: Function that is called in place of `call`. It gets the original `call`.
    """
    return method_replacement.intercepted(classes, handler, _with_handler)


def _with_handler(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @autograph.autograph_artifact  # AutoGraph converts the original call, but not this function
    @functools.wraps(original)
    def call(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        own = method_replacement.bound(original, self)
        if not tf.executing_eagerly() and not isinstance(self, NoAutographLayer):
            own = autograph.tf_convert(own, ag_ctx.control_status_ctx())
        return method_replacement.ask(cls, self, own, args, kwargs)

    return call


class Observed(substitution_scopes.Observing, Substitution):
    """A substitution that reports every read, update and loss."""


class Captured(substitution_scopes.Capturing, Substitution):
    """A substitution that stores all updates, except in functions that are traced in its body."""


class Discarded(substitution_scopes.Discarding, Substitution):
    """A substitution that discards all updates, except of chosen variables."""


def users_code() -> contextlib.AbstractContextManager[Any]:
    """Runs a model as Keras 2 runs it in a `tf.function`: with AutoGraph, unlike tfwd's code."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    return ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)


def is_rematerialized(layer: keras.layers.Layer) -> bool:
    """Returns True if Keras runs the layer a second time in backward. Keras 2 never does."""
    return False
