"""Inputs of all kinds, structures of outputs, and the progress bar."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from monte_carlo_tools import PERTURBED, by_hand, check_moments, predicted
from small_models import ALL, X
from stack_marks import IS_KERAS_2

import tfwd
from tfwd import parametrizations as P


class Batches(keras.utils.PyDataset if not IS_KERAS_2 else keras.utils.Sequence):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int):
        rows = slice(3 * index, 3 * index + 3)
        return X[rows].numpy(), np.zeros((len(X[rows]), 2))


def test_kinds_of_inputs() -> None:
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    expected = predicted(model, X.numpy(), 3)
    dataset = tf.data.Dataset.from_tensor_slices(X)
    pairs = tf.data.Dataset.from_tensor_slices((X, tf.zeros(8), tf.ones(8)))
    for x in (
        X,
        X.numpy().astype("float64"),
        dataset.batch(3),
        pairs.batch(4),
        dataset.filter(lambda row: True).batch(3),  # of unknown length
        Batches(),
    ):
        found = predicted(model, x, 3)
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.stddev, expected.stddev, rtol=1e-5, atol=1e-6)
        assert found.samples is None


@pytest.mark.parametrize("structure", ["list", "dict"])
def test_several_inputs_and_outputs(structure: str) -> None:
    inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((), dtype="int32", name="b")}
    one = keras.layers.Dense(3, name="one")(inputs["a"])
    two = keras.layers.Embedding(5, 3, name="two")(inputs["b"])
    outputs = {"sum": one + two, "one": one}
    plain = keras.Model(inputs if structure == "dict" else list(inputs.values()), outputs)
    model = tfwd.parametrize(plain, {"one/.*": P.GaussianNoise(0.5)}, seed=1)
    x = {"a": np.asarray(X[:, :2]), "b": np.arange(8, dtype="int32") % 5}
    x = x if structure == "dict" else list(x.values())
    found = predicted(model, x, 3, 5, return_samples=True)
    expected = by_hand(model, plain, x, 3)
    assert set(found.mean) == set(found.stddev) == set(found.samples) == {"sum", "one"}
    check_moments(found, expected)


def test_a_progress_bar_counts_samples(capsys: pytest.CaptureFixture[str]) -> None:
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    for verbose in ("auto", 1, 2):
        predicted(model, X, 3, 4, verbose=verbose)
        assert "6/6" in capsys.readouterr().out
    unknown = tf.data.Dataset.from_tensor_slices(X).filter(lambda row: True).batch(4)
    predicted(model, unknown, 3, verbose=1)
    assert "6/" in capsys.readouterr().out
    predicted(model, X, 3, verbose=0)
    assert capsys.readouterr().out == ""
