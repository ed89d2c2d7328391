"""The trial that finds the examples of each row: weights that it cannot decide have no rule."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, general, general_method, per_example, randomized
from stack_marks import SOAK_ON_KERAS_2

from tfwd import gradients

pytestmark = SOAK_ON_KERAS_2

L = keras.layers


@pytest.fixture(autouse=True)
def float64() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape)


class Mixes(L.Layer):
    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x - tf.reduce_mean(x, 0)


def time_first(head: Any = None, length: int = 8) -> keras.Model:
    inputs = keras.Input((length, 3))
    hidden = L.Dense(5, "tanh", use_bias=False)(keras.ops.transpose(inputs, (1, 0, 2)))
    return keras.Model(inputs, (head or L.Dense(1))(keras.ops.transpose(hidden, (1, 0, 2))))


def test_zeros_in_the_weights_hide_nothing() -> None:
    model = time_first(L.Dense(1, kernel_initializer="zeros"))
    x, y = normal(4, 8, 3), normal(4, 8, 1)
    gradients.moments(model, x, y, "mse")  # the result of the trial is kept
    moments = gradients.moments(randomized(model), x, y, "mse")
    assert moments.methods == [general_method(), "dense", "dense"]
    assert_moments(moments, per_example(model, x, y))


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_zeros_and_nans_in_the_first_examples_hide_nothing(value: float) -> None:
    model, x, y = time_first(), normal(4, 8, 3), normal(4, 8, 1)
    hiding = x.copy()
    hiding[:2] = value
    methods = gradients.moments(model, hiding, y, "mse").methods
    assert methods == [general_method(), "dense", "dense"]
    assert_moments(gradients.moments(model, x, y, "mse"), per_example(model, x, y))


def test_one_time_step_of_all() -> None:
    """Checks that the gradients of the first and the second example arrive at their own rows."""
    head = keras.Sequential([L.Lambda(lambda h: h[:, 0]), L.Dense(2)])
    model, x, y = time_first(head), normal(4, 8, 3), normal(4, 2)
    moments = gradients.moments(model, x, y, "mse")
    assert moments.methods == [general_method(), "dense", "dense"]
    assert_moments(moments, per_example(model, x, y))


def test_a_weight_at_which_nothing_arrives_goes_the_general_way() -> None:
    class Off(L.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.sin(x) * 0

    inputs = keras.Input((3,))
    model = keras.Model(inputs, L.Dense(2)(inputs) + Off()(L.Dense(2)(inputs)))
    moments = gradients.moments(model, normal(4, 3), normal(4, 2), "mse")
    assert sorted(moments.methods) == ["dense", "dense", "vectorized_map", "vectorized_map"]


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_use_in_a_function_that_was_traced_before(batch: int) -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = L.Dense(3, use_bias=False)
            self.dense.build((None, 5, 3))
            self.traced = tf.function(lambda x: self.dense(x))

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.traced(x)[:, 0] + self.dense(2 * x)[:, 0]

    model, x, y = Own(), normal(batch, 5, 3), normal(batch, 3)
    model(x)
    found = model.traced(x).numpy()
    moments = gradients.moments(model, x, y, "mse")
    assert general(moments)
    assert_moments(moments, per_example(model, x, y))
    for count in (1, 2, batch):  # traced functions still compute with the weights
        np.testing.assert_allclose(model.traced(x[:count]), found[:count])


def test_a_use_that_no_read_shows() -> None:
    """Checks a layer that Keras builds inside the function, when its first shape is unknown."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = L.Dense(3, use_bias=False)
            self.traced = tf.function(lambda x: self.dense(x))

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.traced(x)[:, 0] + self.dense(2 * x)[:, 0]

    model, x, y = Own(), normal(4, 5, 3), normal(4, 3)
    model(x)
    moments = gradients.moments(model, x, y, "mse")
    assert_moments(moments, per_example(model, x, y))


