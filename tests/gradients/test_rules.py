"""Every rule against brute force, in float64: each layer alone, and pairs of layers."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
from gradients.brute_force import assert_moments, general, per_example, randomized
from stack_marks import quick_rows
from tables_by_make_target import with_slow_rest

from tfwd import gradients, layers

L = keras.layers
SEQ, IMAGE = (5, 3), (6, 5, 4)

CASES: dict[str, tuple[Callable[[], keras.Layer], tuple[int, ...]]] = {
    "dense": (lambda: L.Dense(3, "tanh"), (4,)),
    "dense_sequence": (lambda: L.Dense(3), SEQ),
    "dense_long_sequence": (lambda: L.Dense(3, use_bias=False), (30, 3)),
    "einsum": (lambda: L.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d"), SEQ),
    "einsum_two": (lambda: L.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"), SEQ),
    "einsum_groups": (lambda: L.EinsumDense("abc,bcd->abd", (5, 4), bias_axes="bd"), SEQ),
    "einsum_dots": (lambda: L.EinsumDense("...x,xy->...y", (4,)), SEQ),
    "conv1": (lambda: L.Conv1D(4, 3, activation="tanh"), (7, 3)),
    "conv1_causal": (lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2), (7, 3)),
    "conv2": (lambda: L.Conv2D(3, (3, 2), strides=2, padding="same"), IMAGE),
    "conv2_dilated": (lambda: L.Conv2D(3, 2, dilation_rate=2), IMAGE),
    "conv2_groups": (lambda: L.Conv2D(4, 3, groups=2), IMAGE),
    "conv3": (lambda: L.Conv3D(2, 2, padding="same"), (3, 4, 3, 2)),
    "conv1_transpose": (lambda: L.Conv1DTranspose(2, 3, strides=2), SEQ),
    "conv2_transpose": (lambda: L.Conv2DTranspose(2, 3, strides=2, padding="same"), (3, 4, 2)),
    "conv3_transpose": (lambda: L.Conv3DTranspose(2, 2), (2, 3, 2, 2)),
    "depthwise1": (lambda: L.DepthwiseConv1D(3, depth_multiplier=2), SEQ),
    "depthwise2": (lambda: L.DepthwiseConv2D(3, strides=2, padding="same"), IMAGE),
    "separable1": (lambda: L.SeparableConv1D(2, 3, padding="same"), SEQ),
    "separable2": (lambda: L.SeparableConv2D(2, 3, depth_multiplier=2), IMAGE),
    "layer_norm": (lambda: L.LayerNormalization(), SEQ),
    "layer_norm_axes": (lambda: L.LayerNormalization(axis=[1, 2]), SEQ),
    "group_norm": (lambda: L.GroupNormalization(2), IMAGE),
    "simple_rnn": (lambda: L.SimpleRNN(3, return_sequences=True), SEQ),
    "lstm": (lambda: L.LSTM(3), SEQ),
    "lstm_backwards": (lambda: L.LSTM(3, go_backwards=True, return_sequences=True), SEQ),
    "lstm_other": (lambda: L.LSTM(3, activation="relu", recurrent_activation="hard_sigmoid"), SEQ),
    "gru": (lambda: L.GRU(3, return_sequences=True), SEQ),
    "gru_without_bias": (lambda: L.GRU(3, use_bias=False), SEQ),
    "gru_reset_before": (lambda: L.GRU(3, reset_after=False), SEQ),
    "bidirectional": (lambda: L.Bidirectional(L.LSTM(2, return_sequences=True)), SEQ),
    "time_distributed": (lambda: L.TimeDistributed(L.Dense(2)), SEQ),
}
if hasattr(L, "RMSNormalization"):
    CASES["rms_norm"] = (lambda: L.RMSNormalization(), SEQ)


@pytest.fixture(autouse=True)
def float64() -> None:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def check(
    model: keras.Model, x: np.ndarray, chunk_size: int | None = None, tolerance: float = 1e-9
) -> None:
    randomized(model)
    y = np.random.default_rng(2).normal(size=model(x).shape)
    moments = gradients.moments(model, x, y, "mse", chunk_size=chunk_size)
    assert not general(moments), moments.methods
    assert_moments(moments, per_example(model, x, y), tolerance)


# One layer for each way to sum. The others differ from one of them in an argument.
KEPT = (
    "dense",
    "einsum_groups",
    "einsum_dots",
    "conv1_causal",
    "conv2",
    "conv2_transpose",
    "depthwise2",
    "separable1",
    "layer_norm_axes",
    "group_norm",
    "simple_rnn",
    "lstm_backwards",
    "gru",
    "gru_reset_before",
    "bidirectional",
    "time_distributed",
    "rms_norm",
)


@pytest.mark.parametrize("name", with_slow_rest(CASES, KEPT))
def test_layer(name: str) -> None:
    make, shape = CASES[name]
    # A layer without weights first, so that the gradient at the layer's input is wanted nowhere.
    model = keras.Sequential([keras.Input(shape), L.Rescaling(0.7), make()])
    check(model, np.random.default_rng(1).normal(size=(3, *shape)))


PAIRS = [("dense_sequence", "lstm"), ("lstm_backwards", "dense"), ("conv1", "gru"),
         ("layer_norm", "einsum"), ("gru", "simple_rnn"), ("separable1", "bidirectional"),
         ("time_distributed", "conv1_causal"), ("conv1_transpose", "layer_norm")]  # fmt: skip


@quick_rows(
    "dense_sequence-lstm",
    "conv1-gru",
    "layer_norm-einsum",
    "separable1-bidirectional",
    "conv1_transpose-layer_norm",
)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_pair(first: str, second: str) -> None:
    model = keras.Sequential([keras.Input((7, 3)), CASES[first][0](), CASES[second][0]()])
    check(model, np.random.default_rng(1).normal(size=(3, 7, 3)))


@pytest.mark.parametrize("shape", [(4,), (4, 6), (3, 2, 5)])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float64"])
def test_embedding(shape: tuple[int, ...], dtype: str) -> None:
    inputs = keras.Input(shape[1:], dtype=dtype)
    model = keras.Model(inputs, L.Embedding(5, 3)(inputs))
    check(model, np.random.default_rng(1).integers(0, 5, shape).astype(dtype))


def test_attention_and_its_four_products() -> None:
    inputs = keras.Input((4, 3))
    outputs = L.MultiHeadAttention(2, 2, use_bias=False)(inputs, inputs)
    check(keras.Model(inputs, outputs), np.random.default_rng(1).normal(size=(3, 4, 3)))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_tied_embedding(chunk_size: int | None) -> None:
    embedding = L.Embedding(6, 3)
    stack = [keras.Input((4,), dtype="int32"), embedding, L.Dense(3), layers.TiedDense(embedding)]
    model = keras.Sequential(stack)
    x = np.array([[1, 1, 4, 0], [5, 2, 5, 5], [3, 3, 3, 3]])
    check(model, x, chunk_size)
    moments = gradients.moments(model, x, np.zeros((3, 4, 6)), "mse")
    assert moments.methods[0] == "embedding+tied_dense"


def test_layer_that_is_used_twice() -> None:
    shared = L.Dense(3, "tanh")
    model = keras.Sequential([keras.Input((3,)), shared, shared, L.Dense(1)])
    check(model, np.random.default_rng(1).normal(size=(4, 3)))


def test_recurrent_layer_that_is_used_twice() -> None:
    inputs, shared = keras.Input((3, 2)), L.LSTM(2, return_sequences=True)
    model = keras.Model(inputs, shared(shared(inputs)))
    check(model, np.random.default_rng(1).normal(size=(3, 3, 2)))


@quick_rows("*options0", "*options2", "*options4")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (L.SimpleRNN, {}),
        (L.SimpleRNN, {"zero_output_for_mask": True}),
        (L.LSTM, {"go_backwards": True}),
        (L.LSTM, {"zero_output_for_mask": True}),
        (L.GRU, {}),
        (L.GRU, {"go_backwards": True}),
    ],
)
def test_masked_time_steps(kind: type, options: dict) -> None:
    model = keras.Sequential(
        [keras.Input((4, 2)), L.Masking(), kind(3, return_sequences=True, **options), L.Dense(2)]
    )
    x = np.random.default_rng(1).normal(size=(4, 4, 2))
    x[0, :2], x[1, 3], x[2, 1:3] = 0, 0, 0
    check(model, x, tolerance=1e-6)  # older releases of Keras scale masked losses in float32


def test_states_that_are_given_and_returned() -> None:
    x, h, c = keras.Input((3, 2)), keras.Input((3,)), keras.Input((3,))
    outputs, *states = L.LSTM(3, return_sequences=True, return_state=True)(x, initial_state=[h, c])
    joined = L.Concatenate()([L.Flatten()(outputs), *states])
    model = keras.Model([x, h, c], L.Dense(2)(joined))
    random = np.random.default_rng(1)
    given = [random.normal(size=(3, 3, 2)), random.normal(size=(3, 3)), random.normal(size=(3, 3))]
    y = random.normal(size=(3, 2))
    moments = gradients.moments(model, given, y, "mse")
    assert not general(moments)
    assert_moments(moments, per_example(model, given, y))


def test_stateful_layer_keeps_its_state() -> None:
    inputs = keras.Input(batch_shape=(2, 3, 2))
    layer = L.LSTM(3, stateful=True)
    model = keras.Model(inputs, layer(inputs))
    twin_layer = L.LSTM(3, stateful=True)
    twin = keras.Model(inputs, twin_layer(inputs))
    twin.set_weights(model.get_weights())
    x, y = np.random.default_rng(1).normal(size=(2, 3, 2)), np.zeros((2, 3))
    gradients.moments(model, x, y, "mse")
    twin(x)
    np.testing.assert_allclose(layer.states[0], twin_layer.states[0], rtol=1e-12)
