"""The faster loops of LSTM and GRU: equal to Keras's, and used wherever possible."""

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from recurrent_tools import gradients
from stack_marks import IS_KERAS_2, extended, needs_keras3, quick_rows

from tfwd import _keras, layers
from tfwd._recurrent import gru, lstm
from tfwd.layers._substitution import recurrent_call

X = tf.random.stateless_normal([2, 6, 3], [1, 2])
KINDS = {"lstm": keras.layers.LSTM, "gru": keras.layers.GRU}
CELLS = {"lstm": keras.layers.LSTMCell, "gru": keras.layers.GRUCell}
every_kind = pytest.mark.parametrize("kind", KINDS)

MASKS = [[[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], [[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]]


OPTIONS = [
    {},
    {"return_sequences": True},
    {"return_state": True, "go_backwards": True},
    {"return_sequences": True, "go_backwards": True, "use_bias": False},
]
SHOWN = [{}, {"zero_output_for_mask": True}]
# Each of the options with each mask, and with either way to show what is masked.
MASKED = [
    (options, SHOWN[(i + j) % 2], mask)
    for i, options in enumerate(OPTIONS)
    for j, mask in enumerate([None, *MASKS])
]


@quick_rows("*-lstm", "options0-*", "options2-*", "options5-*", "options7-*")
@every_kind
@pytest.mark.parametrize(("options", "shown", "mask"), MASKED)
def test_the_fast_loop_is_the_loop_of_keras(options, shown, mask, kind: str) -> None:
    layer = KINDS[kind](8, bias_initializer="normal", **options, **shown)
    layer.build(X.shape)
    mask = None if mask is None else tf.cast(mask, tf.bool)
    state = [tf.ones([2, 8]), tf.ones([2, 8]) * 0.5][: len(tf.nest.flatten(layer.cell.state_size))]
    arguments = {"mask": mask, "initial_state": state, "training": True}
    weights = layer.trainable_variables
    found = gradients(functools.partial(recurrent_call.call, layer), weights, X, **arguments)
    expected = gradients(layer, weights, X, **arguments)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@quick_rows("*-True-lstm", "*-False-gru")
@every_kind
@pytest.mark.parametrize(
    ("options", "fast"),
    [
        ({}, True),
        ({"dropout": 0.3}, True),
        ({"stateful": True}, True),
        ({"use_bias": False}, True),
        ({"activation": "tanh"}, True),
        ({"implementation": 1}, True),
        ({"recurrent_dropout": 0.3}, False),
        ({"unroll": True}, False),
        ({"activation": "relu"}, False),
        ({"recurrent_activation": "hard_sigmoid"}, False),
    ],
    ids=repr,
)
def test_where_the_fast_loop_is_taken(options, fast: bool, kind: str, monkeypatch) -> None:
    calls, module = [], {"lstm": lstm, "gru": gru}[kind]
    original = getattr(module, kind)

    def noting(*args, **kwargs):
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(module, kind, noting)
    own = layers.WeightDropout(KINDS[kind](8, **options), 0.5, weights="recurrent_kernel", seed=1)
    own(X)
    assert not calls, "evaluation is Keras's own call"
    train = functools.partial(own, training=True)
    # In eager mode Keras 2's own dropout cannot be drawn again, which a warning says.
    (tf.function(train) if IS_KERAS_2 else train)(X)
    assert bool(calls) == fast


@extended
@pytest.mark.parametrize("traced", [False, True])
def test_the_state_of_a_gru_need_not_stand_in_a_list(traced: bool) -> None:
    own = layers.WeightDropout(keras.layers.GRU(8), 0.5, seed=1)
    own(X)
    train = functools.partial(own, training=True)
    train = tf.function(train) if traced else train
    state = tf.ones([2, 8])
    own.draws.state.assign([1, 0])
    expected = train(X, initial_state=[state])
    own.draws.state.assign([1, 0])
    np.testing.assert_array_equal(train(X, initial_state=state), expected)


def test_a_gru_that_resets_before_the_product_is_kerass(monkeypatch) -> None:
    monkeypatch.setattr(gru, "gru", None)
    layer = keras.layers.GRU(8, reset_after=False)
    weights = layers.WeightDropout(layer, 0.5, seed=1)
    assert weights(X, training=True).shape == [2, 8]


def test_another_layer_is_an_error() -> None:
    layer = keras.layers.SimpleRNN(8, name="simple")
    with pytest.raises(TypeError, match="'simple' is of type SimpleRNN: expected an LSTM or"):
        recurrent_call.call(layer, X)
    assert not recurrent_call.is_plain(layer)


@every_kind
def test_a_gpu_gets_the_loop_of_keras(kind: str, monkeypatch) -> None:
    layer = KINDS[kind](8)
    layer(X)
    assert recurrent_call._applies(layer, X)
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: ["GPU:0"])
    assert not recurrent_call._applies(layer, X)


@every_kind
def test_a_custom_cell_is_used(kind: str) -> None:
    class Cell(CELLS[kind]):
        pass

    layer = KINDS[kind](8)
    layer.cell = Cell(8)
    layer(X)
    assert not recurrent_call._applies(layer, X)


@needs_keras3("loop that a layer could replace")
@every_kind
def test_a_custom_loop_is_used(kind: str) -> None:
    class Loop(KINDS[kind]):
        def inner_loop(self, *args, **kwargs):
            return super().inner_loop(*args, **kwargs)

    layer = Loop(8)
    layer(X)
    assert not recurrent_call._applies(layer, X)


# Either value of either, and each kind.
_FLAGS = [
    ("LSTM", True, True),
    ("LSTM", False, False),
    ("GRU", True, False),
    ("WeightDropLSTM", False, True),
]


@extended
@pytest.mark.parametrize(
    ("kind", "recompute", "attached"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (IS_KERAS_2 or case in _FLAGS[2:]))
        for case in _FLAGS
    ],
)
def test_a_mask_where_the_training_flag_is_a_tensor(
    attached: bool, recompute: bool, kind: str
) -> None:
    x, mask = tf.random.stateless_normal([2, 5, 3], [1, 2]), tf.sequence_mask([3, 5], 5)

    def wrapped() -> keras.Layer:
        keras.utils.set_random_seed(1)
        options: dict[str, Any] = {"seed": 1, "recompute": recompute}
        if kind == "WeightDropLSTM":
            layer = layers.WeightDropLSTM(4, return_sequences=True, **options)
        else:
            plain = getattr(keras.layers, kind)(4, return_sequences=True)
            layer = layers.WeightDropout(plain, 0.5, **options)
        layer.build(x.shape)
        return layer

    def step(layer: keras.Layer, training: Any) -> tuple[Any, Any, Any]:
        with tf.GradientTape() as tape:
            if attached:
                sequences = tf.identity(x)
                _keras.layers.set_mask(sequences, mask)
                outputs = layer(sequences, training=training)
            else:
                outputs = layer(x, mask=mask, training=training)
            loss = tf.reduce_sum(outputs**2)
        weights = [_keras.variables.tf_variable(v) for v in layer.trainable_weights]
        return outputs, _keras.layers.get_mask(outputs), tape.gradient(loss, weights)

    layer = wrapped()
    traced = tf.function(lambda training: step(layer, training))
    for flag in (False, True):  # one trace for both; evaluation draws nothing
        other = wrapped()
        pairs = zip(
            tf.nest.flatten(traced(tf.constant(flag))),
            tf.nest.flatten(step(other, flag)),
            strict=True,
        )
        for found, expected in pairs:
            np.testing.assert_allclose(found, expected, atol=1e-5)


@every_kind
@pytest.mark.usefixtures("all_large")
def test_states_of_a_stateful_layer_in_half_precision(kind: str) -> None:
    """Checks the states after an eager training step, which some releases of Keras keep wide."""
    inner = KINDS[kind](4, stateful=True, dtype="mixed_float16")
    layer = layers.WeightDropout(inner, 0.5, weights="recurrent_kernel", seed=1)
    for call in range(2):
        with tf.GradientTape() as tape:
            outputs = layer(X, training=True)
        assert outputs.dtype == "float16"
        assert all(g is not None for g in tape.gradient(outputs, layer.trainable_variables))
        assert layer.calls == call + 1
    states = [np.asarray(_keras.variables.tf_variable(state)) for state in inner.states]
    np.testing.assert_array_equal(states[0], outputs)