class Positions(keras.Model):
    """A table of six positions, and rows that are made of all examples' positions."""

    def __init__(self, length: int | None = None) -> None:
        super().__init__()
        self.ids, self.places, self.dense = L.Embedding(10, 4), L.Embedding(6, 4), L.Dense(3)
        self.length = length

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        if self.length is not None:
            tf.debugging.assert_equal(tf.shape(ids)[1], self.length)
        hidden = self.ids(ids) + self.places(tf.range(tf.shape(ids)[1]))
        batch, length = tf.unstack(tf.shape(hidden)[:2])
        return tf.reshape(self.dense(tf.reshape(hidden, [-1, 4])), [batch, length, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "methods"),
    [
        (None, ["embedding", "vectorized_map", "dense", "dense"]),
        (6, ["vectorized_map"] * 4),  # no made-up length is right
    ],
)
def test_unknown_axes_in_a_function(length: int | None, methods: list[str]) -> None:
    model, ids = Positions(length), np.random.default_rng(0).integers(0, 10, (5, 6))
    model(ids)
    seen = []

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)] * 2)
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(randomized_model, x, y, loss)
        seen[:] = moments.methods
        return moments.mean, moments.mean_square

    randomized_model = randomized(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    found = gradients.Moments(*run(ids, ids % 3), seen, 5)
    assert seen == methods
    assert_moments(found, per_example(model, ids, ids % 3, loss), 1e-6)


def test_the_trial_inside_a_function_sees_gradients() -> None:
    model, x, y = time_first(), normal(4, 8, 3), normal(4, 8, 1)
    seen = []

    @tf.function
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(model, x, y, "mse")
        seen[:] = moments.methods
        return moments.mean, moments.mean_square

    found = gradients.Moments(*run(x, y), seen, 4)
    assert seen == [general_method(), "dense", "dense"]
    assert_moments(found, per_example(model, x, y))


class Normalizes(keras.Model):
    """BatchNormalization in training, whatever the training flag says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = L.Dense(4), L.BatchNormalization(), L.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.last(self.norm(self.first(x), training=True))


def dropped() -> keras.Model:
    return keras.Sequential([L.Dense(4), Mixes(), L.Dropout(0.5), L.Dense(1)])


def of_ids() -> keras.Model:
    stack = [L.Rescaling(1.0), L.Embedding(9, 4), Mixes(), L.Dropout(0.5), L.Flatten(), L.Dense(1)]
    return keras.Sequential(stack)


class Noisy(L.Layer):
    """A layer that draws without Keras's generators."""

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype) if training else x


def noisy() -> keras.Model:
    return keras.Sequential([L.Dense(4), Mixes(), Noisy(), L.Dense(1)])


@pytest.mark.parametrize("make", [Normalizes, dropped, of_ids, noisy])
def test_dependent_examples_are_an_error_where_something_is_random(make: Callable) -> None:
    model = make()
    x = np.arange(18).reshape(6, 3) % 9 if make is of_ids else normal(6, 3)
    model(x)
    before = [v.numpy() for v in model.variables]
    with pytest.raises(ValueError, match="its examples depend on each other"):
        gradients.moments(model, x, normal(6, 1), "mse", training=make is not Normalizes)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_nan_is_no_dependence() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4), L.Dense(2)])
    x, y = normal(4, 3), normal(4, 2)
    x[1, 0] = np.nan
    assert gradients.moments(model, x, y, "mse").methods == ["dense"] * 4
    model.layers[0].bias.assign([0.0, np.nan, 0.0, 0.0])
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    assert gradients.moments(other, x, y, "mse").methods == ["dense"] * 4


def test_noise_of_a_layers_own_is_no_dependence() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4), Noisy(), L.Dense(2)])
    moments = gradients.moments(model, normal(4, 3), normal(4, 2), "mse", training=True)
    assert moments.methods == ["dense"] * 4


