"""The table of every kind of layer and of every way to perturb its weights.

A `Row` is a plain layer with its inputs and the weights that are dropped by default. A `Case` is a
row under one of tfwd's wrappers, or one of tfwd's own layers beside the plain layer that it equals
in evaluation. The test files of this folder check every property for every case. Where two lists
could be multiplied, each entry of one meets some entries of the other, so that each code path is
tested. `make test-slow` has some more combinations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from stack_marks import HAS_ADDONS, IS_KERAS_2

import tfwd
from conformance.table_row import Row, floats, given
from tfwd import layers
from tfwd import parametrizations as P
from tfwd.layers import transformer as T

SEED = 11
STDDEV = 0.3


@keras.saving.register_keras_serializable("conformance")
class MinimalCell(keras.layers.Layer):
    """A custom recurrent cell."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        self.state_size = units

    def build(self, input_shape: Any) -> None:
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), name="kernel")
        self.recurrent_kernel = self.add_weight(
            shape=(self.units, self.units), name="recurrent_kernel"
        )

    def call(self, inputs: Any, states: Any) -> Any:
        state = keras.ops.matmul(inputs, self.kernel)
        state = keras.ops.tanh(state + keras.ops.matmul(states[0], self.recurrent_kernel))
        return state, [state]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("conformance")
class UsersLayer(keras.layers.Layer):
    """A custom layer with a loss, an inner dropout and a weight with an odd name."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.units = units
        # A repeatable initializer: Keras 2 draws from a global state by default.
        repeatable = {"rng_type": "stateless"} if IS_KERAS_2 else {}
        self.dropout = keras.layers.Dropout(0.3, seed=5, **repeatable)
        self.dense = keras.layers.Dense(units, activity_regularizer=keras.regularizers.L2(0.1))

    def build(self, input_shape: Any) -> None:
        self.mix = self.add_weight(shape=(input_shape[-1], self.units), name="mix")
        self.scale = self.add_weight(shape=(self.units,), name="scale", initializer="ones")
        self.dense.build((*input_shape[:-1], self.units))

    def call(self, inputs: Any, training: Any = None) -> Any:
        y = keras.ops.matmul(inputs, self.mix) * self.scale
        self.add_loss(keras.ops.cast(keras.ops.mean(y * y), "float32"))
        return self.dense(self.dropout(keras.ops.tanh(y), training=training))

    def compute_output_shape(self, input_shape: Any) -> Any:
        return (*input_shape[:-1], self.units)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("conformance")
class SubclassedModel(keras.Model):
    """A custom model, written as a class."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hidden = keras.layers.Dense(4, activation="tanh", name="hidden")
        self.norm = keras.layers.LayerNormalization()
        self.out = keras.layers.Dense(2, name="out")

    def build(self, input_shape: Any) -> None:
        self.hidden.build(input_shape)
        self.norm.build((*input_shape[:-1], 4))
        self.out.build((*input_shape[:-1], 4))
        self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        return self.out(self.norm(self.hidden(inputs)))


class Case(NamedTuple):
    """A layer that perturbs weights, and the plain layer that it equals in evaluation.

    Attributes:
        name: name for test ids.
        row: the plain layer.
        make: makes the layer from `seed` and `recompute`.
        rates: drop rate of each parametrized weight by its name. None: noise of `STDDEV`.
        mask_shape: shape of one mask by the shape of the weight.
        config_is_all: True if the config determines all results. References are in files only.
        in_place: parametrizations that `tfwd.parametrize` adds in place, after the first call.
    """

    name: str
    row: Row
    make: Callable[..., keras.Layer]
    rates: dict[str, float | None]
    mask_shape: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape
    config_is_all: bool = True
    in_place: dict[str, P.Parametrization] | None = None


def _functional() -> keras.Model:
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(inputs)
    other = keras.layers.Dense(4, name="other")(inputs)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(hidden + other))


