"""Several parametrizations that meet in one layer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import (
    DENSE,
    DROPPED,
    EXAMPLES,
    IDS,
    RUNS,
    Outer,
    Pair,
    S,
    X,
    added,
    functional,
    made,
    stepped,
)

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_a_model_inside_a_model(order: str, large: bool, request: Any) -> None:
    """The chain of both acts on the inner weights, in the order in which they were added."""
    if large:
        request.getfixturevalue("all_large")

    def make() -> Any:
        return Outer(Pair())

    model, plain = made(make, X), made(make, X)
    targets = [model.inner, model][:: 1 if order == "inner first" else -1]
    for seed, target in enumerate(targets):
        tfwd.parametrize(target, DROPPED, seed=seed, in_place=True)
    last = next(one for one in tfwd.added_parametrizations(model) if one.target is targets[-1])
    for call in range(2):
        weights = last.effective_weights(call).values()
        values = {
            id(t.variable): np.asarray(v) for (t, _), v in zip(last.targeted, weights, strict=True)
        }
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        got, wanted = stepped(model, X), stepped(plain, X)
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
        for v, a, b in zip(model.weights, got[2:], wanted[2:], strict=True):
            factor = 4.0 * (values[id(v)] != 0) if id(v) in values else 1.0
            np.testing.assert_allclose(a, b * factor, rtol=1e-4, atol=1e-5)
    assert [one.calls for one in tfwd.added_parametrizations(model)] == [2, 2]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.usefixtures("all_large")
def test_one_layer_of_two_with_equal_code(graph: bool) -> None:
    """The second layer has one parametrization more, and an own number of calls."""

    def make() -> Any:
        x = keras.Input((6,))
        first, second = DENSE(6, activation="tanh"), DENSE(6, activation="tanh")
        return keras.Model(x, second(first(x)))

    model, plain = made(make, tf.constant(X)), made(make, tf.constant(X))
    tfwd.parametrize(model.layers[2], {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=2, in_place=True)
    run: Any = RUNS["graph" if graph else "eager"]
    outer = tfwd.added_parametrizations(model)[1]
    values = [np.asarray(v) for v in outer.effective_weights(0).values()]
    weights = plain.get_weights()
    plain.set_weights([values[0], weights[1], values[1], weights[3]])
    got, wanted = run(model, X), stepped(plain, X)
    factors = [2.0 * (values[0] != 0), 1.0, 4.0 * (values[1] != 0), 1.0]
    for a, b, factor in zip(got[2:], wanted[2:], factors, strict=True):
        np.testing.assert_allclose(a, b * factor, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("all_large")
def test_equal_layers_of_which_one_has_two_of_its_own() -> None:
    first, second = DENSE(6, activation="tanh"), DENSE(6, activation="tanh")
    x = tf.constant(X)
    for layer, times in ((first, 1), (second, 2)):
        layer(x)
        for seed in range(times):
            tfwd.parametrize(layer, DROPPED, seed=seed, in_place=True)
    plain = made(lambda: DENSE(6, activation="tanh"), x)
    for layer, scale in ((first, 2.0), (second, 4.0)):
        (kernel,) = tfwd.added_parametrizations(layer)[-1].effective_weights(0).values()
        plain.set_weights([np.asarray(kernel), layer.get_weights()[1]])
        got, wanted = stepped(layer, x), stepped(plain, x)
        np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
        expected = wanted[2] * scale * (np.asarray(kernel) != 0)
        np.testing.assert_allclose(got[2], expected, rtol=1e-4, atol=1e-5)
        assert {one.calls for one in tfwd.added_parametrizations(layer)} == {1}


def test_an_embedding_with_two() -> None:
    def make() -> Any:
        return functional(lambda x: keras.layers.Embedding(6, 4)(x), (3,), "int32")

    model = made(make, IDS)
    for seed in (1, 2):
        parts = {"embeddings": P.GaussianNoise(0.5)}
        tfwd.parametrize(model, parts, seed=seed, in_place=True)
    one, other = tfwd.added_parametrizations(model)
    (table,) = other.effective_weights(0).values()
    expected = tf.gather(table, IDS)
    np.testing.assert_allclose(model(IDS, training=True), expected, rtol=1e-5, atol=1e-6)
    assert one.calls == other.calls == 1


@pytest.mark.parametrize("kind", ["lookup", "recurrent", "product"])
def test_a_wrapper_around_a_layer_with_one_in_place(kind: str) -> None:
    """Fast ways of calling a layer do not go past the layer's own parametrization."""
    layer, x, weight = {
        "lookup": (keras.layers.Embedding(6, 4), IDS, "embeddings"),
        "recurrent": (keras.layers.LSTM(3), S, "recurrent_kernel"),
        "product": (DENSE(3), X, "kernel"),
    }[kind]
    layer(x)
    tfwd.parametrize(layer, {weight: P.GaussianNoise(100.0)}, seed=1, in_place=True)
    options = {"per_example": True} if kind == "product" else {}
    wrapped = layers.WeightDropout(layer, 0.25, weights=[weight], seed=2, **options)
    before = np.asarray(wrapped(x))
    after = np.asarray(wrapped(x, training=True))
    assert added(layer).calls == 1 and wrapped.calls == 1
    assert np.abs(before).max() < 10 and (kind == "recurrent" or np.abs(after).max() > 10)


