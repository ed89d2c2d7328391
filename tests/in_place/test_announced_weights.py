"""Models of their own classes compute with the weights that are announced for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import (
    DENSE,
    EXAMPLES,
    LABELS,
    Adversarial,
    Autoencoder,
    added,
    made,
    variables,
)
from stack_marks import quick_rows

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P


def own_names(model: Any) -> list[set[str]]:
    """Returns the attributes of each layer that this feature could leave behind."""
    layers = _keras.layers.all_layers(model)
    return [{n for n in vars(layer) if n == "call" or "tfwd" in n} for layer in layers]


CALLS = {
    "eager": lambda model, x: model(x, training=True),
    "graph": lambda model, x: tf.function(lambda: model(x, training=True))(),
    "compiled": lambda model, x: tf.function(
        lambda: model(x, training=True), jit_compile=True, autograph=False
    )(),
}


class Tied(keras.Model):
    """A language model whose logits read the table of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(10, 6)
        self.lstm = keras.layers.LSTM(6, return_sequences=True)

    def call(self, ids: Any, training: Any = False) -> Any:
        hidden = self.lstm(self.words(ids), training=training)
        return tf.matmul(hidden, tf.convert_to_tensor(self.words.embeddings), transpose_b=True)


class Loop(keras.Model):
    """A custom loop over time around a bare cell and a layer that is called at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = keras.layers.GRUCell(3)
        self.out = DENSE(2)

    def call(self, x: Any, training: Any = False) -> Any:
        state, outputs = tf.zeros([tf.shape(x)[0], 3]), []
        for step in range(4):
            _, state = self.cell(x[:, 2 * step : 2 * step + 2], [state], training=training)
            state = state[0] if isinstance(state, (list, tuple)) else state
            outputs.append(self.out(state))
        return tf.stack(outputs, 1)


def nested() -> keras.Model:
    inner = keras.Sequential([keras.Input((8,)), DENSE(8, activation="tanh"), DENSE(8)])
    x = keras.Input((8,))
    return keras.Model(x, DENSE(1)(inner(inner(x)) + DENSE(8)(x)))


def attention() -> keras.Model:
    x = keras.Input((8,))
    parts = keras.layers.Reshape((4, 2))(x)
    mixed = keras.layers.MultiHeadAttention(2, 3)(parts, parts)
    return keras.Model(x, DENSE(1)(keras.layers.Flatten()(mixed)))


KINDS = {
    "autoencoder": (Autoencoder, ".*kernel", EXAMPLES),
    "adversarial": (Adversarial, ".*kernel", EXAMPLES[:, :4]),
    "tied": (Tied, "embeddings|.*recurrent_kernel", np.array([[1, 2, 3], [9, 0, 1]])),
    "loop": (Loop, ".*kernel", EXAMPLES),
    "nested": (nested, ".*kernel", EXAMPLES),
    "attention": (attention, ".*kernel", EXAMPLES),
}


def assert_uses_the_announced_weights(model: Any, plain: Any, x: Any, call: Callable) -> None:
    """Checks one training call against the plain model with the announced weights."""
    one = added(model)
    calls = one.calls
    values = one.effective_weights(calls).values()
    effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
    assert any((np.asarray(v) == 0).any() for v in effective.values())
    assert len(model.weights) == len(plain.weights)
    plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])
    np.testing.assert_allclose(call(model, x), plain(x), rtol=1e-4, atol=1e-5)
    assert one.calls == calls + 1


@quick_rows(
    "tied-graph",
    "loop-eager",
    "attention-graph",
    "autoencoder-eager",
    "nested-graph",
    "adversarial-eager",
)
@pytest.mark.parametrize("call", ["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_call_uses_the_announced_weights(kind: str, call: str) -> None:
    make, pattern, x = KINDS[kind]
    model, plain = made(make, x), made(make, x)
    expected = model(x)
    names = own_names(model)
    assert tfwd.parametrize(model, {pattern: P.Dropout(0.4)}, seed=1, in_place=True) is model
    np.testing.assert_array_equal(model(x), expected)
    for _ in range(2):
        assert_uses_the_announced_weights(model, plain, x, CALLS[call])
    assert tfwd.unwrap(model) is model
    np.testing.assert_array_equal(model(x, training=True), expected)
    assert own_names(model) == names


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_plain_models_with_masks(kind: str) -> None:
    """Uses a plain model with the effective weights, and the factors mask / keep."""
    make, pattern, x = KINDS[kind]
    model, plain = made(make, x), made(make, x)
    tfwd.parametrize(model, {pattern: P.Dropout(0.5)}, seed=1, in_place=True)
    one = added(model)
    values = one.effective_weights(0).values()
    effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
    plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])

    def gradients(of: Any, training: bool) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(of(x, training=training)))
        return [*map(tf.convert_to_tensor, tape.gradient(loss, variables(of)))]

    got, raw = gradients(model, True), gradients(plain, False)
    for variable, one_gradient, other in zip(model.trainable_variables, got, raw, strict=True):
        factor = 1.0
        if id(variable) in effective:
            factor = 2.0 * (np.asarray(effective[id(variable)]) != 0)
        np.testing.assert_allclose(one_gradient, other * factor, rtol=1e-4, atol=1e-5)


def test_methods_of_the_object_itself_are_kept() -> None:
    model = made(nested)
    dense = model.layers[-1]
    dense.call = lambda x: -type(dense).call(dense, x)
    expected = np.asarray(model(EXAMPLES))
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    np.testing.assert_array_equal(model(EXAMPLES), expected)
    tfwd.unwrap(model)
    np.testing.assert_array_equal(model(EXAMPLES), expected)


def test_draws_do_not_depend_on_what_was_built_before() -> None:
    def drawn() -> list[np.ndarray]:
        model = made(nested)
        tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=7, in_place=True)
        return [np.asarray(v) for v in added(model).effective_weights(3).values()]

    first = drawn()
    DENSE(2)(tf.ones([1, 2]))
    for one, other in zip(first, drawn(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_layer_equals_a_wrapper() -> None:
    dense = made(lambda: DENSE(3))
    wrapped = layers.Parametrized(DENSE(3), {"kernel": P.Dropout(0.5)}, seed=5)
    wrapped(EXAMPLES)
    wrapped.set_weights(dense.get_weights())
    tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, seed=5, in_place=True)
    np.testing.assert_array_equal(dense(EXAMPLES, training=True), wrapped(EXAMPLES, training=True))


def test_a_layer_inside_a_model() -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), DENSE(4, activation="tanh"), DENSE(1)])

    model, plain = made(make), made(make)
    tfwd.parametrize(model.layers[0], {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd", "mse")
    model.fit(EXAMPLES, LABELS, batch_size=8, verbose=0)
    assert added(model).calls == 2
    assert_uses_the_announced_weights(model, plain, EXAMPLES, CALLS["graph"])
    tfwd.unwrap(model)
    assert not tfwd.added_parametrizations(model)


def test_compiled_by_xla() -> None:
    model = made(nested)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(EXAMPLES, LABELS, batch_size=8, epochs=2, verbose=0)
    assert added(model).calls == 4
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.slow
def test_a_published_model() -> None:
    """Adds dropout to the convolutions of MobileNetV2, which has BatchNormalization."""

    def make() -> keras.Model:
        return keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=3)

    x = np.random.default_rng(1).uniform(size=(4, 32, 32, 3)).astype("float32")
    model, plain = made(make, x), made(make, x)
    expected = model.predict(x, verbose=0)
    pointwise = "(.*_(expand|project)|Conv_1)/kernel"
    tfwd.parametrize(model, {pointwise: P.Dropout(0.3)}, seed=1, in_place=True)
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    one = added(model)
    values = one.effective_weights(0).values()
    effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
    assert len(effective) == 34
    plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])
    outputs = model(x, training=True)
    np.testing.assert_allclose(outputs, plain(x, training=True), rtol=1e-3, atol=1e-4)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    model.fit(x, np.array([0, 1, 2, 0]), verbose=0)
    assert one.calls == 2
    assert tfwd.unwrap(model) is model