def _sequential() -> keras.Model:
    dense = keras.layers.Dense
    return keras.Sequential([dense(4, activation="tanh", name="first"), dense(2, name="second")])


def _batch_norm() -> keras.Model:
    first, second = (keras.layers.Dense(n, name=name) for n, name in ((4, "first"), (2, "second")))
    return keras.Sequential([first, keras.layers.BatchNormalization(), second])


def _checked() -> keras.Model:
    first, second = (keras.layers.Dense(n, name=name) for n, name in ((4, "first"), (2, "second")))
    return keras.Sequential([first, layers.CheckFinite("count"), second])


K = keras.layers
SEQUENCE = given(floats(2, 4, 3))
MATRIX = given(floats(4, 5))
# The weight of a depthwise convolution.
DEPTHWISE = "depthwise_kernel" if IS_KERAS_2 else "kernel"

ROWS = [
    Row("Dense", lambda: K.Dense(3, activation="tanh"), MATRIX, ("kernel",)),
    Row(
        "EinsumDense",
        lambda: K.EinsumDense("abc,cde->abde", output_shape=(None, 2, 2), bias_axes="de"),
        SEQUENCE,
        ("kernel",),
    ),
    Row(
        "Embedding",
        lambda: K.Embedding(7, 3),
        given(tf.constant([[1, 2, 2], [6, 0, 1]])),
        ("embeddings",),
    ),
    Row("Conv2D", lambda: K.Conv2D(3, 2), given(floats(2, 4, 4, 2)), ("kernel",)),
    Row("Conv2DTranspose", lambda: K.Conv2DTranspose(3, 2), given(floats(2, 3, 3, 2)), ("kernel",)),
    Row(
        "DepthwiseConv2D",
        lambda: K.DepthwiseConv2D(2, depth_multiplier=2),
        given(floats(2, 4, 4, 2)),
        (DEPTHWISE,),
    ),
    Row(
        "SeparableConv2D",
        lambda: K.SeparableConv2D(3, 2),
        given(floats(2, 4, 4, 2)),
        ("depthwise_kernel", "pointwise_kernel"),
    ),
    Row("LSTM", lambda: K.LSTM(3, return_sequences=True), SEQUENCE, ("recurrent_kernel",)),
    Row("GRU", lambda: K.GRU(3, return_state=True), SEQUENCE, ("recurrent_kernel",)),
    Row("SimpleRNN", lambda: K.SimpleRNN(4), SEQUENCE, ("recurrent_kernel",)),
    Row("RNN of a user's cell", lambda: K.RNN(MinimalCell(4)), SEQUENCE, ("recurrent_kernel",)),
    Row(
        "RNN of stacked cells",
        lambda: K.RNN([K.LSTMCell(2, name="a"), K.GRUCell(3, name="b")], return_sequences=True),
        SEQUENCE,
        ("a/recurrent_kernel", "b/recurrent_kernel"),
    ),
    Row(
        "Bidirectional",
        lambda: K.Bidirectional(K.LSTM(3, return_sequences=True, name="lstm")),
        SEQUENCE,
        ("forward_lstm/lstm_cell/recurrent_kernel", "backward_lstm/lstm_cell/recurrent_kernel"),
    ),
    Row("TimeDistributed", lambda: K.TimeDistributed(K.Dense(4)), SEQUENCE, ("kernel",)),
    Row(
        "MultiHeadAttention",
        lambda: K.MultiHeadAttention(2, 3),
        given(floats(2, 3, 4), floats(2, 5, 4)),
        ("query/kernel", "key/kernel", "value/kernel", "attention_output/kernel"),
    ),
    Row("Sequential", _sequential, MATRIX, ("first/kernel", "second/kernel")),
    Row("functional model", _functional, MATRIX, ("hidden/kernel", "other/kernel", "out/kernel")),
    Row("user's layer", lambda: UsersLayer(3), MATRIX, ("mix", "kernel")),
    Row("subclassed model", SubclassedModel, MATRIX, ("hidden/kernel", "out/kernel")),
    Row("BatchNormalization", _batch_norm, MATRIX, ("first/kernel", "second/kernel")),
    Row("CheckFinite", _checked, MATRIX, ("first/kernel", "second/kernel")),
    Row(
        "stateful LSTM",
        lambda: K.LSTM(3, stateful=True, return_sequences=True),
        SEQUENCE,
        ("recurrent_kernel",),
    ),
    Row(
        "masked GRU",
        lambda: K.GRU(3),
        given(floats(2, 4, 3), mask=tf.constant([[True] * 4, [True, True, False, False]])),
        ("recurrent_kernel",),
    ),
    Row(
        "Bert",
        lambda: T.Bert(7, 4, 1, 2, 3, max_length=3),
        given(tf.constant([[1, 2, 2], [6, 3, 0]])),
        (
            *(f"{table}/embeddings" for table in ("words", "positions", "types")),
            *(f"{part}/kernel" for part in ("query", "key", "value", "attention/output")),
            *(f"{part}/kernel" for part in ("intermediate", "layer_0/output")),
        ),
    ),
    Row(
        "T5Stack",
        lambda: T.T5Stack(1, 2, 3, 4, 5, gated=True),
        given(floats(2, 3, 4)),
        (
            "embeddings",
            *(f"{part}/kernel" for part in ("query", "key", "value", "attention/output")),
            *(f"{part}/kernel" for part in ("intermediate", "gate", "layer_0/output")),
        ),
    ),
    Row(
        "TiedDense",
        lambda: layers.TiedDense(K.Embedding(6, 3)),
        given(floats(2, 2, 3)),
        ("embeddings",),
    ),
]
if HAS_ADDONS:
    from conformance import addons_rows

    ROWS += addons_rows.ROWS
