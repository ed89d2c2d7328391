"""Calls on other values: nothing else changes, nothing is assigned."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, needs_keras3

from tfwd import _keras
from tfwd._graph import stateless_call


def dense() -> keras.layers.Dense:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    return layer


X = tf.ones([1, 3])


def test_the_values_are_read_and_nothing_is_assigned() -> None:
    layer = dense()
    before = layer.get_weights()
    found = stateless_call.call(lambda: layer(X), [(layer.kernel, tf.fill([3, 2], 2.0))])
    np.testing.assert_array_equal(found.outputs, [[6.0, 6.0]])
    for a, b in zip(before, layer.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(layer(X), tf.matmul(X, before[0]))


def test_an_error_inside_leaves_no_trace() -> None:
    layer = dense()
    expected = layer(X)

    def fail() -> None:
        layer(X)
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        stateless_call.call(fail, [(layer.kernel, tf.zeros([3, 2]))])
    np.testing.assert_array_equal(layer(X), expected)


def test_gradients_flow_to_the_tensors() -> None:
    layer, kernel = dense(), tf.fill([3, 2], 2.0)
    with tf.GradientTape() as tape:
        tape.watch(kernel)
        y = stateless_call.call(lambda: layer(X), [(layer.kernel, kernel)]).outputs
    np.testing.assert_array_equal(tape.gradient(y, kernel), np.ones([3, 2]))


@pytest.mark.bfloat16
def test_autocast_applies_to_the_tensor() -> None:
    layer = keras.layers.Dense(2, dtype="mixed_bfloat16")
    layer.build((None, 3))
    found = stateless_call.call(lambda: layer(X), [(layer.kernel, tf.fill([3, 2], 1.001))])
    np.testing.assert_array_equal(tf.cast(found.outputs, tf.float32), [[3.0, 3.0]])


def test_nested_substitutions_see_the_inner_value_first() -> None:
    layer = dense()
    one, two = (tf.fill([3, 2], float(n)) for n in (1, 2))
    bias = tf.constant([10.0, 20.0])

    def inner():
        return stateless_call.call(lambda: layer(X), [(layer.kernel, two)]).outputs

    found = stateless_call.call(inner, [(layer.kernel, one), (layer.bias, bias)])
    np.testing.assert_array_equal(found.outputs, [[16.0, 26.0]])


def test_other_updates_are_made() -> None:
    norm = keras.layers.BatchNormalization(momentum=0.5)
    norm.build((None, 3))
    gamma = (norm.gamma, tf.ones([3]))
    found = stateless_call.call(lambda: norm(5 * X, training=True), [gamma])
    np.testing.assert_array_equal(norm.moving_mean, [2.5] * 3)
    assert found.updates == []


def test_captured_updates_are_returned_and_not_made() -> None:
    norm = keras.layers.BatchNormalization(momentum=0.5)
    norm.build((None, 3))
    values = [(v, tf.convert_to_tensor(v)) for v in norm.variables]
    found = stateless_call.call(lambda: norm(5 * X, training=True), values, capture=True)
    np.testing.assert_array_equal(norm.moving_mean, [0.0] * 3)
    assert {_keras.variables.name(v) for v, _ in found.updates} == {
        "moving_mean",
        "moving_variance",
    }
    stateless_call.assign(found.updates)
    np.testing.assert_array_equal(norm.moving_mean, [2.5] * 3)


OUTSIDE = "other values for a variable that is no attribute of a layer"


@needs_keras3(OUTSIDE)
def test_a_captured_update_is_read_back_inside() -> None:
    counter = keras.Variable(0.0)

    def twice() -> tf.Tensor:
        counter.assign(counter + 1)
        counter.assign(counter + 1)
        return counter + 0.0

    found = stateless_call.call(twice, [(counter, tf.constant(5.0))], capture=True)
    assert float(found.outputs) == 7.0
    assert float(_keras.variables.tf_variable(counter)) == 0.0
    stateless_call.assign(found.updates)
    assert float(_keras.variables.tf_variable(counter)) == 7.0


@needs_keras3(OUTSIDE)
def test_updates_in_a_loop_are_known_to_have_escaped() -> None:
    counter = keras.Variable(0.0)

    @tf.function
    def run() -> None:
        def body(index):
            counter.assign(counter + 1)
            return index + 1

        value = (counter, tf.convert_to_tensor(_keras.variables.tf_variable(counter)))
        loop = stateless_call.call(
            lambda: tf.while_loop(lambda i: i < 3, body, [0]), [value], capture=True
        )
        assert loop.escaped == [counter]

    run()


def test_losses_are_collected() -> None:
    layer = keras.layers.Dense(2, activity_regularizer="l2", kernel_initializer="ones")
    layer.build((None, 3))
    found = stateless_call.call(lambda: layer(X), [(layer.kernel, tf.zeros([3, 2]))])
    assert [float(x) for x in found.losses] == [0.0]


def test_what_was_read_is_known() -> None:
    layer, other = dense(), keras.Variable(0.0)
    found = stateless_call.call(lambda: layer(X), [(layer.kernel, tf.zeros([3, 2])), (other, X)])
    assert {id(layer.kernel), id(layer.bias)} <= set(found.read)
    assert id(other) not in found.read


class Rows(keras.layers.Layer):
    """A layer that updates rows of a table in its call."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method
        self.table = self.add_weight(shape=(4, 2), initializer="ones", trainable=False)

    def call(self, x):
        indices = tf.constant([3, 1])
        if self.method.startswith("scatter_nd_"):
            getattr(self.table, self.method)(indices[:, tf.newaxis], x)
        else:
            getattr(self.table, self.method)(tf.IndexedSlices(x, indices))
        return tf.identity(self.table)


@pytest.mark.skipif(not IS_KERAS_2, reason="a variable of Keras 3 has no such methods")
@pytest.mark.parametrize(
    "method",
    [
        *("scatter_update", "scatter_add", "scatter_sub", "scatter_min", "scatter_max"),
        *("scatter_nd_update", "scatter_nd_add", "scatter_nd_sub"),
    ],
)
def test_updates_by_rows(method: str) -> None:
    x = tf.constant([[2.0, -3.0], [5.0, 0.5]])
    layer, expected = Rows(method), Rows(method)(x)
    result = stateless_call.call(lambda: layer(x), [], capture=True)
    np.testing.assert_array_equal(result.outputs, expected)
    np.testing.assert_array_equal(layer.table, np.ones([4, 2]))
    ((variable, value),) = result.updates
    assert variable is layer.table
    np.testing.assert_array_equal(value, expected)


@pytest.mark.skipif(not IS_KERAS_2, reason="a variable of Keras 3 has no such methods")
def test_an_update_that_cannot_be_followed_is_an_error() -> None:
    with pytest.raises(NotImplementedError, match="by its method scatter_mul"):
        stateless_call.call(lambda: Rows("scatter_mul")(tf.ones([2, 2])), [], capture=True)
