"""Weights without a rule are computed the general way, or raise an error."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, general, per_example, randomized, rewinding
from stack_marks import SLOW_ON_KERAS_2, extended, once, quick_rows

from tfwd import _keras, gradients

pytestmark = SLOW_ON_KERAS_2

L = keras.layers


@pytest.fixture(autouse=True)
def float64() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


class Scale(L.Layer):
    """A custom layer without a rule."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.sin(x * self.scale)


class Own(keras.Model):
    """A model that uses its layers' weights in its own ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.way = L.Dense(3, "tanh"), L.Dense(2), way

    def call(self, x: tf.Tensor) -> tf.Tensor:
        if self.way == "merged":
            return tf.reshape(self.second(self.first(tf.reshape(x, [-1, 3]))), [-1, 4, 2])
        plain = self.second(self.first(x))
        if self.way == "kernel":
            return plain + tf.matmul(x, self.first.kernel)[..., :2]
        if self.way == "past_keras":
            return plain + tf.matmul(x, _keras.variables.tf_variable(self.first.kernel))[..., :2]
        if self.way == "time_first":
            x = tf.transpose(x, [1, 0, 2])
            return plain + tf.transpose(self.second(self.first(x)), [1, 0, 2])
        if self.way == "function":
            return tf.function(lambda x: self.second(self.first(x)))(x)
        return self.second(self.first(x - tf.reduce_mean(x, 0)))


def data(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=shape), random.normal(size=(*shape[:-1], 2))


def test_model_whose_only_layer_is_a_users_own() -> None:
    model = keras.Sequential([keras.Input((2,)), Scale()])
    x, y = data(5, 2)
    moments = gradients.moments(model, x, y, "mse")
    assert moments.methods == ["vectorized_map"]
    assert_moments(moments, per_example(model, x, y))


@extended
@once
@pytest.mark.parametrize(
    ("batch", "inside"), [pytest.param(None, True, marks=pytest.mark.slow), (5, False)]
)
def test_users_layer_beside_a_loop_in_a_function(batch: int | None, inside: bool) -> None:
    """Checks a custom layer beside a recurrent layer in a function.

    vectorized_map of a recurrent layer is traced without an error, and fails when it runs.
    """

    class Around(L.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gru = L.GRU(2, return_sequences=True)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.function(lambda x: self.gru(x))(x) if inside else self.gru(x)

    stack = [keras.Input((3, 2), dtype="float64"), Around(), Scale(), L.Dense(2)]
    model = randomized(keras.Sequential(stack))
    x, y = data(5, 3, 2)

    @tf.function(input_signature=[tf.TensorSpec([batch, 3, 2], tf.float64)] * 2)
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(model, x, y, "mse")
        methods.extend(moments.methods)
        return moments.mean, moments.mean_square

    methods: list[str] = []
    found = run(x, y)
    assert methods == [*["loop" if inside else "gru"] * 3, "loop", "dense", "dense"]
    moments = gradients.Moments(*found, methods, 5)
    assert_moments(moments, per_example(model, x, y))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_users_layer_among_others(chunk_size: int | None) -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(4), Scale(), L.Dense(2)])
    x, y = data(5, 3)
    moments = gradients.moments(randomized(model), x, y, "mse", chunk_size=chunk_size)
    assert moments.methods == ["dense", "dense", "vectorized_map", "dense", "dense"]
    assert_moments(moments, per_example(model, x, y))


@quick_rows("kernel-*", "past_keras-*", "time_first-*", "merged-*")
@pytest.mark.parametrize(
    ("way", "slow"),
    [
        ("kernel", [True, False, False, False]),
        ("past_keras", [True, False, False, False]),
        ("time_first", [True, True, True, True]),
        ("function", [True, True, True, True]),
        ("merged", [False, False, False, False]),
    ],
)
def test_weights_that_are_used_elsewhere(way: str, slow: list[bool]) -> None:
    model = Own(way)
    x, y = data(4, 4, 3)
    model(x)
    moments = gradients.moments(model, x, y, "mse")
    assert [m in ("vectorized_map", "loop") for m in moments.methods] == slow
    assert_moments(moments, per_example(model, x, y))


def test_traced_layers_of_a_user_are_left_as_they_are() -> None:
    model = Own("merged")
    x, y = data(4, 4, 3)
    model(x)
    call = tf.function(lambda x: model.second(model.first(x)))
    model.call = lambda x, training=None: call(x)
    gradients.moments(model, x, y, "mse")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(call(x))
    assert tape.gradient(loss, _keras.variables.tf_variable(model.first.kernel)) is not None


def test_loop_where_vectorized_map_fails() -> None:
    class Counts(L.Layer):
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            # vectorized_map knows no strings.
            text = tf.strings.as_string(tf.stop_gradient(x))
            return self.scale * x * tf.strings.to_number(text, x.dtype)

    model = keras.Sequential([keras.Input((2,)), Counts()])
    x, y = np.round(data(3, 2), 3)
    moments = gradients.moments(model, x, y, "mse")
    assert_moments(moments, per_example(model, x, y), 1e-5)
    assert general(moments)


def test_random_layers_see_one_draw() -> None:
    """Checks that a weight without a rule is computed under the same masks as the rules."""
    twin = L.Dense(3, "tanh", name="twin")
    model = keras.Sequential([keras.Input((3,)), Scale(), twin, L.Dropout(0.5, seed=1), L.Dense(2)])
    x, y = data(6, 3)
    rewind = rewinding(model)
    moments = gradients.moments(model, x, y, "mse", training=True)
    assert moments.methods[0] == "backward_each" and moments.methods[1] == "dense"
    rewind()
    with tf.GradientTape(persistent=True) as tape:
        losses = tf.unstack(tf.reduce_mean((model(x, training=True) - y) ** 2, -1))
    sources = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    rows = [tape.gradient(loss, sources) for loss in losses]
    assert_moments(moments, [np.stack(parts) for parts in zip(*rows, strict=True)])


def test_batch_normalization_in_training_is_an_error_before_any_work() -> None:
    model = keras.Sequential([keras.Input((3,)), L.Dense(2), L.BatchNormalization(name="norm")])
    x, y = data(4, 3)
    before = [v.numpy() for v in model.variables]
    with pytest.raises(ValueError, match="layer 'norm' .* normalizes over the batch in training"):
        gradients.moments(model, x, y, "mse", training=True)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    moments = gradients.moments(model, x, y, "mse")
    assert_moments(moments, per_example(model, x, y))
    model.layers[-1].trainable = False
    gradients.moments(model, x, y, "mse", training=True)


@pytest.mark.parametrize("traced", [False, True])
def test_examples_that_depend_on_each_other_are_an_error(traced: bool) -> None:
    model = Own("mixed")
    x, y = data(4, 4, 3)
    model(x)

    def run(x: Any, y: Any) -> Any:
        return gradients.moments(model, x, y, "mse").mean

    with pytest.raises(ValueError, match="its examples depend on each other"):
        (tf.function(run) if traced else run)(tf.constant(x), tf.constant(y))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"loss": lambda y, p: tf.reduce_mean((y - p) ** 2)}, "one number for the whole batch"),
        ({"loss": None}, "loss is None"),
        ({"loss": "no such"}, "is not a Keras loss, its name or a function"),
        ({"y": np.zeros((3, 2))}, "the numbers of examples differ: 4 in x, 3 in y"),
        ({"x": np.zeros((0, 3)), "y": np.zeros((0, 2))}, "no examples"),
        ({"chunk_size": 0}, "chunk_size must be None or an int of at least 1, got 0"),
        ({"training": "yes"}, "training must be True or False, got 'yes'"),
        ({"model": "model"}, "expected a Keras model, got 'model'"),
    ],
)
def test_wrong_arguments(arguments: dict, message: str) -> None:
    x, y = data(4, 3)
    model = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    given = {"model": model, "x": x, "y": y, "loss": "mse", **arguments}
    with pytest.raises(ValueError, match=message):
        gradients.moments(**given)


def test_rule_with_gradients_of_a_wrong_shape_is_named() -> None:
    class Wrong(Scale):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return super().call(x)

    @gradients.rule(Wrong)
    def bad(layer: Any, call: gradients.Call, x: tf.Tensor) -> tf.Tensor:
        y = call.probe(tf.sin(x * call.value(layer.scale)))
        call.use(layer.scale, y, lambda d: gradients.Materialized(d[:, :1]))
        return y

    x, y = data(4, 2)
    model = keras.Sequential([keras.Input((2,)), Wrong()])
    with pytest.raises(ValueError, match=r"rule 'bad' gives gradients of shape \(1,\)"):
        gradients.moments(model, x, y, "mse")


def test_rule_is_for_layer_classes() -> None:
    with pytest.raises(ValueError, match="expects Keras layer classes, got 3"):
        gradients.rule(3)


class Einsum(L.Layer):
    """A batched product. vectorized_map of it can end the process."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 16))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return keras.ops.einsum("abc,cd->abd", x, self.kernel)


def test_batched_products_go_one_by_one() -> None:
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    model = keras.Sequential([keras.Input((7, 16)), Einsum(), L.Dense(5)])
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(6, 7, n)).astype("float32") for n in (16, 5))
    for _ in range(3):
        moments = gradients.moments(model, x, y, "mse")
    # Keras 2's product is TensorFlow's einsum, an operation that does not count as a product.
    slow = "vectorized_map" if _keras.IS_KERAS_2 else "loop"
    assert moments.methods == [slow, "dense", "dense"]
    total = tf.zeros_like(moments.mean_square[0])
    for b in range(6):
        alone = gradients.moments(model, x[b : b + 1], y[b : b + 1], "mse")
        total += alone.mean[0] ** 2 / 6
    np.testing.assert_allclose(moments.mean_square[0], total, rtol=1e-4, atol=1e-7)
