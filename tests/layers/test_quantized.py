"""Layers of 8 bits and with LoRA: the supported uses, and errors for the others."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import needs_keras3

import tfwd
from tfwd import layers
from tfwd import parametrizations as P

pytestmark = needs_keras3("layers of 8 bits")

X = tf.random.stateless_normal([3, 8], [1, 2])
WHAT_IS_POSSIBLE = r"tfwd\.unwrap\(model\).*enable_lora"


def dense() -> keras.layers.Dense:
    layer = keras.layers.Dense(8, name="dense")
    layer.build((None, 8))
    return layer


def test_quantize_of_a_wrapper_is_an_error_with_advice() -> None:
    layer = layers.WeightDropout(dense(), 0.5)
    layer(X)
    with pytest.raises(ValueError, match=f"'weight_dropout.*' cannot be.*{WHAT_IS_POSSIBLE}"):
        layer.quantize("int8")
    assert layer.layer.quantization_mode is None


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_model_that_is_asked_to_quantize_warns() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="score")])
    model = tfwd.parametrize(model, {"kernel": P.Dropout(0.5)})
    with pytest.warns(UserWarning) as warned:
        model.quantize("int8")
    assert any("'score' cannot train" in str(warning.message) for warning in warned)
    assert model(X).shape == (3, 4)
    with pytest.raises(ValueError, match=f"'kernel'.*'score' is of dtype int8.*{WHAT_IS_POSSIBLE}"):
        model(X, training=True)


def test_weights_of_8_bits_are_refused() -> None:
    layer = dense()
    layer.quantize("int8")
    with pytest.raises(ValueError, match=f"no weight.*'dense' is quantized.*{WHAT_IS_POSSIBLE}"):
        layers.WeightDropout(layer, 0.5)


def test_the_lora_weights_of_a_quantized_layer_are_dropped() -> None:
    layer = dense()
    layer.enable_lora(4)
    layer.lora_kernel_b.assign(tf.random.stateless_normal([4, 8], [3, 4]))
    layer.quantize("int8")
    wrapped = layers.WeightDropout(layer, 0.5, weights="lora_.*", seed=1)
    np.testing.assert_array_equal(wrapped(X), layer(X))
    found = wrapped(X, training=True)
    effective = wrapped.effective_weights(0)
    assert sorted(effective) == ["lora_kernel_a", "lora_kernel_b"]
    layer.lora_kernel_a.assign(effective["lora_kernel_a"])
    layer.lora_kernel_b.assign(effective["lora_kernel_b"])
    np.testing.assert_allclose(found, layer(X), rtol=1e-5, atol=1e-6)


def test_float8_trains_on_the_dropped_kernel() -> None:
    layer, plain = dense(), dense()
    plain.set_weights(layer.get_weights())
    layer.quantize("float8")
    plain.quantize("float8")
    wrapped = layers.WeightDropout(layer, 0.5, seed=1)
    plain.kernel.assign(wrapped.effective_weights(0)["kernel"])
    np.testing.assert_allclose(wrapped(X, training=True), plain(X, training=True), rtol=1e-5)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_layers_that_wrap_nothing_say_nothing_of_it() -> None:
    dropped = layers.DropoutEmbedding(7, 4, 0.5)
    model = keras.Sequential([keras.Input((3,)), dropped, keras.layers.Dense(4)])
    with pytest.warns(UserWarning) as warned:  # Keras's own, of its InputLayer
        model.quantize("int8")
    assert not any("cannot train" in str(warning.message) for warning in warned)
    assert model.layers[1].quantization_mode == "int8"
