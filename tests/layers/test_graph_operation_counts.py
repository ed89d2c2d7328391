"""Numbers of operations that a wrapped layer adds to a graph, including called functions."""

from collections.abc import Callable

import keras
import pytest
import tensorflow as tf
from stack_marks import extended, quick_rows

from tfwd import _keras, layers


def count(function: Callable[[], object]) -> int:
    """Counts the operations of a function's graph; a function that XLA compiles counts as one."""
    graph = tf.function(function, autograph=False).get_concrete_function().graph.as_graph_def()
    library = {f.signature.name: f for f in graph.library.function}

    def inside(nodes) -> int:
        total = 0
        for node in nodes:
            called = library.get(node.attr["f"].func.name if "f" in node.attr else "")
            compiled = called is not None and called.attr["_XlaMustCompile"].b
            total += 1 if called is None or compiled else inside(called.node_def)
        return total

    return inside(graph.node)


def of_layer(layer: keras.Layer, *x: tf.Tensor) -> tuple[int, int]:
    """Counts the operations of forward, and those that backward adds."""
    layer(*x, training=True)
    weights = [_keras.variables.tf_variable(w) for w in layer.trainable_weights]

    def both() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(*x, training=True)
        return tape.gradient(y, [*x, *weights])

    forward = count(lambda: layer(*x, training=True))
    return forward, count(both) - forward


@quick_rows("*-large")
@pytest.mark.parametrize("size", ["small", "large"], indirect=True)
@pytest.mark.parametrize("perturbed", [layers.WeightDropout, layers.VariationalNoise])
def test_a_wrapped_dense_layer(perturbed: type, size: str) -> None:
    x = tf.ones([2, 200])
    plain = of_layer(keras.layers.Dense(200), x)
    wrapped = of_layer(perturbed(keras.layers.Dense(200), 0.1, seed=1), x)
    assert wrapped[0] - plain[0] <= 60 and wrapped[1] - plain[1] <= 60


@extended
@pytest.mark.parametrize("size", ["small", "large"], indirect=True)
def test_a_wrapped_layer_of_many_weights(size: str) -> None:
    x = tf.ones([2, 5, 200])
    plain = of_layer(keras.layers.MultiHeadAttention(2, 100), x, tf.identity(x))
    inner = keras.layers.MultiHeadAttention(2, 100)
    wrapped = of_layer(layers.WeightDropout(inner, 0.1, seed=1), x, tf.identity(x))
    assert wrapped[0] - plain[0] <= 40 + 4 * 15


@extended
def test_operations_grow_with_the_layers_and_no_faster() -> None:
    counts = []
    for depth in (4, 8, 16):
        stack = [layers.WeightDropout(keras.layers.Dense(3), 0.1) for _ in range(depth)]
        counts.append(of_layer(keras.Sequential([keras.Input((3,)), *stack]), tf.ones([2, 3])))
    (a, b, c) = (forward + backward for forward, backward in counts)
    assert c - b == 2 * (b - a)
