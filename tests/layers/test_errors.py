"""Errors name the layer, the weight, the value and the valid choices."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

from tfwd import layers
from tfwd import parametrizations as P

X = tf.random.stateless_normal([4, 5], [1, 2])
SEQUENCE = tf.random.stateless_normal([2, 6, 3], [1, 2])


def cases_of_errors():
    dense, lstm = keras.layers.Dense, keras.layers.LSTM
    drop, noise = layers.WeightDropout, layers.VariationalNoise
    yield lambda: drop(dense(3, name="d"), 1.0), "'kernel'.* 'd'.*rate.*1.0"
    yield lambda: drop(dense(3, name="d"), -0.1), "'kernel'.* 'd'.*rate.*-0.1"
    yield lambda: drop(dense(3, name="d"), float("nan")), "'kernel'.* 'd'.*rate.*nan"
    yield lambda: drop(dense(3, name="d"), "x"), "'kernel'.* 'd'.*rate.*'x'"
    yield lambda: noise(dense(3, name="d"), -1.0), "'kernel'.* 'd'.*stddev.*-1.0"
    yield lambda: noise(dense(3, name="d"), float("nan")), "'kernel'.* 'd'.*stddev.*nan"
    yield lambda: drop(lstm(3, name="l"), 2.0), "'recurrent_kernel'.* 'l'.*rate.*2.0"
    yield (
        lambda: drop(dense(3, name="d"), 0.5, weights=["kernle"]),
        "'kernle' matches no weight of layer 'd'.*kernel, .*bias",
    )
    yield (
        lambda: drop(dense(3, name="d"), 0.5, weights="ernel"),
        "'ernel' matches no weight of layer 'd'.*kernel, .*bias",
    )
    yield lambda: drop(dense(3, name="d"), 0.5, weights="("), "'\\('.*'d'.*regular expression"
    yield lambda: drop(dense(3, name="d"), 0.5, weights=[]), "'d'.*weights is empty"
    yield (
        lambda: drop(dense(3, name="d"), 0.5, noise_shape=(None,)),
        "'kernel'.* 'd'.*noise_shape.*\\(None,\\).*\\(5, 3\\)",
    )
    yield lambda: drop(keras.layers.ReLU(name="r"), 0.5), "'r' has no weight.*no weights"
    yield lambda: layers.Parametrized(dense(3, name="d"), {}), "parametrizations must be a dict"
    yield lambda: layers.Parametrized(dense(3, name="d"), {"kernel": 0.5}), "'kernel'.*'d'.*0.5"
    yield lambda: drop(dense(3), 0.5, seed=-1), "seed must be None or an integer.*-1"
    yield lambda: drop(dense(3), 0.5, seed=1.5), "seed must be None or an integer.*1.5"
    yield lambda: drop("dense", 0.5), "expected a Keras layer, got 'dense'"


ERRORS = list(cases_of_errors())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("make", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_name_the_layer_the_weight_and_the_value(make, message: str, when: str) -> None:
    """Checks errors of layers that are built before wrapping, and of layers that are not."""
    if when == "before" and not ("'r'" in message and IS_KERAS_2):  # where a call builds a ReLU
        with pytest.raises(ValueError, match=message), _built_at_once():
            make()
    else:
        with pytest.raises(ValueError, match=message):
            make()(X if "'l'" not in message else SEQUENCE, training=True)


class _built_at_once:
    """A context in which Dense and LSTM are built as soon as they are made."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for cls, shape in ((keras.layers.Dense, (None, 5)), (keras.layers.LSTM, (None, None, 5))):
            self._build(cls, shape)

    def _build(self, cls: type, shape: tuple) -> None:
        original = cls.__init__

        def init(layer, *args, **kwargs) -> None:
            original(layer, *args, **kwargs)
            layer.build(shape)

        self.patch.setattr(cls, "__init__", init)

    def __exit__(self, *_) -> None:
        self.patch.undo()


class WithInteger(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.table = self.add_weight(
            shape=(5, 3), dtype="int32", initializer="zeros", name="table", trainable=False
        )

    def call(self, x):
        return keras.ops.matmul(x, self.kernel + keras.ops.cast(self.table, "float32"))


def test_an_integer_weight_is_never_parametrized() -> None:
    wrapped = layers.WeightDropout(WithInteger(), 0.5)
    wrapped(X, training=True)
    assert list(wrapped.effective_weights(0)) == ["kernel"]
    named = layers.WeightDropout(WithInteger(name="w"), 0.5, weights="table")
    with pytest.raises(ValueError, match="'table' of layer 'w' is of dtype int32"):
        named(X, training=True)
    every = layers.WeightDropout(WithInteger(name="w"), 0.5, weights=".*")
    every(X, training=True)
    assert list(every.effective_weights(0)) == ["kernel"]


@pytest.mark.parametrize("cell", [keras.layers.LSTMCell, keras.layers.GRUCell])
def test_a_bare_cell_is_an_error(cell: type) -> None:
    with pytest.raises(ValueError, match="'c' of type .*Cell is an RNN cell.*wrap the recurrent"):
        layers.WeightDropout(cell(3, name="c"), 0.5)
    cells = keras.layers.StackedRNNCells([cell(3), cell(3)])
    with pytest.raises(ValueError, match="is an RNN cell"):
        layers.Parametrized(cells, {"kernel": P.Dropout(0.5)})


def test_a_failed_construction_leaves_the_layer_as_it_was() -> None:
    dense = keras.layers.Dense(3)
    expected = dense(X)
    with pytest.raises(ValueError, match="matches no weight"):
        layers.WeightDropout(dense, 0.5, weights="no")
    np.testing.assert_array_equal(dense(X, training=True), expected)


def test_effective_weights_of_a_layer_without_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="'d' has no weights yet: build it or call it first"):
        layers.WeightDropout(keras.layers.Dense(3, name="d"), 0.5).effective_weights(0)
