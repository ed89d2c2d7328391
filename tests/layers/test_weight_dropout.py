"""`WeightDropout`: its arguments."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

from tfwd import layers
from tfwd import parametrizations as P


def test_it_is_parametrized_with_dropout_draw_for_draw() -> None:
    single = layers.WeightDropout(keras.layers.Dense(30), 0.3, seed=4)
    general = layers.Parametrized(keras.layers.Dense(30), {"kernel": P.Dropout(0.3)}, seed=4)
    for layer in (single, general):
        layer.build((None, 20))
    general.set_weights(single.get_weights())
    for call in range(2):
        one, two = (layer.effective_weights(call)["kernel"] for layer in (single, general))
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("noise_shape", "axis"), [((None, 1), 1), ((1, None), 0)])
def test_noise_shape(noise_shape: tuple, axis: int) -> None:
    dense = keras.layers.Dense(30, use_bias=False)
    layer = layers.WeightDropout(dense, 0.5, noise_shape=noise_shape, seed=1)
    zeros = layer(tf.eye(20), training=True).numpy() == 0
    assert (zeros.all(axis) | ~zeros.any(axis)).all()
    assert 0 < zeros.mean() < 1


@pytest.mark.parametrize("weights", ["bias", ["bias"], ("bias",)])
def test_weights_may_be_one_pattern_or_several(weights) -> None:
    layer = layers.WeightDropout(keras.layers.Dense(3), 0.5, weights=weights)
    layer.build((None, 2))
    assert list(layer.effective_weights(0)) == ["bias"]
    again = layers.WeightDropout.from_config(layer.get_config())
    again.build((None, 2))
    assert list(again.effective_weights(0)) == ["bias"]


def test_arguments_are_attributes_and_in_the_config() -> None:
    layer = layers.WeightDropout(
        keras.layers.Dense(3), 0.25, "kernel", (None, 1), 5, False, True, name="w"
    )
    config = layer.get_config()
    expected = {
        "rate": 0.25,
        "weights": ["kernel"],
        "noise_shape": (None, 1),
        "seed": 5,
        "recompute": False,
        "share_across_replicas": True,
        "name": "w",
    }
    assert {key: config[key] for key in expected} == expected
    assert (layer.rate, layer.seed, layer.recompute) == (0.25, 5, False)
    assert layer.share_across_replicas is True


@pytest.mark.parametrize("inner", [keras.layers.LSTM, keras.layers.GRU])
def test_inside_a_bidirectional_layer_it_says_what_to_do(inner: type) -> None:
    # Keras 2 stops before it asks for another layer.
    expected = (
        (KeyError, "go_backwards") if IS_KERAS_2 else (ValueError, "wrap the Bidirectional|RNN")
    )
    with pytest.raises(expected[0], match=expected[1]):
        keras.layers.Bidirectional(layers.WeightDropout(inner(3), 0.5))


def test_the_names_and_policy_of_the_wrapped_layer_are_kept() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(3, name="d", dtype="mixed_bfloat16"), 0.5)
    assert layer.dtype_policy.name == "mixed_bfloat16"
    assert layer.compute_dtype == "bfloat16"
    assert layer.layer.name == "d"
