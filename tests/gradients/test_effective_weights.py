"""Layers of tfwd: one mask for the batch, and its factor on the raw weight's moments."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import (
    assert_moments,
    general,
    per_example,
    randomized,
    rewinding,
    states,
)
from stack_marks import quick_rows

from tfwd import _keras, gradients, layers
from tfwd import parametrizations as P

L = keras.layers
IDS = np.array([[1, 1, 4], [5, 2, 5], [3, 0, 3], [5, 1, 0]])


@pytest.fixture(autouse=True)
def float64() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def dense() -> list:
    return [L.Dense(4, "tanh"), layers.WeightDropout(L.Dense(4), 0.5, seed=3), L.Flatten()]


def noise() -> list:
    inner = layers.VariationalNoise(L.Dense(4), 0.1, seed=1)
    return [layers.WeightDropout(inner, 0.5, seed=2), L.Flatten()]


def lstm() -> list:
    return [layers.WeightDropLSTM(3, 0.5, seed=1, return_sequences=True), L.Dense(2), L.Flatten()]


def chain() -> list:
    both = P.Chain([P.GaussianNoise(0.1), P.Dropout(0.3)])
    patterns = {"recurrent_kernel": both, "kernel": P.Dropout(0.5)}
    return [layers.Parametrized(L.GRU(3), patterns, seed=1)]


def block() -> list:
    inner = keras.Sequential([L.Dense(3, "tanh"), layers.WeightDropout(L.Dense(2), 0.5, seed=4)])
    return [layers.WeightDropout(inner, 0.3, weights=".*kernel", seed=5), L.Flatten()]


STACKS: list[Callable[[], list]] = [dense, noise, lstm, chain, block]


def one_by_one(model: keras.Model, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Returns the gradients `[batch, ...]` of each example's own loss, by a tape."""
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.unstack(tf.reduce_mean((model(x, training=True) - y) ** 2, -1))
    sources = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    rows = [[tf.convert_to_tensor(g) for g in tape.gradient(loss, sources)] for loss in losses]
    return [np.stack(parts) for parts in zip(*rows, strict=True)]


@quick_rows("*-None", "chain-3")
@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("stack", STACKS)
def test_against_the_model_on_its_effective_weights(stack: Callable, chunk_size: int) -> None:
    """Checks that the draw is the next training call's draw, whatever the chunks."""
    model = randomized(keras.Sequential([keras.Input((3, 3)), *stack()]))
    x = np.random.default_rng(1).normal(size=(4, 3, 3))
    y = np.random.default_rng(2).normal(size=model(x).shape)
    rewind = rewinding(model)
    moments = gradients.moments(model, x, y, "mse", training=True, chunk_size=chunk_size)
    after = [v.numpy() for v in states(model)]
    assert not general(moments)
    rewind()
    assert_moments(moments, one_by_one(model, x, y))
    for variable, value in zip(states(model), after, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)  # drawn once, as by a training call


def test_raw_weight_has_the_masks_square_times_the_effective_weights() -> None:
    layer = layers.WeightDropout(L.Dense(3, use_bias=False), 0.75, seed=1)
    model = keras.Sequential([keras.Input((4,)), layer])
    x, y = np.random.default_rng(1).normal(size=(5, 4)), np.zeros((5, 3))
    effective = layer.effective_weights(0)["kernel"].numpy()
    raw = layer.layer.kernel.numpy()
    moments = gradients.moments(model, x, y, "mse", training=True)
    plain = keras.Sequential([keras.Input((4,)), L.Dense(3, use_bias=False)])
    plain.set_weights([effective])
    wanted = gradients.moments(plain, x, y, "mse")
    factor = effective / raw  # 0 or 4
    assert set(np.round(np.unique(factor), 9)) == {0.0, 4.0}
    np.testing.assert_allclose(moments.mean[0], factor * wanted.mean[0])
    np.testing.assert_allclose(moments.mean_square[0], factor**2 * wanted.mean_square[0])
    assert layer.calls == 1