def test_masks_for_each_example_around_another_one() -> None:
    model = made(lambda: keras.Sequential([keras.Input((6,)), DENSE(3)]), X)
    tfwd.parametrize(model, {"kernel": P.Dropout(0.0)}, seed=1, in_place=True)
    parts = {"kernel": P.Dropout(0.5, per_example=True)}
    tfwd.parametrize(model, parts, seed=2, in_place=True)
    (kernel,) = tfwd.added_parametrizations(model)[1].effective_weights(0, 4).values()
    expected = np.einsum("bi,bij->bj", X, kernel)
    np.testing.assert_allclose(model(X, training=True), expected, rtol=1e-4, atol=1e-5)


def test_references_inside_another_one_are_raw() -> None:
    model = made(lambda: Outer(Pair()), X)
    raw = [np.asarray(v) for v in model.weights]
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    tfwd.parametrize(model.inner, {".*kernel": P.Mixout(0.5)}, seed=2, in_place=True)
    model(X, training=True)
    one = next(o for o in tfwd.added_parametrizations(model) if o.target is model.inner)
    for (target, parametrization), weight in zip(one.targeted, (raw[0], raw[2]), strict=True):
        (reference,) = one.references_of(target, parametrization)
        np.testing.assert_array_equal(reference, weight)


def test_two_models_with_one_layer() -> None:
    """A layer computes with all its parametrizations, whichever model calls it."""
    shared = DENSE(6)

    def make() -> Any:
        return keras.Sequential([keras.Input((6,)), shared, DENSE(2)])

    one, two = made(make, X), made(make, X)
    tfwd.parametrize(one, DROPPED, seed=1, in_place=True)
    tfwd.parametrize(two, DROPPED, seed=2, in_place=True)
    first = [np.asarray(v) for v in added(one).effective_weights(0).values()][1]
    both = next(np.asarray(v) for v in added(two).effective_weights(0).values())
    hidden = X @ both
    np.testing.assert_allclose(one(X, training=True), hidden @ first, rtol=1e-4, atol=1e-5)
    assert added(one).calls == added(two).calls == 1
    tfwd.unwrap(one)
    (alone, _) = (np.asarray(v) for v in added(two).effective_weights(1).values())
    np.testing.assert_allclose(shared(X, training=True), X @ alone, rtol=1e-4, atol=1e-5)
    tfwd.unwrap(two)
    np.testing.assert_array_equal(shared(X, training=True), shared(X))


