"""Layers whose call takes tensors with masks, and the ways in which each can be called."""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from stack_marks import IS_KERAS_2

L = keras.layers
SIZE = [2, 3, 4]
UNITS = 4


class Kernel(L.Layer):
    """A product with a kernel; subclasses say what else they do with their inputs."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, *shapes: Any, **named: Any) -> None:
        self.kernel = self.add_weight(shape=(UNITS, UNITS), name="kernel", initializer="normal")
        self.built = True

    def times(self, x: tf.Tensor) -> tf.Tensor:
        return tf.matmul(x, self.kernel)


def mask_as_numbers(mask: Any, like: tf.Tensor) -> tf.Tensor:
    """Returns a mask as numbers that an output shows; -1 for no mask."""
    if mask is None:
        return -tf.ones_like(like)
    return tf.cast(mask, like.dtype)[..., None] * tf.ones_like(like)


def mask_of(x: Any) -> Any:
    return getattr(x, "_keras_mask", None)


class Two(Kernel):
    def call(self, a, b):
        return (
            self.times(a)
            + b
            + 3.0 * mask_as_numbers(mask_of(a), a)
            + 7.0 * mask_as_numbers(mask_of(b), b)
        )


class TwoAndMask(Kernel):
    def call(self, a, b, mask=None):
        return self.times(a) + b + 3.0 * mask_as_numbers(mask, a)


class OneOrTwo(Kernel):
    def call(self, a, b=None, mask=None, a_mask=None):
        return self.times(a) + 3.0 * mask_as_numbers(mask, a) + 7.0 * mask_as_numbers(a_mask, a)


class TwoMasks(Kernel):
    def call(self, a, b, a_mask=None, b_mask=None):
        return (
            self.times(a) + b + 3.0 * mask_as_numbers(a_mask, a) + 7.0 * mask_as_numbers(b_mask, b)
        )


class Nest(Kernel):
    def build(self, shapes: Any) -> None:
        super().build()

    def call(self, inputs, mask=None):
        masks = [None, None] if mask is None else tf.nest.flatten(mask)
        a, b = tf.nest.flatten(inputs)
        return {
            "x": self.times(a) + 3.0 * mask_as_numbers(masks[0], a),
            "y": (b + mask_as_numbers(masks[1], b),),
        }

    def compute_mask(self, inputs, mask=None):
        return None


class RemovesMask(Kernel):
    """A layer that removes the mask of its input."""

    def call(self, a, b=None):
        a._keras_mask = None
        return self.times(a)


class SetsMask(Kernel):
    """A layer that sets another mask on its input."""

    def call(self, a, b=None):
        a._keras_mask = tf.reduce_all(tf.cast(a, tf.bool), -1)
        return self.times(a)


class ComparesInputs(Kernel):
    """A layer that checks whether it gets the same tensor twice."""

    def call(self, a, b):
        return self.times(a) * (2.0 if a is b else 1.0)


class Unmasking(Kernel):
    """A layer whose `__call__` returns outputs without masks, whatever `compute_mask` says."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tf.identity(super().__call__(*args, **kwargs))

    def call(self, a):
        return self.times(a)


def merged() -> keras.Model:
    """Returns a model that joins its two inputs, with a mask made in it and a given one."""
    one, two = L.Input(SIZE[1:]), L.Input(SIZE[1:])
    joined = L.Concatenate()([L.Masking(1.0)(one), L.Dense(UNITS)(two)])
    return keras.Model([one, two], L.LSTM(UNITS, return_sequences=True)(joined))


