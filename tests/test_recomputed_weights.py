"""The recomputed call: its result, and its first and second gradients."""

import numpy as np
import pytest
import tensorflow as tf

from tfwd._graph import recomputed_weights


def dropped(training: bool, tensors: list, seeds: list) -> list:
    _, w = tensors
    mask = tf.random.stateless_uniform(w.shape, seeds[0], dtype=w.dtype) < 0.5
    return [tf.where(mask, w * 2, 0.0) if training else w]


def product(training: bool, tensors: list, seeds: list, weights: list) -> list:
    return [tf.matmul(tensors[0], weights[0])]


def at_once(draw, function, training, tensors, seeds):
    return function(training, tensors, seeds, draw(training, tensors, seeds))


def noisy(training: bool, tensors: list, seeds: list) -> list:
    return [tensors[0] * tf.random.stateless_uniform(tensors[0].shape, seeds[0])]


def weights_themselves(training: bool, tensors: list, seeds: list, weights: list) -> list:
    return weights


SEED = tf.constant([3, 4])
W = tf.random.stateless_normal([6, 5], [1, 2])
X = tf.random.stateless_normal([2, 6], [3, 2])


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_the_result_and_its_gradients(training: bool, traced: bool) -> None:
    results = []

    def step(run) -> list:
        with tf.GradientTape() as tape:
            tape.watch([X, W])
            (y,) = run(dropped, product, training, [X, W], [SEED])
            loss = tf.reduce_sum(tf.sin(y))
        return [y, *tape.gradient(loss, [X, W])]

    results = [step(at_once)]
    results.append((tf.function(step) if traced else step)(recomputed_weights.call))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_integers_get_no_gradient_and_results_may_be_integers() -> None:
    ids = tf.constant([1, 2, 1])

    def function(training, tensors, seeds, weights):
        return [tf.gather(weights[0], tensors[1]), tensors[1] + 1]

    with tf.GradientTape() as tape:
        tape.watch(W)
        rows, more = recomputed_weights.call(
            lambda *a: [a[1][0] * 1.0], function, True, [W, ids], []
        )
    np.testing.assert_array_equal(more, [2, 3, 2])
    gradient = tf.convert_to_tensor(tape.gradient(rows, W))
    np.testing.assert_array_equal(gradient, np.outer([0, 2, 1, 0, 0, 0], np.ones(5)))


def test_a_draw_and_its_recomputation_are_the_same() -> None:
    """Checks gradients; a stateful draw inside `tf.recompute_grad` gives silently wrong ones."""
    w = tf.ones([1000])
    for traced in (False, True):

        def step():
            with tf.GradientTape() as tape:
                tape.watch(w)
                (y,) = recomputed_weights.call(noisy, weights_themselves, True, [w], [SEED])
            return y, tape.gradient(y, w)

        y, gradient = tf.function(step)() if traced else step()
        np.testing.assert_array_equal(y, gradient)


@pytest.mark.parametrize("first", [0.0, -0.0, np.nan, np.inf, -1.0, 1.0])
def test_what_ties_a_seed_to_data_is_always_zero(first: float) -> None:
    """Checks that the link from data to a seed adds 0 for any data, so that masks stay equal."""
    x = tf.constant([[first] * 6, [1.0] * 6])
    eager = recomputed_weights.call(dropped, product, True, [x, W], [SEED])[0]
    signature = [tf.TensorSpec(x.shape)]
    traced = tf.function(
        lambda x: recomputed_weights.call(dropped, product, True, [x, W], [SEED])[0],
        input_signature=signature,
    )(x)
    np.testing.assert_allclose(traced, eager, rtol=1e-6)


def test_an_empty_batch() -> None:
    @tf.function
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(W)
            (y,) = recomputed_weights.call(dropped, product, True, [x, W], [SEED])
        return tape.gradient(y, W)

    np.testing.assert_array_equal(step(tf.zeros([0, 6])), np.zeros([6, 5]))


@pytest.mark.parametrize("traced", [True, False])
def test_second_derivatives(traced: bool) -> None:
    """Checks d/dx of a sum of squares of a gradient: right, or an error, never silently wrong."""
    x = tf.constant([[0.3, 0.7]])

    def function(training, tensors, seeds, weights):
        return [tensors[0] ** 2 * weights[0]]

    def second() -> tf.Tensor:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                (y,) = recomputed_weights.call(noisy, function, True, [x], [SEED])
            gradient = inner.gradient(y, x)
        return outer.gradient(gradient, x)

    expected = 2 * 3 * x * tf.random.stateless_uniform([1, 2], SEED)
    result = tf.function(second)() if traced else second()
    np.testing.assert_allclose(result, expected, rtol=1e-5)
