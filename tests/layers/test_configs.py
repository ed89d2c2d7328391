"""Configs: their content, and a layer that is restored from its config before its first call."""

import copy
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import needs_keras3, quick_rows

import tfwd
from tfwd import layers
from tfwd import parametrizations as P

ROUND_TRIPS = {
    "config": lambda layer: type(layer).from_config(layer.get_config()),
    "object": lambda layer: keras.saving.deserialize_keras_object(
        keras.saving.serialize_keras_object(layer)
    ),
    "clone": lambda layer: keras.models.clone_model(keras.Sequential([layer])).layers[0],
    "deepcopy": copy.deepcopy,
}


@quick_rows("config", "clone")
@pytest.mark.parametrize(
    ("again", "inner"),
    [*zip(ROUND_TRIPS.values(), [keras.layers.Dense, keras.layers.GRU] * 2, strict=True)],
    ids=ROUND_TRIPS,
)
def test_a_wrapped_wrapper_that_was_never_called(inner: type, again: Callable) -> None:
    layer = layers.WeightDropout(layers.VariationalNoise(inner(3), 0.1, seed=1), 0.5, seed=2)
    other = again(layer)
    x = tf.ones([2, 4] if inner is keras.layers.Dense else [2, 3, 4])
    layer(x)
    other(x)
    other.set_weights(layer.get_weights())
    np.testing.assert_array_equal(other(x, training=True), layer(x, training=True))


@pytest.mark.parametrize("tied", [False, True])
def test_equal_layers_have_equal_configs(tied: bool) -> None:
    def make() -> keras.layers.Layer:
        embedding = keras.layers.Embedding(9, 4, name="embedding")
        if tied:
            return layers.TiedDense(embedding, name="tied")
        return layers.WeightDropout(embedding, 0.5, seed=1, name="dropped")

    one, other = (keras.saving.serialize_keras_object(make()) for _ in range(2))
    assert one == other
    assert "shared_object_id" not in json.dumps(one)


@needs_keras3("files that know that a layer in two places is one")
@pytest.mark.parametrize("wrapped_first", [True, False])
def test_a_layer_that_is_used_wrapped_and_plain_is_one_in_a_file(
    wrapped_first: bool, tmp_path: Path
) -> None:
    dense = keras.layers.Dense(4)
    wrapped = layers.WeightDropout(dense, 0.5, seed=1)
    inputs = keras.Input((4,))
    outputs = dense(wrapped(inputs)) if wrapped_first else wrapped(dense(inputs))
    model = keras.Model(inputs, outputs)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert len(loaded.weights) == 2
    x = tf.random.stateless_normal([2, 4], [1, 2])
    np.testing.assert_array_equal(loaded(x, training=True), model(x, training=True))


def test_two_files_of_one_model_are_alike(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model = tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1)
    configs = []
    for name in ("one.keras", "other.keras"):
        model.save(tmp_path / name)
        configs.append(json.loads(zipfile.ZipFile(tmp_path / name).read("config.json")))
    assert configs[0] == configs[1]


WITH_SEED = {
    "WeightDropout": lambda seed: layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=seed),
    "WeightDropLSTM": lambda seed: layers.WeightDropLSTM(3, 0.5, seed=seed),
    "LockedDropout": lambda seed: layers.LockedDropout(0.5, seed=seed),
    "DropoutEmbedding": lambda seed: layers.DropoutEmbedding(3, 4, 0.5, seed=seed),
    "parametrize": lambda seed: tfwd.parametrize(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)]),
        {".*/kernel": P.Dropout(0.5)},
        seed=seed,
    ),
}


@pytest.mark.parametrize("make", WITH_SEED.values(), ids=WITH_SEED)
def test_seeds_are_refused_alike_everywhere(make: Callable) -> None:
    for seed in (-1, 1 << 63, 1.5, True, "1"):
        with pytest.raises(ValueError, match="seed must be None or an integer from 0 to 2"):
            make(seed)
    make(np.int64(3))
    make((1 << 63) - 1)
