"""Mean and deviation: their dtypes, their exactness and what they store."""

from __future__ import annotations

import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from monte_carlo_tools import PERTURBED, predicted
from small_models import ALL, X

import tfwd
from tfwd import layers
from tfwd import parametrizations as P
from tfwd.monte_carlo import prediction


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16"), ("float64", "float64")],
)
def test_dtypes(policy: str, dtype: str) -> None:
    dense = keras.layers.Dense(2, dtype=policy)
    model = keras.Sequential([keras.Input((6,)), layers.WeightDropout(dense, 0.5, seed=1)])
    found = predicted(model, X, 5, return_samples=True)
    wide = "float64" if dtype == "float64" else "float32"
    assert [found.mean.dtype, found.stddev.dtype] == [wide, wide]
    assert found.samples.dtype.name == dtype
    exact = found.samples.astype("float64")
    np.testing.assert_allclose(found.mean, exact.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.stddev, exact.std(0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("return_samples", [False, True])
def test_outputs_are_kept_only_on_request(monkeypatch, return_samples: bool) -> None:
    """Counts the outputs that are alive whenever a sample is predicted."""
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    made: list[weakref.ref] = []
    alive: list[int] = []
    own = prediction.dense

    def dense(output: tf.Tensor) -> np.ndarray:
        alive.append(sum(one() is not None for one in made))
        found = own(output).copy()
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(prediction, "dense", dense)
    predicted(model, X, 20, 4, return_samples=return_samples)
    assert len(made) == 40
    assert max(alive) >= 19 if return_samples else max(alive) <= 2


def test_sums_stay_exact_far_from_zero() -> None:
    inputs = keras.Input((6,))
    shifted = keras.layers.Dense(2, name="dense")(inputs) + 1000.0
    model = tfwd.parametrize(keras.Model(inputs, shifted), {"kernel": P.GaussianNoise(0.01)})
    found = predicted(model, X, 50, return_samples=True)
    np.testing.assert_allclose(
        found.stddev, found.samples.astype("float64").std(0), rtol=1e-4, atol=1e-7
    )


def test_whole_numbers_and_one_sample() -> None:
    class Chosen(keras.layers.Layer):
        def call(self, x):
            return tf.argmax(x, -1), x > 0

        def compute_output_shape(self, shape):
            return shape[:-1], shape

    inputs = keras.Input((6,))
    outputs = Chosen(dtype="float32")(keras.layers.Dense(3)(inputs))
    model = tfwd.parametrize(keras.Model(inputs, outputs), {"kernel": P.Dropout(0.5)}, seed=1)
    (mean, shares), _, (samples, signs) = predicted(model, X, 1, return_samples=True)
    assert (samples.dtype, signs.dtype, mean.dtype) == (np.int64, np.bool_, np.float32)
    np.testing.assert_array_equal(samples[0], mean)
    np.testing.assert_array_equal(signs[0], shares)
    assert predicted(model, X, 1).stddev[1].max() == 0.0
