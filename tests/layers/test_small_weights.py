"""Small weights are stored for backward, and large ones are drawn again; both train correctly."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import extended

from conformance.harness import randomize
from tfwd import _keras, layers
from tfwd import parametrizations as P
from tfwd._random import masks_and_normals


def kept(layer: keras.Layer, x: tf.Tensor) -> list[tuple[int, ...]]:
    """Returns the shapes of the floating-point tensors that forward hands to backward."""
    weights = [_keras.variables.tf_variable(w) for w in layer.trainable_weights]
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, training=True) ** 2)
        forward = set(graph.get_operations())
        tape.gradient(loss, weights)
    later = [op for op in graph.get_operations() if op not in forward]
    taken = {t.ref(): t for op in later for t in op.inputs if t.op in forward}
    made = [
        t for t in taken.values() if t.op.type not in ("Const", "ReadVariableOp", "Placeholder")
    ]
    return [tuple(t.shape) for t in made if t.dtype.is_floating]


@pytest.mark.parametrize("limit", [4 * 6, 4 * 6 + 1])
def test_an_effective_weight_is_kept_if_it_is_smaller_than_the_limit(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks_and_normals, "SMALL", limit)
    layer = layers.WeightDropout(keras.layers.Dense(6, use_bias=False), 0.5, seed=1)
    layer.build((3, 4))
    assert ((4, 6) in kept(layer, tf.ones([3, 4]))) == (limit > 4 * 6)


@pytest.mark.parametrize("eager", [True, False])
def test_one_large_weight_among_small_ones(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that a layer with one large weight is treated as large.

    Values and gradients equal the plain layer's.
    """
    monkeypatch.setattr(masks_and_normals, "SMALL", 20)
    drop = {"kernel": P.Dropout(0.5), "bias": P.Dropout(0.5)}
    plain = keras.layers.Dense(6)
    layer = layers.Parametrized(plain, drop, seed=1)
    x = tf.random.stateless_normal([3, 4], [1, 2])
    layer.build(x.shape)
    randomize(layer)
    raw = [tf.convert_to_tensor(w.numpy()) for w in layer.weights]
    effective = list(layer.effective_weights(0).values())
    weights = [_keras.variables.tf_variable(w) for w in layer.trainable_weights]

    def step() -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
            loss = tf.reduce_sum(tf.sin(y))
        return y, tape.gradient(loss, weights)

    y, gradients = step() if eager else tf.function(step)()
    kernel, bias = (w.numpy().astype(np.float64) for w in effective)
    expected = x.numpy().astype(np.float64) @ kernel + bias
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    upstream = np.cos(expected)
    for found, of_effective, mask in (
        (gradients[0], x.numpy().T @ upstream, kernel != 0.0),
        (gradients[1], upstream.sum(0), bias != 0.0),
    ):
        np.testing.assert_allclose(found, of_effective * mask * 2.0, rtol=1e-4, atol=1e-5)
    for weight, before in zip(layer.weights, raw, strict=True):
        np.testing.assert_array_equal(weight.numpy(), before)
    assert (6,) not in kept(layer, x) and (4, 6) not in kept(layer, x)


def test_a_large_weight_after_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_and_normals, "SMALL", 20)
    dense = [keras.layers.Dense(units, use_bias=False) for units in (4, 8)]
    model = keras.Sequential([keras.Input((3,)), *dense])
    layer = layers.Parametrized(model, {".*kernel": P.Dropout(0.5)}, seed=1)
    assert (4, 8) not in kept(layer, tf.ones([2, 3]))
    monkeypatch.setattr(masks_and_normals, "SMALL", 33)
    assert (4, 8) in kept(layer, tf.ones([2, 3]))


def test_a_small_draw_depends_on_nothing_but_the_seed_and_the_place() -> None:
    """Checks draws in eager mode, in a function, under XLA, and by `effective_weights`."""
    x = tf.eye(5)
    made = []
    for run in (lambda f: f, tf.function, lambda f: tf.function(f, jit_compile=True)):
        dense = keras.layers.Dense(7, use_bias=False, kernel_initializer="ones")
        layer = layers.WeightDropout(dense, 0.3, seed=3)
        layer.build(x.shape)
        expected = layer.effective_weights(1)["kernel"]
        call = run(lambda layer=layer: layer(x, training=True))
        call()
        made.append(call().numpy())
        np.testing.assert_array_equal(made[-1], expected)
    assert 0 < np.mean(made[0] == 0.0) < 1


@extended
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("size")
def test_a_branch_in_a_loop(compiled: bool) -> None:
    """Checks values and gradients against the plain layer on the drawn weights, written out."""
    layer = layers.WeightDropout(keras.layers.Dense(4, use_bias=False), 0.5, seed=1)
    x = tf.random.stateless_normal([3, 4], [1, 2])
    layer.build(x.shape)
    kernel = _keras.variables.tf_variable(layer.weights[0])
    drawn = [layer.effective_weights(call)["kernel"].numpy().astype(np.float64) for call in (0, 1)]

    @tf.function(jit_compile=compiled)
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            _, y = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, h: (
                    i + 1,
                    tf.cond(i % 2 == 0, lambda: tf.tanh(layer(h, training=True)), lambda: h),
                ),
                (0, x),
                maximum_iterations=3,
            )
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, kernel)

    y, gradient = step()
    first = np.tanh(x.numpy().astype(np.float64) @ drawn[0])
    second = np.tanh(first @ drawn[1])
    np.testing.assert_allclose(y, second, rtol=1e-4, atol=1e-5)
    upstream = 2 * second * (1 - second**2)
    expected = (first.T @ upstream) * (drawn[1] != 0.0) * 2.0
    upstream = (upstream @ drawn[1].T) * (1 - first**2)
    expected += (x.numpy().T @ upstream) * (drawn[0] != 0.0) * 2.0
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)
