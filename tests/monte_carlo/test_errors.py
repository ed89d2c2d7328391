"""Errors of `predict_samples`, and the model after an error."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from monte_carlo_tools import PERTURBED, predicted, wrappers
from small_models import ALL, X
from stack_marks import needs_keras3

import tfwd
from tfwd import layers
from tfwd import parametrizations as P


class Failing(keras.layers.Layer):
    def call(self, x, training=False):
        tf.debugging.assert_less(tf.reduce_max(x), 1000.0)
        return x


def test_an_error_leaves_the_model_as_it_was() -> None:
    inputs = keras.Input((6,))
    plain = keras.Model(inputs, Failing()(keras.layers.Dense(2)(inputs)))
    model = tfwd.parametrize(plain, {"kernel": P.Mixout(0.5)}, seed=1)
    before = [np.asarray(v) for v in model.variables]
    x = np.concatenate([X, np.full((8, 6), 1e9, "float32")])
    with pytest.raises(tf.errors.InvalidArgumentError):
        predicted(model, x, 3, 8)
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)
    (wrapper,) = wrappers(model)
    assert wrapper.calls == 0
    assert not any(bool(taken) for taken in wrapper.references.taken())


class PastKeras(keras.layers.Layer):
    """A layer that reads a weight in a way that no substitution can reach."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(name="kernel", shape=(6, 2))
        held = getattr(self.kernel, "value", None)
        self.past = lambda: held

    def call(self, x):
        return x @ tf.convert_to_tensor(self.past())


@needs_keras3("variable that is not a layer's attribute")
def test_a_weight_that_is_read_past_keras_is_an_error() -> None:
    layer = PastKeras(name="past")
    model = keras.Sequential([keras.Input((6,)), layers.WeightDropout(layer, 0.5)])
    with pytest.raises(ValueError, match="reads its weight 'kernel' without Keras"):
        predicted(model, X, 2)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n=0: expected an integer of at least 1"),
        ({"n": 2.0}, "n=2.0: expected an integer"),
        ({"n": True}, "n=True: expected an integer"),
        ({"batch_size": 0}, "batch_size=0: expected an integer of at least 1"),
        ({"batch_size": "8"}, "batch_size='8': expected an integer"),
        ({"x": np.zeros((0, 6))}, "x has no examples"),
        ({"x": []}, "x is empty"),
        ({"x": [np.zeros((3, 6)), np.zeros((4, 6))]}, "3 and with 4 examples"),
        ({"x": np.float32(1.0)}, "has no axis of examples"),
        ({"x": tf.data.Dataset.from_tensor_slices(X).batch(4), "batch_size": 4},
         "batch_size=4: expected None, because a .*Dataset yields batches"),
        ({"x": tf.data.Dataset.from_tensor_slices(X).batch(4).repeat()}, "infinite .*take"),
        ({"x": tf.data.Dataset.from_tensor_slices(X[:0]).batch(4)}, "x has no batches"),
        ({"x": iter([X])}, "x is a list_iterator: expected arrays or a dataset"),
        ({"x": tf.sparse.from_dense(X)}, "x has a SparseTensor.*pass a dataset"),
        ({"verbose": 3}, "verbose=3: expected 0, 1, 2 or 'auto'"),
    ],
)  # fmt: skip
def test_wrong_arguments(model: keras.Model, arguments: dict, message: str) -> None:
    before = [np.asarray(v) for v in model.variables]
    with pytest.raises(ValueError, match=message):
        predicted(**{"model": model, "x": X, "n": 2, **arguments})
    for old, new in zip(before, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ALL["sequential"](), "has no parametrized weights, so .*tfwd.parametrize"),
        (
            lambda: layers.Parametrized(keras.layers.Dense(2), P.WeightNorm()),
            "has no weights yet|only parametrizations that draw nothing",
        ),
        (lambda: layers.WeightDropout(keras.layers.Dense(2, name="d"), 0.5), "'d' has no weights"),
        (lambda: "model", "expected a Keras model, got 'model' of type str"),
    ],
)
def test_models_that_cannot_be_sampled(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predicted(make(), X, 2)


def test_a_deterministic_parametrization_alone_is_an_error() -> None:
    layer = layers.Parametrized(keras.layers.Dense(2), P.WeightNorm())
    layer.build((None, 6))
    with pytest.raises(ValueError, match="only parametrizations that draw nothing"):
        predicted(layer, X, 2)


def test_outputs_that_have_no_moments() -> None:
    class Odd(keras.layers.Layer):
        kind = "ragged"

        def call(self, x):
            kinds = {
                "ragged": lambda: tf.RaggedTensor.from_tensor(x),
                "text": lambda: tf.strings.as_string(x),
                "scalar": lambda: tf.reduce_sum(x),
            }
            return kinds[self.kind]()

    layer = layers.WeightDropout(keras.layers.Dense(2), 0.5, seed=1)
    layer.build((None, 6))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense, self.odd = layer, Odd()
            self.built = True

        def call(self, x):
            return self.odd(self.dense(x))

    for kind, message in (("ragged", "RaggedTensor"), ("text", "string"), ("scalar", r"\(\)")):
        model, Odd.kind = Model(), kind
        with pytest.raises(ValueError, match=f"the model returns a .*{message}.*dense tensors"):
            predicted(model, X, 2)


def test_batches_whose_outputs_differ_in_shape() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(2), 0.5, seed=1)
    layer.build((None, None, 3))
    batches = [np.zeros((2, length, 3), "float32") for length in (4, 5)]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=tf.TensorSpec((None, None, 3), tf.float32)
    )
    with pytest.raises(ValueError, match=r"differ in shape: \(4, 2\) and \(5, 2\).*Pad"):
        predicted(layer, dataset, 2)


def test_inside_a_function_it_says_where_to_call_it(model: keras.Model) -> None:
    with pytest.raises(RuntimeError, match="inside a tf.function.*call it outside"):
        tf.function(lambda: predicted(model, X, 2))()
