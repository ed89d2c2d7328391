"""Examples to which rows belong, in hard cases: zero heads, functions, positions, fixed batches."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, general_method, per_example, randomized
from stack_marks import extended

from tfwd import gradients

L = keras.layers
MSE = keras.losses.MeanSquaredError()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype("f")


def time_first(last: L.Layer) -> keras.Model:
    inputs = keras.Input((8, 3))
    hidden = L.Dense(5, "tanh")(keras.ops.transpose(inputs, (1, 0, 2)))
    return keras.Model(inputs, last(keras.ops.transpose(hidden, (1, 0, 2))))


def test_head_that_begins_at_zero_hides_nothing() -> None:
    model = time_first(L.Dense(1, kernel_initializer="zeros"))
    x, y = normal(4, 8, 3), normal(4, 8, 1)
    first = gradients.moments(model, x, y, "mse")
    randomized(model)
    found = gradients.moments(model, x, y, "mse")  # by the zeros in the trial
    assert first.methods == found.methods == [general_method()] * 2 + ["dense"] * 2
    assert_moments(found, per_example(model, x, y, MSE), 1e-4)


@extended
@pytest.mark.parametrize("x", [normal(4, 8, 3) * [[[0]], [[0]], [[1]], [[1]]], normal(4, 8, 3)])
def test_inputs_of_zero_and_a_trial_inside_a_function(x: np.ndarray) -> None:
    model = randomized(time_first(L.Dense(1)))
    x, y = x.astype("f"), normal(4, 8, 1)
    methods = []

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 3]), tf.TensorSpec([None, 8, 1])])
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(model, x, y, "mse")
        methods.extend(moments.methods)
        return moments.mean, moments.mean_square

    rows = per_example(model, x, y, MSE)
    if x[0, 0, 0]:
        found = gradients.Moments(*run(x, y), methods, 4)
        assert found.methods[0] == "vectorized_map"
    else:
        found = gradients.moments(model, x, y, "mse")
    assert_moments(found, rows, 1e-4)


@extended
def test_positions_in_a_function_that_does_not_know_their_number() -> None:
    """Checks positions of unknown number in a function.

    The trial's made-up inputs may be longer than the table of positions.
    """

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = L.Embedding(10, 4), L.Embedding(6, 4)
            self.head = L.Dense(3)

        def call(self, ids: tf.Tensor) -> tf.Tensor:
            shape = tf.shape(ids)
            hidden = self.tokens(ids) + self.positions(tf.range(shape[1]))
            logits = self.head(tf.reshape(hidden, [-1, 4]))
            return tf.reshape(logits, [shape[0], shape[1], 3])

    model = Model()
    x, y = np.random.default_rng(0).integers(0, 10, (5, 6)).astype("int32"), normal(5, 6, 3)
    model(x)
    randomized(model)
    methods = []

    @tf.function(
        input_signature=[tf.TensorSpec([None, None], "int32"), tf.TensorSpec([None, None, 3])]
    )
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(model, x, y, "mse")
        methods.extend(moments.methods)
        return moments.mean, moments.mean_square

    found = gradients.Moments(*run(x, y), methods, 5)
    assert found.methods == ["embedding", "vectorized_map", "dense", "dense"]
    assert_moments(found, per_example(model, x, y, MSE), 1e-4)


def test_stateful_model_of_a_fixed_batch() -> None:
    lstm = L.LSTM(3, stateful=True)
    model = randomized(keras.Sequential([keras.Input(batch_shape=(3, 5, 2)), lstm, L.Dense(2)]))
    plain = keras.Sequential([keras.Input((5, 2)), L.LSTM(3), L.Dense(2)])
    plain.set_weights(model.get_weights())
    x, y = normal(3, 5, 2), normal(3, 2)
    found = gradients.moments(model, x, y, "mse")
    assert found.methods == ["lstm"] * 3 + ["dense"] * 2
    assert_moments(found, per_example(plain, x, y, MSE), 1e-4)


def test_normalization_that_the_model_calls_in_training_is_an_error() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = L.BatchNormalization(name="norm"), L.Dense(1)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.head(self.norm(x, training=True))

    with pytest.raises(ValueError, match="'norm' .* is called by the model with training=True"):
        gradients.moments(Model(), normal(4, 3), normal(4, 1), "mse")


def test_nan_is_no_dependence() -> None:
    x = normal(4, 3)
    x[0, 0] = np.nan
    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    found = gradients.moments(model, x, normal(4, 2), "mse")
    assert found.methods == ["dense"] * 2
    assert np.isnan(found.mean[0]).any()