# Other numbers of dimensions of layers that ROWS has with two, for tests that depend on shapes.
OTHER_DIMENSIONS = [
    Row("Conv1D", lambda: K.Conv1D(3, 2), given(floats(2, 5, 2)), ("kernel",)),
    Row("Conv3D", lambda: K.Conv3D(2, 2), given(floats(1, 3, 3, 3, 2)), ("kernel",)),
    Row("Conv1DTranspose", lambda: K.Conv1DTranspose(3, 2), given(floats(2, 5, 2)), ("kernel",)),
    Row(
        "Conv3DTranspose",
        lambda: K.Conv3DTranspose(2, 2),
        given(floats(1, 2, 2, 2, 2)),
        ("kernel",),
    ),
    Row(
        "DepthwiseConv1D",
        lambda: K.DepthwiseConv1D(2, depth_multiplier=2),
        given(floats(2, 5, 3)),
        (DEPTHWISE,),
    ),
]
ROW = {row.name: row for row in ROWS}


def _dropout_case(row: Row) -> Case:
    def make(**options: Any) -> keras.Layer:
        return layers.WeightDropout(row.make(), 0.5, **options)

    return Case(f"{row.name}, dropout", row, make, dict.fromkeys(row.default, 0.5))


def _noise_case(row: Row) -> Case:
    def make(**options: Any) -> keras.Layer:
        return layers.VariationalNoise(row.make(), STDDEV, **options)

    return Case(f"{row.name}, noise", row, make, dict.fromkeys(row.default, None))


def _mixout_case(name: str, shape: tuple[int, ...]) -> Case:
    """Returns a case of Mixout towards zero, which drops as dropout does."""
    row = ROW[name]
    (weight,) = row.default
    start = {weight: np.zeros(shape, "float32")}

    def make(**options: Any) -> keras.Layer:
        return layers.Mixout(row.make(), 0.5, towards=start, **options)

    return Case(f"{name}, mixout", row, make, {weight: 0.5}, config_is_all=False)


