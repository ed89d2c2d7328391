"""Layers of many kinds in place: outputs, losses and gradients equal the plain model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import DENSE, DROPPED, IDS, S, X, added, assert_equals_plain, functional, made
from stack_marks import IS_KERAS_2, extended, quick_rows

import tfwd
from tfwd import layers
from tfwd import parametrizations as P


class Held(keras.Model):
    """A model that keeps its layers in lists and dicts, of which some are in others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"first": [DENSE(5), DENSE(4)], "second": {"last": DENSE(3)}}

    def call(self, x: Any, training: Any = None) -> Any:
        for part in self.parts["first"]:
            x = part(x)
        return self.parts["second"]["last"](x)


class Positional(keras.Model):
    """A model that passes the training flag as a positional argument, to layers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.untrained = Block(), NoFlag()

    def call(self, x: Any, training: Any = False) -> Any:
        # Keras 3 takes only tensors as positional arguments.
        hidden = self.inner(x, training) if IS_KERAS_2 else self.inner(x, training=training)
        return self.untrained(hidden)


class Block(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(4)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any, training: Any = False) -> Any:
        return self.dense(x) + (1.0 if training else 0.0)


class NoFlag(keras.layers.Layer):
    """A layer whose call has no training argument."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(4)

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale_kernel")
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x * tf.convert_to_tensor(self.scale))


class Losses(keras.layers.Layer):
    """A layer that adds a loss of its output and one of its weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.built = True

    def call(self, x: Any) -> Any:
        kernel = tf.convert_to_tensor(self.kernel)
        y = tf.matmul(x, kernel)
        self.add_loss(tf.reduce_mean(y**2))
        self.add_loss(tf.reduce_sum(tf.abs(kernel)))
        return y


class Cell(keras.layers.Layer):
    """A cell of a recurrent layer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_size = self.output_size = 3

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.again = self.add_weight(shape=(3, 3), name="again_kernel")
        self.built = True

    def call(self, x: Any, states: Any) -> Any:
        state = states[0] if isinstance(states, (list, tuple)) else states
        kernel, again = tf.convert_to_tensor(self.kernel), tf.convert_to_tensor(self.again)
        state = tf.tanh(tf.matmul(x, kernel) + tf.matmul(state, again))
        return state, [state]


class Reader(keras.layers.Layer):
    """A layer that reads a weight of another layer, which Keras does not know to be inside."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = lambda: other

    def call(self, x: Any) -> Any:
        return tf.matmul(x, tf.convert_to_tensor(self._other().kernel), transpose_b=True)


class Back(keras.Model):
    """A model with an inner layer that reads the weight of a sibling."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(4)
        self.reader = Reader(self.dense)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.reader(self.dense(x))


def doubled() -> Any:
    layer = DENSE(4)
    before = layer.call
    object.__setattr__(layer, "call", lambda *args, **kwargs: 2.0 * before(*args, **kwargs))
    return layer


def several() -> keras.Model:
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    shared = DENSE(4)
    hidden = keras.layers.concatenate([shared(a), shared(b)])
    return keras.Model({"a": a, "b": b}, {"y": DENSE(2)(hidden), "z": DENSE(1)(hidden)})


