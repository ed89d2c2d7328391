"""Functions that were traced before a change, and the number of calls of each way of training."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import DROPPED, Outer, X, added, effective, made, stack, stepped, variables
from stack_marks import quick_rows

import tfwd
from tfwd import parametrizations as P


@quick_rows("False")
@pytest.mark.parametrize("inner", [False, True])
def test_fit_before_and_after(inner: bool) -> None:
    model = made(stack, X)
    target = model.layers[0] if inner else model
    model.compile("sgd", "mse")
    model.fit(X, X[:, :1], batch_size=2, verbose=0)
    tfwd.parametrize(target, DROPPED, seed=1, in_place=True)
    model.fit(X, X[:, :1], batch_size=2, verbose=0)
    one = added(target)
    assert one.calls == 2
    tfwd.unwrap(target)
    model.fit(X, X[:, :1], batch_size=2, verbose=0)
    assert one.calls == 2


def test_a_model_around_the_target() -> None:
    """Evaluation changes too, if the parametrization acts in evaluation."""
    inner = made(stack, X)
    outer = keras.Sequential([keras.Input((6,)), inner])
    around = Outer(outer)
    around(X)
    around.compile("sgd", "mse")
    around.predict(X, verbose=0)
    around.evaluate(X, X[:, :1], verbose=0)
    around.train_on_batch(X, X[:, :1])
    tfwd.parametrize(inner.layers[0], {"kernel": P.WeightNorm()}, in_place=True)
    np.testing.assert_allclose(around.predict(X, verbose=0), around(X), rtol=1e-4, atol=1e-5)
    loss = float(np.mean((np.asarray(around(X)) - X[:, :1]) ** 2))
    assert around.evaluate(X, X[:, :1], verbose=0) == pytest.approx(loss, rel=1e-4)
    before = added(inner).calls
    around.train_on_batch(X, X[:, :1])
    assert added(inner).calls == before + 1
    tfwd.unwrap(inner, fold=True)
    np.testing.assert_allclose(around.predict(X, verbose=0), around(X), rtol=1e-4, atol=1e-5)


def test_a_function_from_before_unwrap_can_still_be_called() -> None:
    model = made(stack, X)
    expected = model(X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    old = tf.function(lambda x: model(x, training=True))
    old(X)
    tfwd.unwrap(model)
    old(X)
    np.testing.assert_array_equal(model(X, training=True), expected)
    new = tf.function(lambda x: model(x, training=True))
    np.testing.assert_allclose(new(X), expected, rtol=1e-5, atol=1e-6)


def test_each_way_of_training_counts_each_call() -> None:
    model = made(stack, X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    raw, found = model.get_weights(), []
    options: list[dict[str, Any]] = [{}, {"run_eagerly": True}, {"steps_per_execution": 2}]
    for option in options:
        model.set_weights(raw)
        one = added(model)
        one.draws.state.assign([1, 0])
        model.compile("sgd", "mse", **option)
        model.fit(X, X[:, :1], batch_size=1, verbose=0, shuffle=False)
        assert one.calls == 4
        found.append(model.get_weights())
    for weights in found[1:]:
        for a, b in zip(weights, found[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_training_on_batches() -> None:
    """Four steps of `fit` equal four calls of `train_on_batch`."""
    found = []
    for alone in (False, True):
        model = made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        model.compile("sgd", "mse")
        if alone:
            for i in range(4):
                model.train_on_batch(X[i : i + 1], X[i : i + 1, :1])
        else:
            model.fit(X, X[:, :1], batch_size=1, verbose=0, shuffle=False)
        assert added(model).calls == 4
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_passes_of_a_loop_draw_anew() -> None:
    """Sums the gradients of three calls in a `tf.while_loop`."""
    model, plain = made(stack, X), made(stack, X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)

    @tf.function(autograph=False)
    def total() -> Any:
        def body(number: Any, sums: list[Any]) -> Any:
            gradients = stepped(model, X)[2:]
            return number + 1, [a + b for a, b in zip(sums, gradients, strict=True)]

        first = [tf.zeros_like(v) for v in variables(model)]
        return tf.while_loop(lambda n, _: n < 3, body, [tf.constant(0), first])[1]

    got = total()
    assert added(model).calls == 3
    expected = [np.zeros_like(w) for w in model.get_weights()]
    for call in range(3):
        values = effective(model, call)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        for v, sum_, g in zip(model.weights, expected, stepped(plain, X)[2:], strict=True):
            sum_ += np.asarray(g) * (2.0 * (values[id(v)] != 0) if id(v) in values else 1.0)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_model_built_on_the_target_afterwards() -> None:
    base, plain = made(stack, X), made(stack, X)
    tfwd.parametrize(base, DROPPED, seed=1, in_place=True)
    x = keras.Input((6,))
    model = keras.Model(x, base(x))
    features = keras.Model(base.inputs[0], base.layers[0].output)
    assert added(base).calls == 0
    np.testing.assert_allclose(model(X), plain(X), rtol=1e-5, atol=1e-6)
    values = effective(base, 0)
    plain.set_weights([values.get(id(v), np.asarray(v)) for v in base.weights])
    np.testing.assert_allclose(model(X, training=True), plain(X), rtol=1e-4, atol=1e-5)
    values = effective(base, 1)
    plain.set_weights([values.get(id(v), np.asarray(v)) for v in base.weights])
    expected = plain.layers[0](X)
    np.testing.assert_allclose(features(X, training=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*passed an input with a mask attached")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["model", "layer"])
def test_a_mask_beside_a_flag_that_is_a_tensor(kind: str, training: bool) -> None:
    """The oracle is the plain model with a Python flag: a rate of 0 changes no weight."""
    ids = keras.Input((3,), dtype="int32")
    embedded = keras.layers.Embedding(7, 4, mask_zero=True)(ids)
    rnn = keras.layers.GRU(4, return_sequences=True)
    if kind == "model":
        inputs = keras.Input((3, 4))
        target = keras.Model(inputs, keras.layers.Dense(2)(rnn(inputs)))
    else:
        target = rnn
    model = keras.Model(ids, target(embedded))
    x = np.array([[1, 2, 0], [3, 0, 0]])
    expected = model(x, training=training)
    tfwd.parametrize(target, {".*kernel": P.Dropout(0.0)}, seed=1, in_place=True)
    found = tf.function(lambda flag: model(x, training=flag))(tf.constant(training))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_two_on_a_masked_embedding_with_a_flag_that_is_a_tensor(training: bool) -> None:
    ids = keras.Input((3,), dtype="int32")
    layer = keras.layers.Embedding(7, 4, mask_zero=True)
    model = keras.Model(ids, layer(ids))
    for seed in range(2):
        tfwd.parametrize(layer, {".*": P.GaussianNoise(0.25)}, seed=seed, in_place=True)
    x = np.array([[1, 2, 0], [3, 0, 0]])
    found = tf.function(lambda flag: model(x, training=flag))(tf.constant(training))
    table = layer.weights[0].numpy()
    assert np.allclose(found, table[x]) != training
    # The rows of one id are equal, because one draw of the noise changes the weight.
    np.testing.assert_array_equal(found[0, 2], found[1, 1])
