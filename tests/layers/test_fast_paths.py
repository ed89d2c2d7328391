"""The faster lookups and recurrent loops are not used for anything that a user overrides."""

import types
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, needs_keras3

from tfwd import layers
from tfwd._recurrent import gru, lstm
from tfwd.layers._substitution import embedding_lookup, recurrent_call

IDS = tf.constant([[1, 2, 0]])
X = tf.random.stateless_normal([2, 3, 4], [1, 2])


class OwnCall(keras.layers.Embedding):
    def __call__(self, inputs, **kwargs):
        return 3.0 * super().__call__(inputs, **kwargs)


class OwnMatrix(keras.layers.Embedding):
    def call(self, inputs):
        return 3.0 * super().call(inputs)


def with_a_method(make: Callable[[], Any], name: str, held: str = "") -> Callable[[], Any]:
    """Returns a layer with an instance method, on it or a part of it, that triples the result."""

    def made() -> Any:
        layer = make()
        owner = getattr(layer, held) if held else layer
        own = getattr(owner, name)

        def method(self, *args, **kwargs):
            return tf.nest.map_structure(lambda t: 3.0 * t, own(*args, **kwargs))

        setattr(owner, name, types.MethodType(method, owner))
        return layer

    return made


def embedding() -> Any:
    return keras.layers.Embedding(5, 4)


class OwnLstm(keras.layers.LSTM):
    def __call__(self, *args, **kwargs):
        return 3.0 * super().__call__(*args, **kwargs)


class OwnGru(keras.layers.GRU):
    def get_initial_state(self, *args, **kwargs):
        return tf.nest.map_structure(tf.ones_like, super().get_initial_state(*args, **kwargs))


class OwnCell(keras.layers.LSTMCell):
    def call(self, inputs, states, training=None):
        output, states = super().call(inputs, states, training=training)
        return 3.0 * output, states


def own_cell() -> Any:
    layer = keras.layers.LSTM(4)
    layer.cell = OwnCell(4)
    return layer


def regularized_cell() -> Any:
    layer = keras.layers.LSTM(4)
    layer.cell.activity_regularizer = keras.regularizers.L2(1.0)
    return layer


class Renamed(keras.layers.LSTM):
    """A subclass that overrides nothing that is computed."""

    def __init__(self, units: int = 4, note: str = "") -> None:
        super().__init__(units)
        self.note = note

    def get_config(self):
        return {"units": self.units, "note": self.note}


OVERRIDDEN = {
    "embedding, __call__": (lambda: OwnCall(5, 4), IDS),
    "embedding, call": (lambda: OwnMatrix(5, 4), IDS),
    "embedding, call of the instance": (with_a_method(embedding, "call"), IDS),
    "lstm, __call__": (lambda: OwnLstm(4), X),
    "lstm, call of the instance": (with_a_method(lambda: keras.layers.LSTM(4), "call"), X),
    "lstm, call of the cell": (with_a_method(lambda: keras.layers.LSTM(4), "call", "cell"), X),
    "lstm, own cell": (own_cell, X),
    "lstm, losses of the cell": (regularized_cell, X),
    "gru, call of the cell": (with_a_method(lambda: keras.layers.GRU(4), "call", "cell"), X),
    "gru, first state": (lambda: OwnGru(4), X),
}
if not IS_KERAS_2:
    loop = with_a_method(lambda: keras.layers.LSTM(4), "inner_loop")
    OVERRIDDEN["lstm, loop of the instance"] = (loop, X)


@pytest.mark.parametrize("case", OVERRIDDEN)
def test_overridden_methods_are_computed(case: str) -> None:
    make, inputs = OVERRIDDEN[case]
    plain, inner = make(), make()
    plain(inputs), inner(inputs)
    draws = np.random.default_rng(1)
    plain.set_weights([draws.normal(size=w.shape) for w in plain.get_weights()])
    inner.set_weights(plain.get_weights())
    wrapped = layers.VariationalNoise(inner, 0.5, weights=".*", seed=1)
    np.testing.assert_array_equal(wrapped(inputs), plain(inputs))
    effective = [value.numpy() for value in wrapped.effective_weights(0).values()]
    found, losses = wrapped(inputs, training=True), wrapped.losses
    plain.set_weights(effective)
    np.testing.assert_allclose(found, plain(inputs, training=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        [float(x) for x in losses], [float(x) for x in plain.losses], rtol=1e-5
    )


@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU, Renamed])
def test_subclasses_that_only_add_are_still_fast(kind: Any, monkeypatch) -> None:
    taken = []
    for module, name in ((lstm, "lstm"), (gru, "gru")):
        own = getattr(module, name)
        noting = lambda *a, own=own, **k: (taken.append(1), own(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(module, name, noting)
    layers.WeightDropout(kind(4), 0.5, seed=1)(X, training=True)
    assert taken


@pytest.mark.parametrize("make", [embedding, lambda: layers.DropoutEmbedding(5, 4, 0.5)])
def test_plain_embeddings_are_looked_up(make: Any, monkeypatch) -> None:
    taken, own = [], embedding_lookup.looked_up_rows
    monkeypatch.setattr(
        embedding_lookup, "looked_up_rows", lambda *a: (taken.append(1), own(*a))[1]
    )
    layer = make()
    if not hasattr(layer, "draws"):
        layer = layers.WeightDropout(layer, 0.5, seed=1)
    layer(IDS, training=True)
    assert taken


def test_a_replacement_in_the_class_of_keras_is_seen(monkeypatch) -> None:
    """Checks a replacement in Keras's class, as libraries that patch Keras make it."""
    own = keras.layers.LSTMCell.call

    def call(self, inputs, states, training=None):
        output, states = own(self, inputs, states, training=training)
        return 3.0 * output, states

    monkeypatch.setattr(keras.layers.LSTMCell, "call", call)
    layer = keras.layers.LSTM(4)
    layer.build((2, 3, 4))
    assert not recurrent_call._applies(layer, X)


@needs_keras3("LoRA")
def test_lora_is_computed() -> None:
    plain = embedding()
    plain.build((1, 3))
    plain.enable_lora(2)
    plain.set_weights([np.random.default_rng(1).normal(size=w.shape) for w in plain.weights])
    wrapped = layers.VariationalNoise(plain, 0.5, weights="embeddings", seed=1)
    found, noise = wrapped(IDS, training=True), wrapped.effective_weights(0)["embeddings"]
    whole = noise + plain.lora_embeddings_a.value @ plain.lora_embeddings_b.value
    np.testing.assert_allclose(found, tf.gather(whole, IDS), rtol=1e-5)
