"""Gradients of random masks and noise: eager, in graphs, under XLA, and out of branches."""

import numpy as np
import pytest
import tensorflow as tf

from tfwd._random import dropout_and_noise, masks_and_normals, seeds

DTYPES = ["float16", "bfloat16", "float32", "float64"]
SEED = seeds.seed(1, 0, 0)
LARGE = (300, 230)  # more entries than a small draw has


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_drop(dtype: str) -> None:
    weight = tf.constant(np.linspace(-2, 2, 40).reshape(5, 8), dtype)
    kept = masks_and_normals.mask((5, 8), 0.25, seeds.seed(1, 0, 0))
    with tf.GradientTape() as tape:
        tape.watch(weight)
        dropped = dropout_and_noise.drop(weight, kept, 0.25)
    gradient = tf.cast(tape.gradient(dropped, weight), tf.float64).numpy()
    assert (gradient[~kept.numpy()] == 0.0).all()
    np.testing.assert_allclose(gradient[kept.numpy()], 1 / 0.75, rtol=1e-2)


@pytest.mark.parametrize("where", ["eager", "graph", "XLA"])
@pytest.mark.parametrize("size", [(6, 5), LARGE])
def test_gradients_of_dropout_and_noise(size: tuple[int, int], where: str) -> None:
    """Checks d(dropout)/d(tensor) = mask / keep and d(noise)/d(tensor) = 1."""
    tensor, upstream = (tf.random.stateless_normal(size, [1, i]) for i in (2, 3))

    def gradients(tensor: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for draw in (dropout_and_noise.dropout, dropout_and_noise.noise):
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                y = draw(tensor, 0.25, SEED)
            found.append(tape.gradient(y, tensor, output_gradients=upstream))
        return found

    run = gradients if where == "eager" else tf.function(gradients, jit_compile=where == "XLA")
    of_dropout, of_noise = run(tensor)
    np.testing.assert_array_equal(of_noise, upstream)
    expected = np.where(masks_and_normals.mask(size, 0.25, SEED), upstream / np.float32(0.75), 0.0)
    np.testing.assert_allclose(of_dropout, expected, rtol=1e-6)


def test_in_a_graph_the_gradients_draw_waits_for_the_upstream_gradient() -> None:
    """Checks the dependency of the seed where the draw is not compiled.

    Without it the operations could start early, or be shared.
    """
    graph = tf.__internal__.FuncGraph("dropout")
    with graph.as_default():
        x, upstream = (tf.compat.v1.placeholder(tf.float32, [None, 30]) for _ in range(2))
        seed = tf.compat.v1.placeholder(tf.int32, [2])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = dropout_and_noise.dropout(x, 0.5, seed)
        forward = set(graph.get_operations())
        tape.gradient(y, x, output_gradients=upstream)
    backward = [op for op in graph.get_operations() if op not in forward]
    calls = [op for op in backward if "PartitionedCall" in op.type]
    drawn = [op for op in calls if seed.shape in [tensor.shape for tensor in op.inputs]]
    assert len(drawn) == 1
    (late,) = (tensor for tensor in drawn[0].inputs if tensor.shape == seed.shape)
    todo, before = [late.op], set()
    while todo:
        before.add(op := todo.pop())
        todo += [tensor.op for tensor in op.inputs if tensor.op not in before]
    assert {upstream.op, seed.op} <= before


def test_second_derivatives_of_dropout() -> None:
    x = tf.constant([[0.3, -0.7, 2.0]])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = dropout_and_noise.dropout(x**3, 0.5, SEED)
        slope = inner.gradient(y, x)
    kept = tf.cast(masks_and_normals.mask((1, 3), 0.5, SEED), tf.float32)
    np.testing.assert_allclose(outer.gradient(slope, x), 6 * x * kept / 0.5, rtol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["dropout", "noise"])
def test_a_gradient_from_outside_of_a_branch(kind: str, compiled: bool) -> None:
    """Checks static shapes, which XLA needs for all tensors that a branch's gradient stores."""

    def perturbed(x: tf.Tensor) -> tf.Tensor:
        return (
            dropout_and_noise.dropout(x, 0.5, SEED)
            if kind == "dropout"
            else dropout_and_noise.noise(x, 0.5, SEED)
        )

    @tf.function(jit_compile=compiled)
    def values(flag: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(flag, lambda: perturbed(x), lambda: 3.0 * x)
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    x = tf.random.stateless_normal([5, 4], [1, 2])
    y, gradient = values(tf.constant(True), x)
    np.testing.assert_allclose(y, perturbed(x), rtol=1e-6, atol=1e-7)
    kept = tf.cast(masks_and_normals.mask((5, 4), 0.5, SEED), x.dtype) if kind == "dropout" else 0.5
    np.testing.assert_allclose(gradient, 2 * y * kept / 0.5, rtol=1e-5)
    y, gradient = values(tf.constant(False), x)
    np.testing.assert_allclose(gradient, 18 * x, rtol=1e-5)
