"""How often `predict_samples` traces a model."""

from __future__ import annotations

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from monte_carlo_tools import PERTURBED, predicted
from small_models import ALL, X

import tfwd
from tfwd import parametrizations as P


class Counting(keras.layers.Layer):
    """A layer that counts how often Python runs its call."""

    runs = 0

    def call(self, x):
        type(self).runs += 1
        return x


def counted_model() -> keras.Model:
    inputs = keras.Input((6,))
    outputs = keras.layers.Dense(2)(Counting()(inputs))
    return tfwd.parametrize(keras.Model(inputs, outputs), {"kernel": P.Dropout(0.5)}, seed=1)


@pytest.mark.parametrize(("batch_size", "traces"), [(8, 1), (4, 1), (3, 2), (5, 2), (100, 1)])
def test_the_model_is_traced_once_for_each_shape(batch_size: int, traces: int) -> None:
    model = counted_model()
    Counting.runs = 0
    parts = predicted(model, X, 4, batch_size, return_samples=True)
    assert Counting.runs == traces
    whole = predicted(model, X, 4, return_samples=True)
    for one, two in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    assert parts.mean.shape == (8, 2) and parts.samples.shape == (4, 8, 2)


def test_a_second_call_traces_nothing_until_the_model_changes() -> None:
    model = counted_model()
    predicted(model, X, 2)
    Counting.runs = 0
    one = predicted(model, X, 3)
    model.layers[-1].layer.kernel.assign(tf.ones((6, 2)))
    two = predicted(model, X, 3)
    assert Counting.runs == 0
    assert np.abs(one.mean - two.mean).max() > 0.01
    kernels = [model.layers[-1].effective_weights(sample)["kernel"] for sample in range(3)]
    by_numpy = np.stack([X @ kernel for kernel in kernels])
    np.testing.assert_allclose(two.mean, by_numpy.mean(0), rtol=1e-5, atol=1e-6)
    predicted(model, X, 2, training=True)
    predicted(model, X, 2)
    assert Counting.runs == 2
    model.layers[-1].trainable = False
    predicted(model, X, 2)
    assert Counting.runs == 3


def test_a_model_is_freed_although_it_was_traced() -> None:
    def used() -> list[weakref.ref]:
        models = [counted_model(), tfwd.parametrize(ALL["subclassed"](), PERTURBED, seed=3)]
        for training in (False, True):
            for model in models:
                predicted(model, X, 2, training=training)
        return [weakref.ref(model) for model in models]

    held = used()
    tfwd.release_models()
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_a_model_that_runs_eagerly_is_not_traced() -> None:
    model = counted_model()
    model.compile(run_eagerly=True)
    Counting.runs = 0
    found = predicted(model, X, 3, 4)
    assert Counting.runs == 6
    model.compile(run_eagerly=False)
    for one, two in zip(found[:2], predicted(model, X, 3)[:2], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
