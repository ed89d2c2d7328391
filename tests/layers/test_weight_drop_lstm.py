"""`WeightDropLSTM`: an LSTM except for the recurrent kernel of its training calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from recurrent_tools import gradients
from stack_marks import needs_keras3, quick_rows

from tfwd import layers

X = tf.random.stateless_normal([2, 6, 3], [1, 2])


def pair(**options) -> tuple[keras.layers.LSTM, keras.layers.LSTM]:
    own = layers.WeightDropLSTM(8, weight_dropout=0.5, seed=1, **options)
    plain = keras.layers.LSTM(8, seed=1, **options)
    for layer in (own, plain):
        layer(X)
    plain.set_weights(own.get_weights())
    return own, plain


OPTIONS = [
    {},
    {"return_sequences": True, "return_state": True},
    {"go_backwards": True},
    {"use_bias": False},
    {"unroll": True},
    {"dropout": 0.3},
    {"recurrent_dropout": 0.3},
    {"activation": "relu", "recurrent_activation": "hard_sigmoid"},
]


DROPPED = "dropout whose draws follow from its seed and the number of its call"
REPEATED = [
    pytest.param(o, marks=needs_keras3(DROPPED)) if {"dropout", "recurrent_dropout"} & set(o) else o
    for o in OPTIONS
]


@quick_rows("True-*", "False-{}")
@pytest.mark.parametrize("options", REPEATED, ids=repr)
@pytest.mark.parametrize("recompute", [True, False])
def test_a_training_call_is_the_lstm_with_the_dropped_kernel(options, recompute: bool) -> None:
    own, plain = pair(**options)
    own.recompute = recompute
    values = [w.copy() for w in own.get_weights()]
    values[1] = own.effective_weights(0)["recurrent_kernel"].numpy()
    plain.set_weights(values)
    found, expected = own(X, training=True), plain(X, training=True)
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_evaluation_is_the_lstm(options) -> None:
    own, plain = pair(**options)
    for a, b in zip(tf.nest.flatten(own(X)), tf.nest.flatten(plain(X)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    own = layers.WeightDropLSTM(8, weight_dropout=0.5, seed=1, return_sequences=True, dtype=policy)
    own.build(X.shape)
    exact = keras.layers.LSTM(8, return_sequences=True)
    exact.build(X.shape)
    values = own.get_weights()
    exact.set_weights([values[0], own.effective_weights(0)["recurrent_kernel"], *values[2:]])
    found = gradients(own, own.trainable_variables, X, training=True)
    assert found[0].dtype == own.compute_dtype and found[2].dtype == tf.float32
    expected = gradients(exact, exact.trainable_variables, X)
    for a, b in zip(found[:3], expected[:3], strict=True):
        np.testing.assert_allclose(tf.cast(a, "float32"), b, atol=0.1 * np.abs(b).max())


def test_lengths_do_not_trace_again() -> None:
    own, _ = pair(return_sequences=True)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([2, None, 3])])
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        traces.append(x)
        return gradients(own, own.trainable_variables, x, training=True)

    for time in (6, 2, 9, 1):
        y, dx, *_ = step(X[:, :1] + tf.zeros([2, time, 3]))
        assert y.shape == (2, time, 8) and dx.shape == (2, time, 3)
    assert len(traces) == 1


def test_the_first_step_is_equal_between_calls_and_later_ones_differ() -> None:
    own, _ = pair(return_sequences=True)
    one, two = own(X, training=True).numpy(), own(X, training=True).numpy()
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert all(not np.array_equal(one[:, t], two[:, t]) for t in range(1, 6))


def test_an_initial_state_and_a_mask() -> None:
    own, plain = pair(return_sequences=True)
    state = [tf.ones([2, 8]), tf.ones([2, 8]) * 0.5]
    mask = tf.constant([[True] * 6, [True] * 3 + [False] * 3])
    values = own.get_weights()
    values[1] = own.effective_weights(0)["recurrent_kernel"].numpy()
    plain.set_weights(values)
    found = own(X, initial_state=state, mask=mask, training=True)
    expected = plain(X, initial_state=state, mask=mask)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_state_gets_its_gradient(recompute: bool) -> None:
    own, plain = pair()
    own.recompute = recompute
    values = own.get_weights()
    values[1] = own.effective_weights(0)["recurrent_kernel"].numpy()
    plain.set_weights(values)
    state = [tf.ones([2, 8]), tf.ones([2, 8]) * 0.5]
    gradients = []
    for layer in (own, plain):
        with tf.GradientTape() as tape:
            tape.watch(state)
            y = layer(X, initial_state=state, training=True)
        gradients.append(tape.gradient(y, state))
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_the_directions_of_a_bidirectional_layer_draw_differently() -> None:
    layer = keras.layers.Bidirectional(layers.WeightDropLSTM(8, weight_dropout=0.5, seed=1))
    layer(X, training=True)
    masks = [
        rnn.effective_weights(0)["recurrent_kernel"].numpy() == 0
        for rnn in (layer.forward_layer, layer.backward_layer)
    ]
    assert abs(np.corrcoef(masks[0].ravel(), masks[1].ravel())[0, 1]) < 5 / 16


def test_a_stateful_lstm() -> None:
    own, plain = pair(stateful=True)
    own.reset_state()
    plain.reset_state()
    for call in range(2):
        values = own.get_weights()
        values[1] = own.effective_weights(call)["recurrent_kernel"].numpy()
        plain.set_weights(values)
        np.testing.assert_allclose(own(X, training=True), plain(X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan"), "x"])
def test_a_rate_out_of_range_is_an_error(rate) -> None:
    with pytest.raises(ValueError, match=r"'recurrent_kernel' of layer 'r'.*rate must be in"):
        layers.WeightDropLSTM(4, weight_dropout=rate, name="r")