class OwnLoop(L.LSTM):
    """A custom loop: Keras 3 calls it for its loop, and Keras 2 before it."""

    def inner_loop(self, sequences: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().inner_loop(2 * sequences, *args, **kwargs)

    def _process_inputs(self, sequences: tf.Tensor, *args: Any) -> Any:
        return super()._process_inputs(2 * sequences, *args)


class Standardized(L.Conv1D):
    def convolution_op(self, inputs: tf.Tensor, kernel: Any) -> tf.Tensor:
        return super().convolution_op(inputs, kernel - keras.ops.mean(kernel))


@pytest.mark.parametrize("layer", [lambda: OwnLoop(3), lambda: Standardized(3, 2)])
def test_subclasses_that_override_what_call_uses(layer: Callable) -> None:
    model = keras.Sequential([keras.Input((2, 3)), layer(), L.Flatten(), L.Dense(2)])
    x, y = normal(4, 2, 3), normal(4, 2)
    moments = gradients.moments(model, x, y, "mse")
    count = len(model.layers[0].trainable_variables)
    assert set(moments.methods[:count]) <= {"vectorized_map", "loop"}
    assert moments.methods[count:] == ["dense"] * 2
    assert_moments(moments, per_example(model, x, y))


def test_a_rule_that_computes_something_else_is_not_used() -> None:
    class Scale(L.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.sin(x * self.scale)

    @gradients.rule(Scale)
    def wrong(layer: Any, call: gradients.Call, x: tf.Tensor) -> tf.Tensor:
        y = call.probe(x * call.value(layer.scale))
        call.use(layer.scale, y, lambda d: gradients.Materialized(x * d))
        return y

    model = keras.Sequential([keras.Input((2,)), Scale()])
    x, y = normal(4, 2), normal(4, 2)
    moments = gradients.moments(model, x, y, "mse")
    assert moments.methods == ["vectorized_map"]
    assert_moments(moments, per_example(model, x, y))


def test_a_stateful_layer_is_tried_on_the_whole_batch() -> None:
    layer = L.LSTM(3, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), layer, L.Dense(2)])
    x, y = normal(4, 5, 3), normal(4, 2)
    moments = gradients.moments(model, x, y, "mse")
    assert moments.methods == ["lstm"] * 3 + ["dense"] * 2
    plain = keras.Sequential([keras.Input((5, 3)), L.LSTM(3), L.Dense(2)])
    plain.set_weights([v.numpy() for v in model.trainable_variables])
    assert_moments(moments, per_example(plain, x, y))
    np.testing.assert_allclose(layer.states[0], plain.layers[0](x))  # called once


class Penalty(L.Layer):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.own = own

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(4,), initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.1 * (tf.reduce_mean(x**2, -1) if self.own else self.scale**2))
        return x * self.scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "chunk_size"), [(1, None), (4, None), (4, 1), (4, 3), (6, None), (6, 4)]
)
def test_a_vector_that_is_as_long_as_the_batch(batch: int, chunk_size: int | None) -> None:
    """Checks a vector as long as the batch.

    Its squares are added to `mean`, whatever its length. An example's own squares go into both.
    """
    x, y = normal(batch, 4), normal(batch, 2)
    vector = keras.Sequential([keras.Input((4,)), Penalty(own=False), L.Dense(2)])
    moments = gradients.moments(vector, x, y, "mse", chunk_size=chunk_size)
    rows = per_example(vector, x, y)
    rows[0] = rows[0] + 0.2
    np.testing.assert_allclose(moments.mean[0], rows[0].mean(0))
    np.testing.assert_allclose(moments.mean_square[0], ((rows[0] - 0.2) ** 2).mean(0))
    own = keras.Sequential([keras.Input((4,)), L.Dense(4), Penalty(own=True), L.Dense(2)])

    def loss(target: Any, output: Any) -> tf.Tensor:
        extra = tf.add_n([tf.reduce_sum(added) for added in own.losses])
        return tf.reduce_mean((output - target) ** 2) + batch * extra

    moments = gradients.moments(own, x, y, "mse", chunk_size=chunk_size)
    assert_moments(moments, per_example(own, x, y, loss))
