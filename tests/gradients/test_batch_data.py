"""Arguments that are a batch, and arguments that are an error."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SOAK_ON_KERAS_2, once

from tfwd import gradients

pytestmark = SOAK_ON_KERAS_2

L = keras.layers
X = np.random.default_rng(0).normal(size=(3, 4)).astype("f")
Y = np.random.default_rng(1).normal(size=(3, 2)).astype("f")


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,)), L.Dense(2)])


def assert_same(one: gradients.Moments, two: gradients.Moments) -> None:
    for a, b in zip([*one.mean, *one.mean_square], [*two.mean, *two.mean_square], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_list_of_numbers_is_an_array(chunk_size: int | None) -> None:
    made = model()
    wanted = gradients.moments(made, X, Y, "mse", np.array([0.0, 1.0, 2.0]))
    given = gradients.moments(made, X, Y, "mse", [0, 1, 2], chunk_size=chunk_size)
    assert_same(given, wanted)
    loss = "sparse_categorical_crossentropy"
    ids = gradients.moments(made, X, np.array([0, 1, 1]), loss)
    assert_same(gradients.moments(made, X, [0, 1, 1], loss), ids)


def test_lists_of_numbers_in_a_dict_are_arrays() -> None:
    inputs = keras.Input((4,))
    made = keras.Model(inputs, {"a": L.Dense(2)(inputs), "b": L.Dense(2)(inputs)})
    y, weights = {"a": Y, "b": Y}, {"a": [0, 1, 2], "b": [1.0, 0.0, 0.0]}
    arrays = {name: np.array(values, "f") for name, values in weights.items()}
    wanted = gradients.moments(made, X, y, "mse", arrays)
    assert_same(gradients.moments(made, X, y, "mse", weights), wanted)


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: {"x": dataset()}, r"x is a _BatchDataset, .* next\(iter\(dataset\)\)"),
        (lambda: {"x": iter([X, X])}, r"x is a list_iterator, which yields batches"),
        (lambda: {"y": dataset()}, "y is a _BatchDataset, which yields batches"),
        (lambda: {"y": object()}, "y is, or contains, <object object .* which is not an array"),
        (lambda: {"sample_weight": [[0, 1], [1, 1], [1, 0]]}, r"the scalar 0. .* np.array\(...\)"),
        (lambda: {"x": X[:0], "y": Y[:0]}, "the batch has no examples"),
    ],
)
def test_arguments_that_are_no_batch(given: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gradients.moments(model(), **{"x": X, "y": Y, "loss": "mse", **given()})


class Scaled(L.Layer):
    """A layer without a rule, whose loss does not belong to an example."""

    def build(self, shape: Any) -> None:
        self.supports_masking = True
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(0.1 * tf.reduce_sum(self.scale**2))
        return x * self.scale


@pytest.mark.slow
@once
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_batch_that_turns_out_to_be_empty_has_moments_of_zero(chunk_size: int | None) -> None:
    """Checks that an empty batch has moments of zero.

    Computing on no examples, or on made-up ones, may give NaN or an error.
    """
    stack = [keras.Input((4,), dtype="int32"), L.Embedding(5, 3, mask_zero=True),
             Scaled(), L.GRU(3, return_sequences=True),
             L.Dense(2, kernel_regularizer="l2")]  # fmt: skip
    made = keras.Sequential(stack)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], "int32"), tf.TensorSpec([None, 4, 2])])
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(
            made, x, y, lambda y, p: tf.math.log(tf.abs(y)) + (y - p) ** 2, chunk_size=chunk_size
        )
        return moments.mean, moments.mean_square, moments.batch_size

    mean, squares, batch = run(tf.zeros([0, 4], "int32"), tf.zeros([0, 4, 2]))
    assert int(batch) == 0
    for moment in [*mean[:-2], mean[-1], *squares]:
        np.testing.assert_array_equal(moment, np.zeros(moment.shape))
    np.testing.assert_allclose(mean[-2], 0.02 * made.layers[-1].kernel, rtol=1e-5)
    ids, y = tf.constant([[1, 2, 0, 0], [4, 3, 2, 1], [1, 1, 1, 1]]), tf.random.normal([3, 4, 2])
    mean, squares, batch = run(ids, y)
    wanted = gradients.moments(made, ids, y, "mse")
    assert int(batch) == 3
    assert_same(wanted._replace(mean=mean, mean_square=squares), wanted)
