"""Layers whose call builds layers in them, as Keras allows.

The choice of weights must be final before the first draw. The weights must equal the plain layer's
weights from the same global seed.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import extended, quick_rows

from tfwd import layers, parametrizations

X = tf.random.stateless_normal([4, 3], [1, 2])
SEQUENCE = tf.random.stateless_normal([4, 5, 3], [1, 2])


class Late(keras.layers.Layer):
    """A layer whose `build` makes one weight and whose `call` builds a layer.

    Another layer in it is never called.
    """

    def __init__(self, rank: int = 2, **kwargs) -> None:
        super().__init__(**kwargs)
        self.rank = rank
        self.inner = keras.layers.Dense(2)
        self.unused = keras.layers.Dense(3)

    def build(self, shape) -> None:
        self.mix = self.add_weight(shape=(3,) * self.rank, initializer="random_normal", name="mix")
        self.built = True

    def call(self, x):
        mix = tf.convert_to_tensor(self.mix)
        return self.inner(tf.matmul(x, mix) if self.rank == 2 else x * mix)

    def compute_output_shape(self, shape):
        return (*shape[:-1], 2)


def _expected(rank: int, effective: dict, bias: np.ndarray, x: tf.Tensor) -> np.ndarray:
    weights = {name.rpartition("/")[2]: np.asarray(w) for name, w in effective.items()}
    mixed = x.numpy() @ weights["mix"] if rank == 2 else x.numpy() * weights["mix"]
    return mixed @ weights["kernel"] + bias


def _direct(wrapped: keras.layers.Layer, x: tf.Tensor):
    return wrapped(x, training=True)


def _traced(wrapped: keras.layers.Layer, x: tf.Tensor):
    return tf.function(lambda x: wrapped(x, training=True))(x)


def _functional(wrapped: keras.layers.Layer, x: tf.Tensor):
    inputs = keras.Input(x.shape[1:])
    return keras.Model(inputs, wrapped(inputs))(x, training=True)


def _evaluated_before(wrapped: keras.layers.Layer, x: tf.Tensor):
    wrapped(x)
    return wrapped(x, training=True)


@quick_rows(
    "bare-_direct-1",
    "bare-_traced-2",
    "bare-_evaluated_before-1",
    "TimeDistributed-_functional-1",
    "TimeDistributed-_evaluated_before-2",
)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("first", [_direct, _traced, _functional, _evaluated_before])
@pytest.mark.parametrize("around", [False, True], ids=["bare", "TimeDistributed"])
def test_the_first_training_call_drops_all(rank: int, first, around: bool) -> None:
    x = SEQUENCE if around else X

    def made() -> tuple[Late, keras.layers.Layer]:
        keras.utils.set_random_seed(3)
        late = Late(rank)
        return late, keras.layers.TimeDistributed(late) if around else late

    plain, outer = made()
    outer(x)
    late, outer = made()
    wrapped = layers.WeightDropout(outer, 0.5, seed=1)
    y = first(wrapped, x)
    for found, expected in zip(wrapped.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(found, expected)
    effective = {name.rpartition("/")[2]: w for name, w in wrapped.effective_weights(0).items()}
    assert list(effective) == (["mix", "kernel"] if rank == 2 else ["kernel"])
    assert all((np.asarray(w) == 0).any() for w in effective.values())
    effective = {"mix": late.mix, **effective}
    expected = _expected(rank, effective, late.get_weights()[-1], x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert wrapped.calls == 1
    assert not late.unused.built


@pytest.mark.parametrize("rank", [1, 2])
def test_fit_drops_all_from_the_first_step(rank: int) -> None:
    late = Late(rank)
    wrapped = layers.WeightDropout(late, 0.5, seed=1)
    model = keras.Sequential([wrapped])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    y = np.ones([4, 2])
    loss = model.fit(X, y, batch_size=4, shuffle=False, verbose=0).history["loss"]
    effective = {"mix": late.mix, **wrapped.effective_weights(0)}
    found = _expected(rank, effective, late.get_weights()[-1], X)
    np.testing.assert_allclose(loss, [np.mean((found - y) ** 2)], rtol=1e-5)


def test_nested_wrappers_both_act_in_the_first_call() -> None:
    late = Late()
    noisy = layers.VariationalNoise(late, 0.1, seed=2)
    wrapped = layers.WeightDropout(noisy, 0.5, seed=1)
    y = wrapped(X, training=True)
    effective = wrapped.effective_weights(0)
    raw = [w for w in wrapped.get_weights() if w.ndim == 2]
    for found, w in zip(map(np.asarray, effective.values()), raw, strict=True):
        kept = found != 0
        assert 0 < kept.sum() < kept.size
        assert (found[kept] != 2 * w[kept]).all()
    np.testing.assert_allclose(
        y, _expected(2, effective, late.get_weights()[-1], X), rtol=1e-5, atol=1e-6
    )


class InTraining(Late):
    """A layer whose second layer is called in training only."""

    def call(self, x, training=None):
        y = super().call(x)
        return self.unused(y) if training else y


def test_a_layer_that_only_training_builds_is_dropped_from_its_first_call() -> None:
    layer = InTraining()
    wrapped = layers.WeightDropout(layer, 0.5, seed=1)
    wrapped(X)
    assert len(wrapped.effective_weights(0)) == 2
    y = wrapped(X, training=True)
    effective = list(wrapped.effective_weights(0).values())
    inner, last = layer.inner.get_weights(), layer.unused.get_weights()
    mix, kernel, other = map(np.asarray, effective)
    expected = (X.numpy() @ mix @ kernel + inner[1]) @ other + last[1]
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_a_layer_that_was_called_is_checked_when_it_is_wrapped() -> None:
    late = Late(name="late")
    late(X)
    with pytest.raises(ValueError, match="'kernle' matches no weight of layer 'late'"):
        layers.WeightDropout(late, 0.5, weights="kernle")
    assert len(layers.WeightDropout(late, 0.5).effective_weights(0)) == 2


def test_a_layer_that_was_built_and_not_called_says_so() -> None:
    wrapped = layers.WeightDropout(Late(name="late"), 0.5)
    wrapped.build((None, 3))
    with pytest.raises(ValueError, match="'late' has no weights yet, or not all of them: call it"):
        wrapped.effective_weights(0)


class Keeps(keras.layers.Layer):
    """A layer whose call builds a recurrent layer that keeps its states."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.inner = keras.layers.LSTM(2, stateful=True)

    def call(self, x):
        return self.inner(x)


@extended
@pytest.mark.parametrize("first", [_direct, _traced])
def test_states_made_late(first) -> None:
    wrapped = layers.Parametrized(Keeps(), {".*": parametrizations.Dropout(0.5)}, seed=1)
    outputs = [first(wrapped, SEQUENCE), _direct(wrapped, 2 * SEQUENCE)]
    plain = keras.layers.LSTM(2, stateful=True)
    plain.build(SEQUENCE.shape)
    expected = []
    for call, x in enumerate([SEQUENCE, 2 * SEQUENCE]):
        effective = wrapped.effective_weights(call)
        assert len(effective) == 3
        for variable, value in zip(plain.weights, effective.values(), strict=True):
            variable.assign(value)
        expected.append(plain(x))  # the second call starts from the states of the first
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
