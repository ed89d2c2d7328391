"""Records what Keras 2's own layers draw in one pass, and replays it in another.

Keras 2 draws with operations whose state is not in a variable, so it cannot be restored. But all
its layers draw through one class. During a pass its methods are replaced, as in `calls`, by
functions that use the present thread's draws.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src.backend import RandomGenerator

from tfwd._keras2.substitution import present_scope
from tfwd._keras_shared.patching import patched
from tfwd._keras_shared.scopes import present_graph

_METHODS = ("random_normal", "random_uniform", "truncated_normal", "dropout")

_here = threading.local()
_numbers = itertools.count(1)


class Draws:
    """The draws of one pass, in their order. It is true if there are any.

    Attributes:
        inside: bool. Something was drawn in an inner graph, of a loop or a branch. No other pass
            can see such a draw.
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
        _here.draws, self._next, self._graph = self, first, present_graph()
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
        if present_graph() is not self._graph:
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
    """Returns True if the present call must have no side effects."""
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
    if not tf.executing_eagerly():  # otherwise a function would draw the same in each call
        seed = tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32, seed=number)
    return RandomGenerator(seed, rng_type=RandomGenerator.RNG_STATELESS)


def _asking(name: str, own: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(own)
    def method(self: RandomGenerator, *args: Any, **kwargs: Any) -> tf.Tensor:
        draws = getattr(_here, "draws", None)
        if draws is None:
            return own(self, *args, **kwargs)
        return draws.draw(name, self, args, kwargs)

    return method


_OWN = {name: getattr(RandomGenerator, name) for name in _METHODS}
_PATCHES = [(RandomGenerator, name, functools.partial(_asking, name)) for name in _METHODS]
