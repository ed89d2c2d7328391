"""Logits with the embedding's own matrix."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import needs_keras3

import tfwd
from tfwd import _keras, layers

X = tf.random.stateless_normal([2, 3, 4], [1, 2])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 3, 5, 4)])
def test_it_is_the_product_with_the_transpose(shape: tuple[int, ...], bias: bool) -> None:
    embedding = keras.layers.Embedding(9, 4)
    layer = layers.TiedDense(embedding, use_bias=bias, bias_initializer="ones")
    x = tf.random.stateless_normal(shape, [1, 2])
    y = layer(x)
    expected = x.numpy() @ embedding.embeddings.numpy().T + bias
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert layer.compute_output_shape(shape) == y.shape
    assert len(layer.weights) == 1 + bias


def test_both_uses_train_one_matrix() -> None:
    embedding = keras.layers.Embedding(9, 4)
    model = keras.Sequential([embedding, layers.TiedDense(embedding)])
    ids = tf.constant([[1, 2]])
    model(ids)
    assert len(model.trainable_weights) == 2
    matrix = embedding.embeddings
    with tf.GradientTape() as tape:
        y = model(ids)
    found = tf.convert_to_tensor(tape.gradient(y, _keras.variables.tf_variable(matrix))).numpy()
    expected = np.zeros([9, 4])
    expected[[1, 2]] += matrix.numpy().sum(0)
    expected += matrix.numpy()[[1, 2]].sum(0)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda e: layers.WeightDropout(e, 0.5),
        lambda e: layers.WeightDropout(layers.VariationalNoise(e, 0.1), 0.5),
    ],
    ids=["once", "twice"],
)
def test_a_wrapped_embedding_is_seen_raw(wrap) -> None:
    embedding = keras.layers.Embedding(9, 4)
    layer = layers.TiedDense(wrap(embedding))
    assert layer.embedding is embedding
    expected = layer(X)
    np.testing.assert_array_equal(layer(X, training=True), expected)


def test_another_layer_than_an_embedding_is_an_error() -> None:
    with pytest.raises(ValueError, match="TiedDense 't': expected an Embedding layer, got .*Dense"):
        layers.TiedDense(keras.layers.Dense(3), name="t")


def test_another_width_is_an_error() -> None:
    layer = layers.TiedDense(keras.layers.Embedding(9, 4), name="t")
    with pytest.raises(ValueError, match=r"'t' is tied to an embedding of width 4.*\(2, 3, 5\)"):
        layer(tf.ones([2, 3, 5]))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float64"])
def test_dtype_policies(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    layer = layers.TiedDense(keras.layers.Embedding(9, 4))
    assert layer(X).dtype == layer.compute_dtype


def test_a_clone_says_that_it_is_no_longer_tied() -> None:
    embedding = keras.layers.Embedding(9, 4)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), embedding, layers.TiedDense(embedding, name="tied")]
    )
    with pytest.warns(UserWarning, match="TiedDense 'tied' is made from a config .*not tied"):
        clone = keras.models.clone_model(model)
    assert clone.layers[1].embedding is not clone.layers[0]


@needs_keras3("layers that are one in two places of a .keras file")
def test_a_bias_of_its_own_is_saved(tmp_path) -> None:
    embedding = keras.layers.Embedding(9, 4)
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), embedding, layers.TiedDense(embedding)]
    )
    model.layers[1].bias.assign(np.arange(9.0))
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    ids = tf.constant([[1, 2, 3]])
    np.testing.assert_array_equal(other(ids), model(ids))
    assert other.layers[1].embedding is other.layers[0]


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
@pytest.mark.parametrize("bias", [True, False])
def test_unwrapped_it_is_saved_loaded_and_cloned(
    bias: bool, shape: tuple[int, ...], tmp_path: Path
) -> None:
    embedding = keras.layers.Embedding(9, 4)
    tied = layers.TiedDense(embedding, use_bias=bias, bias_initializer="ones")
    model = tfwd.unwrap(keras.Sequential([keras.Input(shape, dtype="int32"), embedding, tied]))
    ids = np.arange(6).reshape(6 // np.prod(shape), *shape)
    matrix = np.asarray(embedding.embeddings)
    expected = matrix[ids] @ matrix.T + bias
    np.testing.assert_allclose(model(ids), expected, rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    # A clone from a config has a matrix for each of the two layers, as with any layers in Keras.
    clone.layers[0].set_weights([matrix])
    clone.layers[1].set_weights([matrix, np.ones(9)][: 1 + bias])
    for other in (clone, keras.saving.load_model(tmp_path / "model.keras")):
        np.testing.assert_allclose(other(ids), expected, rtol=1e-5, atol=1e-6)


def test_padding_is_left_out_of_the_loss() -> None:
    embedding = keras.layers.Embedding(9, 4, mask_zero=True, embeddings_initializer="uniform")
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), embedding, layers.TiedDense(embedding)]
    )
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.array([[1, 2, 3, 4], [5, 0, 0, 0]])
    targets = np.array([[2, 3, 4, 5], [6, 8, 8, 8]])
    matrix = np.asarray(embedding.embeddings, np.float64)
    logits = matrix[ids] @ matrix.T
    logarithms = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    losses = -np.take_along_axis(logarithms, targets[..., None], -1)[..., 0]
    expected = losses[ids > 0].mean()
    np.testing.assert_allclose(model.evaluate(ids, targets, verbose=0), expected, rtol=1e-5)
