"""One mask for all time steps, another for each example, and draws that continue on restart."""

import copy
import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import layers

X = tf.ones([50, 7, 40])


def test_one_mask_for_all_steps_and_another_for_each_example() -> None:
    y = layers.LockedDropout(0.3, seed=1)(X, training=True).numpy()
    assert (y == y[:, :1]).all()
    keep = round(0.7 * 65536) / 65536
    assert set(np.unique(y)) == {0.0, np.float32(1 / keep)}
    dropped = (y[:, 0] == 0).mean()
    assert abs(dropped - 0.3) < 5 * math.sqrt(0.21 / 2000)
    one, two = y[:-1, 0].ravel(), y[1:, 0].ravel()
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / math.sqrt(one.size)


def test_evaluation_is_the_identity() -> None:
    layer = layers.LockedDropout(0.3)
    for training in (False, None, tf.constant(False)):
        assert layer(X, training=training) is X or np.array_equal(layer(X, training=training), X)
    assert layer.calls == 0


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16", "float64"])
def test_the_gradient_is_the_mask_over_keep(traced: bool, policy: str) -> None:
    layer = layers.LockedDropout(0.5, seed=1, dtype=policy)
    x = tf.cast(X, layer.compute_dtype)

    def step() -> tuple:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
        return y, tape.gradient(y, x)

    y, gradient = tf.function(step)() if traced else step()
    assert y.dtype == layer.compute_dtype
    np.testing.assert_array_equal(y, gradient)
    assert 0.4 < np.mean(tf.cast(y, tf.float32) == 0) < 0.6


def test_calls_differ_and_one_seed_draws_alike() -> None:
    one, two = layers.LockedDropout(0.5, seed=1), layers.LockedDropout(0.5, seed=1)
    a, b = one(X, training=True), one(X, training=True)
    np.testing.assert_array_equal(two(X, training=True), a)
    np.testing.assert_array_equal(two(X, training=True), b)
    assert not np.array_equal(a, b)


def test_a_tensor_flag() -> None:
    layer = layers.LockedDropout(0.5, seed=1)
    function = tf.function(
        lambda t: layer(X, training=t), input_signature=[tf.TensorSpec([], tf.bool)]
    )
    np.testing.assert_array_equal(function(tf.constant(False)), X)
    expected = layers.LockedDropout(0.5, seed=1)(X, training=True)
    np.testing.assert_array_equal(function(tf.constant(True)), expected)
    assert layer.calls == 1


def test_files_and_copies_go_on(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((7, 40)), layers.LockedDropout(0.5, seed=1)])
    model(X, training=True)
    model.save(tmp_path / "model.keras")
    others = [keras.saving.load_model(tmp_path / "model.keras"), copy.deepcopy(model)]
    expected = model(X, training=True)
    for other in others:
        np.testing.assert_array_equal(other(X, training=True), expected)


@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 2), (2, 3, 4, 5)])
def test_shapes(shape: tuple[int, ...]) -> None:
    x = tf.ones(shape)
    y = layers.LockedDropout(0.5, seed=1)(x, training=True)
    assert y.shape == shape
    assert (y.numpy() == y.numpy()[:, :1]).all()


def test_unknown_sizes() -> None:
    layer = layers.LockedDropout(0.5, seed=1)
    signature = [tf.TensorSpec([None, None, 40])]
    function = tf.function(lambda x: layer(x, training=True), input_signature=signature)
    for rows, time in ((2, 3), (5, 1), (1, 9)):
        y = function(X[:1, :1] * tf.ones([rows, time, 1])).numpy()
        assert y.shape == (rows, time, 40)
        assert (y == y[:, :1]).all()


def test_jit_compiled() -> None:
    y = tf.function(layers.LockedDropout(0.5, seed=1), jit_compile=True)(X, training=True).numpy()
    assert (y == y[:, :1]).all()
    assert 0.4 < (y == 0).mean() < 0.6


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), "x"])
def test_a_rate_out_of_range_is_an_error(rate) -> None:
    with pytest.raises(ValueError, match=r"'drop'.*rate must be in \[0, 1\)"):
        layers.LockedDropout(rate, name="drop")


def test_an_input_without_time_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"'drop' expects \[batch, time, ...\].* got .* \(3,\)"):
        layers.LockedDropout(0.5, name="drop")(tf.ones([3]), training=True)


def test_it_has_no_weights() -> None:
    assert layers.LockedDropout(0.5).weights == []