@pytest.mark.parametrize("outer", [False, True])
def test_layers_of_tfwd(outer: bool) -> None:
    """A wrapper inside a model in place, and a wrapper around it."""
    wrapped = layers.WeightDropout(DENSE(5), 0.5, seed=3)
    model = keras.Sequential([keras.Input((6,)), wrapped, DENSE(2)])
    plain = made(lambda: keras.Sequential([keras.Input((6,)), DENSE(5), DENSE(2)]), X)
    if outer:
        model = made(lambda: keras.Sequential([keras.Input((6,)), DENSE(5), DENSE(2)]), X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    raw = model.get_weights()
    top: Any = layers.Parametrized(model, {".*kernel": P.Dropout(0.5)}, 4) if outer else model
    source = top if outer else added(model)
    a, b = (np.asarray(v) for v in source.effective_weights(0).values())
    plain.set_weights([a, raw[1], b, raw[3]])
    np.testing.assert_allclose(top(X, training=True), plain(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["inner first", "outer first"])
def test_a_layer_in_a_wrapper_of_keras(order: str) -> None:
    """Compares with the weights that the last parametrization announces."""

    def make() -> Any:
        return functional(lambda x: keras.layers.TimeDistributed(DENSE(3))(x), (3, 6))

    model, plain = made(make, S), made(make, S)
    targets = [model.layers[1].layer, model][:: 1 if order == "inner first" else -1]
    for target in targets:
        part = P.Dropout(0.5) if target is model else P.WeightNorm()
        tfwd.parametrize(target, {".*kernel": part}, seed=1, in_place=True)
    last = tfwd.added_parametrizations(model)[-1]
    assert last.target is targets[-1]
    (kernel,) = last.effective_weights(0).values()
    plain.set_weights([np.asarray(kernel), plain.get_weights()[1]])
    np.testing.assert_allclose(model(S, training=True), plain(S), rtol=1e-4, atol=1e-5)
    expected = model(S)
    tfwd.unwrap(model, fold=True)
    np.testing.assert_allclose(model(S), expected, rtol=1e-5, atol=1e-6)


def test_a_second_call_is_a_chain() -> None:
    """Equals nested wrappers, of which the first call is the inner one."""
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(64)]))
    raw, expected = model.get_weights(), model(EXAMPLES)
    tfwd.parametrize(model, {"kernel": P.GaussianNoise(0.3)}, seed=1, in_place=True)
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=2, in_place=True)
    noisy = layers.VariationalNoise(DENSE(64), 0.3, seed=1)
    wrapped = layers.WeightDropout(noisy, 0.5, seed=2)
    wrapped(EXAMPLES)
    wrapped.set_weights(raw)
    outputs = model(EXAMPLES, training=True)
    np.testing.assert_allclose(outputs, wrapped(EXAMPLES, training=True), rtol=1e-4, atol=1e-5)
    (weight,) = tfwd.added_parametrizations(model)[1].effective_weights(0).values()
    np.testing.assert_allclose(wrapped.effective_weights(0)["kernel"], weight, rtol=1e-6, atol=1e-6)
    tfwd.unwrap(model)
    np.testing.assert_array_equal(model(EXAMPLES, training=True), expected)


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_chain_of_a_layer_inside_and_the_layer_around_it(inner_first: bool) -> None:
    """Compares with the weights that both announce, and with the order of their formulas."""

    def make() -> Any:
        return keras.layers.MultiHeadAttention(2, 8)

    x = tf.constant(EXAMPLES.reshape(2, 8, 8))
    keras.utils.set_random_seed(2)
    model, plain = make(), make()
    model(x, x), plain(x, x)
    plain.set_weights(model.get_weights())
    expected = model(x, x)
    inner = next(layer for layer in _keras.layers.sublayers(model) if "query" in layer.name)
    targets = [(inner, {"kernel": P.GaussianNoise(0.3)}), (model, {".*kernel": P.Dropout(0.5)})]
    for seed, (target, parts) in enumerate(targets if inner_first else targets[::-1]):
        tfwd.parametrize(target, parts, seed=seed, in_place=True)
    found = {one.target.name: one for one in tfwd.added_parametrizations(model)}
    weights = [np.asarray(w) for w in model.get_weights()]
    values = list(found[model.name].effective_weights(0).values())
    (noisy,) = found[inner.name].effective_weights(0).values()
    for (target, _), value in zip(found[model.name].targeted, values, strict=True):
        weights[target.position] = np.asarray(value)
        if target.variable is inner.kernel:
            both = np.asarray(noisy) if not inner_first else np.asarray(value)
            weights[target.position] = both
    plain.set_weights(weights)
    np.testing.assert_allclose(model(x, x, training=True), plain(x, x), rtol=1e-4, atol=1e-5)
    tfwd.unwrap(model)
    np.testing.assert_array_equal(model(x, x, training=True), expected)


