"""Other ways to run a layer: states, loops, threads, replicas and half precision."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import (
    DENSE,
    DROPPED,
    EXAMPLES,
    LABELS,
    RUNS,
    Outer,
    Pair,
    S,
    X,
    added,
    effective,
    functional,
    made,
    stack,
    stepped,
)
from replicas import two_replicas
from stack_marks import IS_KERAS_2, quick_rows

import tfwd
from tfwd import parametrizations as P


@quick_rows("small")
@pytest.mark.parametrize("size", ["small", "large"])
def test_states_of_a_stateful_layer(size: str, request: Any) -> None:
    if size == "large":
        request.getfixturevalue("all_large")

    def make() -> Any:
        x = keras.Input((3, 6), batch_size=4)
        return keras.Model(x, keras.layers.LSTM(3, stateful=True)(x))

    model, plain = made(make, S), made(make, S)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    for call in range(3):
        values = effective(model, call)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        got, expected = model(S, training=True), plain(S, training=True)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_metrics_inside_a_layer_are_updated_once() -> None:
    class Counting(DENSE):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.seen = keras.metrics.Sum()

        def call(self, x: Any, training: Any = None) -> Any:
            if training:
                self.seen.update_state(tf.ones([]))
            return super().call(x)

    model = made(lambda: functional(lambda x: Counting(4)(x), (6,)), X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    stepped(model, X)
    RUNS["graph"](model, X)
    assert float(model.layers[1].seen.result()) == 2


@pytest.mark.parametrize("size", ["small", "large"])
def test_a_flag_that_is_a_tensor(size: str, request: Any) -> None:
    if size == "large":
        request.getfixturevalue("all_large")

    def make() -> Any:
        return Outer(Pair())

    model, plain = made(make, X), made(make, X)
    expected = model(X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    call = tf.function(lambda flag: model(X, training=flag))
    np.testing.assert_allclose(call(tf.constant(False)), expected, rtol=1e-5, atol=1e-6)
    assert added(model).calls == 0
    values = effective(model, 0)
    plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
    np.testing.assert_allclose(call(tf.constant(True)), plain(X), rtol=1e-4, atol=1e-5)
    assert added(model).calls == 1


def test_a_mapped_call() -> None:
    model, plain = made(stack, X), made(stack, X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    mapped = tf.map_fn(lambda x: model(x[None], training=True)[0], tf.constant(X))
    for call in range(4):
        values = effective(model, call)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        expected = plain(X[call : call + 1])[0]
        np.testing.assert_allclose(mapped[call], expected, rtol=1e-4, atol=1e-5)


def test_two_threads() -> None:
    model, plain = made(stack, X), made(stack, X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    found: list[np.ndarray] = []

    def run() -> None:
        for _ in range(5):
            found.append(np.asarray(model(X, training=True)))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert added(model).calls == 10
    for call in range(10):
        values = effective(model, call)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        expected = np.asarray(plain(X))
        assert sum(np.allclose(one, expected, rtol=1e-4, atol=1e-5) for one in found) == 1


@pytest.mark.float16
def test_scaled_losses() -> None:
    """Compares a step of float16 with float32."""
    found = []
    for policy in ("float32", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        model = made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        optimizer: Any = keras.optimizers.SGD(0.1)
        if policy == "mixed_float16":
            scaled = keras.mixed_precision if IS_KERAS_2 else keras.optimizers
            optimizer = scaled.LossScaleOptimizer(optimizer, initial_scale=64)
        model.compile(optimizer, "mse")
        model.fit(X, X[:, :1], epochs=2, verbose=0)
        assert added(model).calls == 2
        found.append(model.get_weights())
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("inside", [False, True])
def test_replicas_of_a_model(inside: bool) -> None:
    """`parametrize` may be called outside the scope in which the model was made."""
    strategy = two_replicas()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), DENSE(64)])
        if inside:
            tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    if not inside:
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)

    def call() -> Any:
        return model(X, training=True)

    step = tf.function(lambda: strategy.run(call), autograph=False)
    one, other = strategy.experimental_local_results(step())
    assert not np.array_equal(one, other)
    assert added(model).calls == 1
    (kernel,) = added(model).effective_weights(0).values()
    np.testing.assert_allclose(one, X @ kernel, rtol=1e-4, atol=1e-5)
    one, _ = strategy.experimental_local_results(step())
    (kernel,) = added(model).effective_weights(1).values()
    np.testing.assert_allclose(one, X @ kernel, rtol=1e-4, atol=1e-5)


@pytest.mark.float16
def test_mixed_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(32), DENSE(1)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd", "mse")
    model.fit(EXAMPLES, LABELS, verbose=0)
    assert all(v.dtype == "float32" for v in added(model).effective_weights(0).values())
    assert model(EXAMPLES, training=True).dtype == "float16"


def test_replicas_draw_differently_or_alike() -> None:
    strategy = two_replicas()
    for share in (False, True):
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), DENSE(64)])
            tfwd.parametrize(
                model,
                {"kernel": P.Dropout(0.5)},
                seed=1,
                share_across_replicas=share,
                in_place=True,
            )

        @tf.function
        def step() -> Any:
            return strategy.run(lambda: model(EXAMPLES, training=True))  # noqa: B023

        one, other = strategy.experimental_local_results(step())
        assert np.array_equal(one, other) is share
        assert added(model).calls == 1
