"""`unwrap`: the plain model again, for every kind of model."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import ALL, DROPPED, X, each, nested, sequential

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P


@each
def test_unwrap_is_the_way_back(kind: str, tmp_path: Path) -> None:
    model = ALL[kind]()
    dropped = tfwd.parametrize(model, DROPPED, seed=1)
    plain = tfwd.unwrap(dropped)
    assert type(plain) is type(model)
    assert not [
        layer for layer in _keras.layers.all_layers(plain) if "tfwd" in type(layer).__module__
    ]
    assert [id(w) for w in plain.weights] == [id(w) for w in model.weights]
    for found, expected in zip(tf.nest.flatten(plain(X)), tf.nest.flatten(model(X)), strict=True):
        np.testing.assert_array_equal(found, expected)
    # Both read what the other writes.
    model.save_weights(tmp_path / "model.weights.h5")
    values = model.get_weights()
    plain.set_weights([0 * value for value in values])
    plain.load_weights(tmp_path / "model.weights.h5")
    for one, other in zip(values, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.load_weights(tmp_path / "plain.weights.h5")


@each
def test_an_unwrapped_model_is_saved_and_exported_without_tfwd(kind: str, tmp_path: Path) -> None:
    plain = tfwd.unwrap(tfwd.parametrize(ALL[kind](), DROPPED, seed=1))
    plain.save(tmp_path / "plain.keras")
    config = keras.saving.serialize_keras_object(plain)
    assert "tfwd" not in repr(config)
    other = keras.saving.load_model(tmp_path / "plain.keras")
    for found, expected in zip(tf.nest.flatten(other(X)), tf.nest.flatten(plain(X)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_unwrap_of_what_holds_nothing_of_tfwd_is_the_same_object() -> None:
    model = nested()
    assert tfwd.unwrap(model) is model


def test_unwrap_gives_the_plain_layers_for_tfwds_own() -> None:
    embedding = layers.DropoutEmbedding(9, 4, 0.5)
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            embedding,
            layers.LockedDropout(0.3),
            layers.WeightDropLSTM(4, return_sequences=True),
            layers.WeightDropout(
                layers.VariationalNoise(keras.layers.Dense(4, name="dense"), 0.1), 0.5
            ),
            keras.layers.Bidirectional(
                layers.WeightDropLSTM(2, return_sequences=True), name="both"
            ),
            layers.TiedDense(embedding),
        ]
    )
    plain = tfwd.unwrap(model)
    kinds = [type(layer).__name__ for layer in plain.layers]
    assert kinds == [
        "Embedding",
        "SpatialDropout1D",
        "LSTM",
        "Dense",
        "Bidirectional",
        "EinsumDense",
    ]
    assert type(plain.layers[4].forward_layer) is keras.layers.LSTM
    assert type(plain.layers[4].backward_layer) is keras.layers.LSTM
    assert {id(w) for w in plain.weights} == {id(w) for w in model.weights}
    ids = tf.constant([[1, 2, 3, 4, 0]])
    np.testing.assert_allclose(plain(ids), model(ids), rtol=1e-5, atol=1e-9)
    np.testing.assert_array_equal(plain(ids, training=False), plain(ids))
    plain(ids, training=True)
    assert "tfwd" not in repr(keras.saving.serialize_keras_object(plain))


def test_unwrap_of_what_acts_in_evaluation_is_an_error() -> None:
    model = tfwd.parametrize(sequential(), {"kernel": P.WeightNorm()})
    with pytest.raises(ValueError, match="WeightNorm.* in evaluation"):
        tfwd.unwrap(model)


def test_unwrap_of_a_subclassed_model_that_holds_wrappers() -> None:
    class Holder(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = layers.WeightDropout(keras.layers.Dense(4), 0.5)
            self.many = [layers.WeightDropout(keras.layers.Dense(4), 0.5) for _ in range(2)]
            self.named = {"out": layers.VariationalNoise(keras.layers.Dense(2), 0.1)}

        def call(self, x):
            for layer in (self.first, *self.many, self.named["out"]):
                x = layer(x)
            return x

    model = Holder()
    expected = model(X)
    plain = tfwd.unwrap(model)
    assert type(plain.first) is keras.layers.Dense
    assert [type(layer) for layer in plain.many] == [keras.layers.Dense] * 2
    assert type(plain.named["out"]) is keras.layers.Dense
    np.testing.assert_array_equal(plain(X, training=True), expected)
    assert [id(w) for w in plain.weights] == [id(w) for w in model.weights]
    assert type(model.first) is layers.WeightDropout


@pytest.mark.parametrize("head_first", [True, False])
def test_unwrap_of_a_tied_head_wherever_it_stands(head_first: bool) -> None:
    class Tied(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            embedding = layers.DropoutEmbedding(9, 4, 0.5, seed=1)
            if head_first:
                self.head = layers.TiedDense(embedding, bias_initializer="ones")
                self.embedding = embedding
            else:
                self.embedding = embedding
                self.head = layers.TiedDense(embedding, bias_initializer="ones")

        def call(self, ids):
            return self.head(self.embedding(ids))

    model, ids = Tied(), tf.constant([[1, 2, 3]])
    model(ids, training=True)
    plain = tfwd.unwrap(model)
    kinds = {"head": keras.layers.EinsumDense, "embedding": keras.layers.Embedding}
    assert {name: type(getattr(plain, name)) for name in kinds} == kinds
    assert sorted(map(id, plain.weights)) == sorted(map(id, model.weights))
    matrix = np.asarray(model.embedding.embeddings)
    expected = matrix[ids.numpy()] @ matrix.T + 1
    np.testing.assert_allclose(plain(ids, training=True), expected, rtol=1e-5)
    # One matrix: what one of the two writes, all of them read.
    model.embedding.embeddings.assign(2 * matrix)
    np.testing.assert_allclose(plain(ids), 4 * (expected - 1) + 1, rtol=1e-5)


def served(folder: Path, ids: np.ndarray) -> np.ndarray:
    """Returns TensorFlow's outputs of an exported model, without Keras and without tfwd."""
    loaded = tf.saved_model.load(str(folder))
    function = getattr(loaded, "serve", None) or loaded.signatures["serving_default"]
    found = function(tf.constant(ids))
    return np.asarray(next(iter(found.values())) if isinstance(found, dict) else found)


def test_both_can_be_exported(tmp_path: Path) -> None:
    """Checks that the plain model can be exported after the wrapped one."""
    ids = np.arange(6).reshape(2, 3)
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int64"),
            layers.DropoutEmbedding(9, 4, 0.5, name="rows"),
            layers.WeightDropLSTM(4, return_sequences=True),
            layers.WeightDropout(keras.layers.Dense(2), 0.5),
        ]
    )
    expected = np.asarray(model(ids))
    model.export(str(tmp_path / "wrapped"))
    plain = tfwd.unwrap(model)
    plain.export(str(tmp_path / "plain"))
    model.export(str(tmp_path / "again"))
    for folder in ("wrapped", "plain", "again"):
        np.testing.assert_allclose(served(tmp_path / folder, ids), expected, atol=1e-6)