def in_sequences(layer: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: functional(lambda x: layer()(x), (3, 6))


def masked(x: Any) -> Any:
    hidden = keras.layers.Embedding(6, 4, mask_zero=True)(x)
    return keras.layers.LSTM(3)(keras.layers.LSTM(4, return_sequences=True)(hidden))


def shared_inside(x: Any) -> Any:
    inner = keras.Sequential([keras.Input((6,)), DENSE(6, activation="tanh"), DENSE(6)])
    outer = keras.Sequential([keras.Input((6,)), inner, DENSE(6)])
    return inner(outer(inner(x)))


MODELS: dict[str, tuple[Callable[[], Any], str, Any]] = {
    "several inputs and outputs": (several, ".*kernel", {"a": X, "b": X + 1}),
    "masks": (lambda: functional(masked, (3,), "int32"), "embeddings|.*kernel", IDS),
    "lists and dicts": (Held, ".*kernel", X),
    "positional flag": (Positional, ".*kernel", X),
    "no flag": (NoFlag, ".*kernel", X),
    "losses": (lambda: functional(lambda x: Losses()(x), (6,)), "kernel", X),
    "activity": (
        lambda: functional(lambda x: DENSE(4, activity_regularizer="l2")(x), (6,)),
        "kernel",
        X,
    ),
    "batch normalization": (
        lambda: functional(lambda x: keras.layers.BatchNormalization()(DENSE(4)(x)), (6,)),
        "kernel|gamma",
        X,
    ),
    "bidirectional": (
        in_sequences(lambda: keras.layers.Bidirectional(keras.layers.LSTM(3))),
        ".*kernel",
        S,
    ),
    "bidirectional sum of sequences": (
        in_sequences(
            lambda: keras.layers.Bidirectional(
                keras.layers.GRU(3, return_sequences=True), merge_mode="sum"
            )
        ),
        ".*recurrent_kernel",
        S,
    ),
    "in time": (in_sequences(lambda: keras.layers.TimeDistributed(DENSE(3))), ".*kernel", S),
    "recurrent dropout of 0": (
        in_sequences(lambda: keras.layers.LSTM(3, unroll=True)),
        ".*kernel",
        S,
    ),
    "custom cells": (
        in_sequences(lambda: keras.layers.RNN([Cell(), keras.layers.GRUCell(2)])),
        ".*kernel",
        S,
    ),
    "custom cell": (in_sequences(lambda: keras.layers.RNN(Cell())), ".*kernel", S),
    "nested, shared": (lambda: functional(shared_inside, (6,)), ".*kernel", X),
    "reads a sibling": (Back, ".*kernel", X),
    "call replaced": (lambda: functional(lambda x: DENSE(2)(doubled()(x)), (6,)), ".*kernel", X),
    "convolutions": (
        in_sequences(
            lambda: keras.Sequential(
                [
                    keras.layers.Conv1D(4, 2, padding="same"),
                    keras.layers.SeparableConv1D(3, 2, padding="same"),
                ]
            )
        ),
        ".*kernel",
        S,
    ),
    "layer normalization": (
        in_sequences(lambda: keras.layers.LayerNormalization()),
        "gamma",
        S,
    ),
}


@quick_rows(
    "masks",
    "custom cell",
    "nested, shared",
    "several inputs and outputs",
    "batch normalization",
    "positional flag",
    "no flag",
    "losses",
    "reads a sibling",
    "call replaced",
)
@pytest.mark.parametrize("kind", MODELS)
def test_training_calls_equal_the_plain_model(kind: str) -> None:
    make, pattern, x = MODELS[kind]
    assert_equals_plain(make, x, pattern, "graph")


@quick_rows("masks", "custom cells")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.usefixtures("all_large")
def test_large_weights_equal_the_plain_model(kind: str) -> None:
    make, pattern, x = MODELS[kind]
    assert_equals_plain(make, x, pattern, "eager")


@extended
def test_without_recomputation() -> None:
    make, pattern, x = MODELS["masks"]
    assert_equals_plain(make, x, pattern, "graph", recompute=False)


def test_layers_with_their_own_dropout() -> None:
    def make() -> Any:
        first = layers.DropoutEmbedding(6, 4, 0.0)
        second = layers.WeightDropLSTM(3, weight_dropout=0.5, seed=3)
        return functional(lambda x: second(first(x)), (3,), "int32")

    model = made(make, IDS)
    plain = made(
        lambda: functional(
            lambda x: keras.layers.LSTM(3)(keras.layers.Embedding(6, 4)(x)), (3,), "int32"
        ),
        IDS,
    )
    parts = {"embeddings": P.Dropout(0.5), ".*recurrent_kernel": P.Dropout(0.5)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    table, kernel = (np.asarray(v) for v in added(model).effective_weights(0).values())
    _, inputs, _, bias = model.get_weights()
    assert 0.6 < np.mean(kernel == 0) < 0.9
    plain.set_weights([table, inputs, kernel, bias])
    np.testing.assert_allclose(model(IDS, training=True), plain(IDS), rtol=1e-4, atol=1e-5)


def test_a_layer_that_is_built_in_its_first_call() -> None:
    class Lazy(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense = DENSE(4)

        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(6, 6), name="kernel")
            self.built = True

        def call(self, x: Any) -> Any:
            return self.dense(tf.matmul(x, tf.convert_to_tensor(self.kernel)))

    lazy = Lazy()
    lazy.build((None, 6))
    with pytest.raises(ValueError, match="has no weights yet, or not all of them"):
        tfwd.parametrize(lazy, DROPPED, in_place=True)
    assert_equals_plain(Lazy, X, ".*kernel", "eager")


def test_spectral_normalization() -> None:
    def make() -> Any:
        normal = keras.layers.SpectralNormalization(DENSE(4))
        return functional(lambda x: DENSE(2, name="last")(normal(x)), (6,))

    if not hasattr(keras.layers, "SpectralNormalization"):
        pytest.skip("this Keras has none")
    with pytest.raises(ValueError, match="SpectralNormalization assigns to it"):
        tfwd.parametrize(made(make, X), DROPPED, in_place=True)
    model = made(make, X)
    tfwd.parametrize(model, {"last/kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model(X, training=True)
    assert added(model).calls == 1