def recurrent(kind: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: kind(UNITS, return_sequences=True, **kwargs)


def _recurrent() -> Iterator[tuple[str, Callable, Callable]]:
    lstm = recurrent(L.LSTM, return_state=True)
    yield "lstm", lstm, lambda f, x, y, m, **k: f(x, **k)
    yield "lstm mask=None", lstm, lambda f, x, y, m, **k: f(x, mask=None, **k)
    yield "lstm mask", lstm, lambda f, x, y, m, **k: f(x, mask=m, **k)
    state = tf.ones([2, UNITS])
    states = [state, 2 * state]
    yield "lstm states", lstm, lambda f, x, y, m, **k: f(x, initial_state=states, **k)
    yield "lstm states ahead", lstm, lambda f, x, y, m, **k: f(x, states, **k)
    yield "lstm both", lstm, lambda f, x, y, m, **k: f(x, initial_state=states, mask=m, **k)
    yield "gru", recurrent(L.GRU), lambda f, x, y, m, **k: f(x, **k)
    yield "gru state", recurrent(L.GRU), lambda f, x, y, m, **k: f(x, initial_state=state, **k)
    simple = recurrent(L.SimpleRNN)
    yield "simple", simple, lambda f, x, y, m, **k: f(x, initial_state=[state], **k)
    stacked = lambda: L.RNN([L.LSTMCell(UNITS), L.GRUCell(UNITS)], return_sequences=True)  # noqa: E731
    yield "stacked", stacked, lambda f, x, y, m, **k: f(x, **k)
    both = lambda: L.Bidirectional(recurrent(L.LSTM)())  # noqa: E731
    yield "bidirectional", both, lambda f, x, y, m, **k: f(x, **k)
    four = [state, state, state, state]
    yield "bidirectional states", both, lambda f, x, y, m, **k: f(x, initial_state=four, **k)
    each = lambda: L.TimeDistributed(L.Dense(UNITS))  # noqa: E731
    yield "each step", each, lambda f, x, y, m, **k: f(x, **k)
    if not IS_KERAS_2:
        yield "lstm by name", lstm, lambda f, x, y, m, **k: f(sequences=x, mask=m, **k)


def _attention() -> Iterator[tuple[str, Callable, Callable]]:
    heads = lambda: L.MultiHeadAttention(2, 3)  # noqa: E731
    yield "heads", heads, lambda f, x, y, m, **k: f(x, x, **k)
    yield "heads of two", heads, lambda f, x, y, m, **k: f(y, x, **k)
    yield "heads of three", heads, lambda f, x, y, m, **k: f(x, y, key=x, **k)
    yield "heads by name", heads, lambda f, x, y, m, **k: f(query=x, value=y, **k)
    scores = {"use_causal_mask": True, "return_attention_scores": True}
    yield "heads causal", heads, lambda f, x, y, m, **k: f(x, y, **scores, **k)
    square = tf.constant([[[True, False, False], [True, True, False], [True, True, True]]] * 2)
    yield "heads mask", heads, lambda f, x, y, m, **k: f(x, y, attention_mask=square, **k)
    additive = lambda: L.AdditiveAttention()  # noqa: E731
    yield "additive", additive, lambda f, x, y, m, **k: f([x, y], **k)
    yield "additive same", additive, lambda f, x, y, m, **k: f([x, x], **k)
    yield "additive mask", additive, lambda f, x, y, m, **k: f([x, y], mask=[m, None], **k)
    if not IS_KERAS_2:
        given = lambda f, x, y, m, **k: f(x, y, query_mask=m, value_mask=m, key_mask=m, **k)  # noqa: E731
        yield "heads masks", heads, given
        grouped = lambda: L.GroupQueryAttention(3, 2, 1)  # noqa: E731
        yield "grouped", grouped, lambda f, x, y, m, **k: f(x, y, **k)
        yield "grouped mask", grouped, lambda f, x, y, m, **k: f(x, x, value_mask=m, **k)


def _own() -> Iterator[tuple[str, Callable, Callable]]:
    yield "two", Two, lambda f, x, y, m, **k: f(x, y, **k)
    yield "two the other way", Two, lambda f, x, y, m, **k: f(y, b=x, **k)
    yield "two and mask", TwoAndMask, lambda f, x, y, m, **k: f(x, y, **k)
    yield "two and a mask", TwoAndMask, lambda f, x, y, m, **k: f(x, y, mask=m, **k)
    yield "one or two", OneOrTwo, lambda f, x, y, m, **k: f(x, **k)
    yield "one or two given", OneOrTwo, lambda f, x, y, m, **k: f(x, y, a_mask=m, **k)
    yield "two masks", TwoMasks, lambda f, x, y, m, **k: f(x, b=y, **k)
    yield "two masks, one", TwoMasks, lambda f, x, y, m, **k: f(x, y, b_mask=m, **k)
    yield "list", Nest, lambda f, x, y, m, **k: f([x, y], **k)
    yield "tuple", Nest, lambda f, x, y, m, **k: f((y, x), **k)
    yield "dict", Nest, lambda f, x, y, m, **k: f({"u": x, "v": y}, **k)
    yield "list mask", Nest, lambda f, x, y, m, **k: f([y, y], mask=[m, m], **k)
    yield "takes", RemovesMask, lambda f, x, y, m, **k: f(x, **k)
    yield "puts", SetsMask, lambda f, x, y, m, **k: f(y, x, **k)
    yield "same", ComparesInputs, lambda f, x, y, m, **k: f(x, x, **k)
    yield "not the same", ComparesInputs, lambda f, x, y, m, **k: f(x, y, **k)
    yield "unmasking", Unmasking, lambda f, x, y, m, **k: f(x, **k)
    yield "merging", merged, lambda f, x, y, m, **k: f([x, y], **k)


CASES = {name: (make, call) for name, make, call in (*_recurrent(), *_attention(), *_own())}