@quick_rows("3")
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_dropped_embedding_tied_to_a_raw_softmax(chunk_size: int) -> None:
    embedding = layers.DropoutEmbedding(6, 3, rate=0.5, seed=7)
    stack = [keras.Input((3,), dtype="int32"), embedding, L.Dense(3), layers.TiedDense(embedding)]
    model = randomized(keras.Sequential(stack))
    y = np.random.default_rng(2).normal(size=(4, 3, 6))
    matrix = embedding.embeddings.numpy()
    effective = embedding.effective_weights(0)["embeddings"].numpy()
    moments = gradients.moments(model, IDS, y, "mse", training=True, chunk_size=chunk_size)
    assert moments.methods[0] == "embedding+tied_dense"
    scale = tf.constant(effective / matrix)
    kernel, bias, other = (tf.constant(v.numpy()) for v in model.trainable_variables[1:])
    rows = []
    for ids, target in zip(IDS, y, strict=True):
        with tf.GradientTape() as tape:
            e = tf.constant(matrix)
            tape.watch(e)
            h = tf.gather(scale * e, ids) @ kernel + bias
            loss = tf.reduce_mean((tf.matmul(h, e, transpose_b=True) + other - target) ** 2)
        rows.append(tf.convert_to_tensor(tape.gradient(loss, e)))
    rows = np.stack(rows)
    np.testing.assert_allclose(moments.mean[0], rows.mean(0), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(moments.mean_square[0], (rows**2).mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("training", [False, True])
def test_parametrization_that_is_not_elementwise(training: bool) -> None:
    norm = {"kernel": P.WeightNorm()}
    model = keras.Sequential([keras.Input((3,)), layers.Parametrized(L.Dense(4), norm), L.Dense(2)])
    x = np.random.default_rng(1).normal(size=(4, 3))
    y = np.random.default_rng(2).normal(size=(4, 2))
    moments = gradients.moments(randomized(model), x, y, "mse", training=training)
    assert moments.methods[0] in ("vectorized_map", "loop") and moments.methods[-1] == "dense"
    assert_moments(moments, per_example(model, x, y, training=training))


def test_evaluation_neither_draws_nor_counts() -> None:
    model = randomized(keras.Sequential([keras.Input((3, 3)), *lstm()]))
    x, y = np.random.default_rng(1).normal(size=(4, 3, 3)), np.zeros((4, 6))
    moments = gradients.moments(model, x, y, "mse")
    assert model.layers[0].calls == 0 and not general(moments)
    assert_moments(moments, per_example(model, x, y))


class Squares(P.Parametrization):
    """`w' = w^2 + noise`: elementwise, with a derivative that depends on the weight."""

    elementwise = True

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        noise = tf.random.stateless_normal(weight.shape, seed, dtype=weight.dtype)
        return weight**2 + 0.1 * noise


class RoundsSoftly(P.Parametrization):
    """`w' = w - sin(2 pi w) / (2 pi)`: smooth rounding, with slope 0 at whole numbers."""

    elementwise = True

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return weight - tf.sin(2 * np.pi * weight) / (2 * np.pi)


class MixingDropout(P.Dropout):
    """A subclass whose `__call__` mixes entries, unlike its base class."""

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return super().__call__(weight - tf.reduce_mean(weight), seed)


@pytest.mark.parametrize(
    ("made", "fast"),
    [
        (Squares(), True),
        (P.Chain([RoundsSoftly(), P.Dropout(0.5), Squares()]), True),
        (MixingDropout(0.5), False),
        (P.Chain([Squares(), P.WeightNorm()]), False),
    ],
)
def test_parametrization_of_a_users_own(made: P.Parametrization, fast: bool) -> None:
    assert made.elementwise == fast
    layer = layers.Parametrized(L.Dense(4), {"kernel": made}, seed=1)
    model = randomized(keras.Sequential([keras.Input((3,)), L.Dense(3), layer, L.Dense(2)]))
    x = np.random.default_rng(1).normal(size=(4, 3))
    y = np.random.default_rng(2).normal(size=(4, 2))
    rewind = rewinding(model)
    moments = gradients.moments(model, x, y, "mse", training=True)
    assert general(moments) == (not fast)
    rewind()
    assert_moments(moments, one_by_one(model, x, y))