class Scaled(keras.layers.Layer):
    """A layer with a weight of its own and a layer inside."""

    def __init__(self, reads_kernel: bool) -> None:
        super().__init__()
        self.reads_kernel = reads_kernel
        self.dense = DENSE(6, use_bias=False)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.built = True

    def call(self, inputs: Any) -> Any:
        kernel = tf.convert_to_tensor(self.dense.kernel) if self.reads_kernel else None
        product = self.dense(inputs) if kernel is None else inputs @ kernel
        return product + 0.0 * tf.convert_to_tensor(self.scale)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("all_weights", [False, True])
@pytest.mark.parametrize("noise_first", [False, True])
@pytest.mark.parametrize("kind", ["calls", "reads", "wrapper of Keras"])
def test_the_order_of_the_calls_counts(
    kind: str, noise_first: bool, all_weights: bool, graph: bool
) -> None:
    """Dropped entries are exactly 0 only if the noise comes first. The model has the dropout."""
    inner: Any = keras.layers.TimeDistributed(DENSE(6, use_bias=False))
    inner = inner if kind == "wrapper of Keras" else Scaled(kind == "reads")
    x = tf.eye(6)[None]
    model = made(lambda: keras.Sequential([keras.Input((6, 6)), inner]), x)
    calls = [
        (inner, {".*" if all_weights else ".*kernel": P.GaussianNoise(0.25)}),
        (model, {".*kernel": P.Dropout(0.5)}),
    ]
    for target, parts in calls if noise_first else calls[::-1]:
        tfwd.parametrize(target, parts, seed=3, in_place=True)
    last = tfwd.added_parametrizations(model)[-1]
    (kernel,) = [v for k, v in last.effective_weights(0).items() if k.endswith("kernel")]
    call = tf.function(model) if graph else model
    used = np.asarray(call(x, training=True))[0]
    assert 5 < np.sum(used == 0) < 31 if noise_first else np.all(used != 0)
    np.testing.assert_allclose(used, kernel, rtol=1e-5, atol=1e-6)


def test_a_layer_in_a_wrapper_of_keras_draws_once_in_a_call() -> None:
    """The kernel that is used is read off from the outputs for unit vectors."""
    model = keras.layers.TimeDistributed(DENSE(3, use_bias=False))
    keras.utils.set_random_seed(2)
    model(tf.eye(3)[None])
    tfwd.parametrize(model.layer, {"kernel": P.GaussianNoise(0.3)}, seed=1, in_place=True)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=0, in_place=True)
    for call in range(2):
        inner, outer = tfwd.added_parametrizations(model)
        (expected,) = outer.effective_weights(call).values()
        used = model(tf.eye(3)[None], training=True)[0]
        np.testing.assert_allclose(used, expected, rtol=1e-5, atol=1e-6)
        assert outer.calls == inner.calls == call + 1