def _pattern_case(name: str, parametrizations: dict[str, P.Parametrization], **rates: Any) -> Case:
    def make(**options: Any) -> keras.Layer:
        return layers.Parametrized(ROW[name].make(), parametrizations, **options)

    return Case(f"{name}, patterns", ROW[name], make, rates)


def _weight_drop_lstm(**options: Any) -> keras.Layer:
    return layers.WeightDropLSTM(
        3, weight_dropout=0.5, return_sequences=True, name="lstm", **options
    )


def _nested(**options: Any) -> keras.Layer:
    noisy = layers.VariationalNoise(ROW["Dense"].make(), STDDEV, seed=5, recompute=False)
    return layers.WeightDropout(noisy, 0.5, **options)


def _parametrized_model(**options: Any) -> keras.Model:
    model = _functional()
    return tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, **options)


def _in_place_case(row: Row) -> Case:
    def make(**options: Any) -> keras.Layer:
        return row.make()

    rates = dict.fromkeys(row.default, 0.5)
    given = {name: P.Dropout(0.5) for name in row.default}
    return Case(f"{row.name}, in place", row, make, rates, in_place=given)


DROPOUT = [_dropout_case(row) for row in ROWS]
# Noise acts the same in all layers, except in lookups and in layers with loops.
NOISE = [_noise_case(ROW[name]) for name in ("Dense", "Embedding", "LSTM", "Bidirectional")]
MIXOUT = [
    _mixout_case("Dense", (5, 3)),
    _mixout_case("LSTM", (3, 12)),
    _mixout_case("Embedding", (7, 3)),
]
OWN = [
    _pattern_case(
        "Dense",
        {"kernel": P.Chain([P.GaussianNoise(STDDEV), P.Dropout(0.5)]), "bias": P.Dropout(0.25)},
        kernel=0.5,
        bias=0.25,
    ),
    _pattern_case(
        "LSTM",
        {".*/kernel": P.GaussianNoise(STDDEV), "recurrent_kernel": P.Dropout(0.75)},
        kernel=None,
        recurrent_kernel=0.75,
    ),
    Case("WeightDropLSTM", ROW["LSTM"], _weight_drop_lstm, {"recurrent_kernel": 0.5}),
    Case(
        "Bidirectional of WeightDropLSTM",
        ROW["Bidirectional"],
        lambda **options: K.Bidirectional(_weight_drop_lstm(**options)),
        dict.fromkeys(
            ("forward_lstm/lstm_cell/recurrent_kernel", "backward_lstm/lstm_cell/recurrent_kernel"),
            0.5,
        ),
    ),
    Case(
        "DropoutEmbedding",
        ROW["Embedding"],
        lambda **options: layers.DropoutEmbedding(7, 3, rate=0.5, **options),
        {"embeddings": 0.5},
        lambda shape: (shape[0], 1),
    ),
    Case("WeightDropout of VariationalNoise", ROW["Dense"], _nested, {"kernel": 0.5}),
    Case(
        "parametrize",
        ROW["functional model"],
        _parametrized_model,
        dict.fromkeys(ROW["functional model"].default, 0.5),
    ),
]
CASES = [*DROPOUT, *NOISE, *MIXOUT, *OWN]
# A layer of each nature, for properties that all layers of a nature share.
NATURES = [
    case
    for case in DROPOUT
    if case.row.name in ("Dense", "LSTM", "BatchNormalization", "user's layer")
]
FURTHER = [_dropout_case(row) for row in OTHER_DIMENSIONS]
# The same layers, with dropout added in place.
# A layer with its own weights, two that contain layers, and two whose call is not their own.
IN_PLACE_KINDS = ("Dense", "user's layer", "MultiHeadAttention", "TiedDense", "LSTM", "Embedding")
# A kernel that is never trained is an error there.
IN_PLACE = [_in_place_case(row) for row in ROWS if "ESNCell" not in row.name]
# For properties that cannot depend on the parametrization.
NOT_NOISE = [*DROPOUT, *MIXOUT, *OWN]
