"""Forms of calls: a wrapped layer accepts and returns the same structures as the plain layer."""

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, needs_keras3, quick_rows

from tfwd import layers

pytestmark = pytest.mark.usefixtures("size")

X = tf.random.stateless_normal([2, 3, 4], [1, 2])


@dataclasses.dataclass(frozen=True)
class Pair:
    product: Any
    rest: Any = None
    twice: Any = dataclasses.field(init=False, default=None)


class Hidden:
    """A class that no library treats as a nest."""

    def __init__(self, tensor: tf.Tensor) -> None:
        self.tensor = tensor


class Packing(keras.layers.Layer):
    """A product with a kernel that returns its result in a structure."""

    def __init__(self, pack: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.pack = pack
        self.dense = keras.layers.Dense(3, use_bias=False)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.pack(self.dense(x))


def in_pair(y: tf.Tensor) -> Pair:
    pair = Pair(y, {"sum": [tf.reduce_sum(y)]})
    object.__setattr__(pair, "twice", 2.0 * y)
    return pair


def total(found: Any) -> tf.Tensor:
    if isinstance(found, Pair):
        return tf.reduce_sum(found.product**2) + found.rest["sum"][0] + tf.reduce_sum(found.twice)
    return tf.reduce_sum(found.tensor**2)


@pytest.mark.filterwarnings("ignore:.*a custom gradient cannot see")
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("pack", [in_pair, Hidden], ids=["dataclass", "object"])
def test_tensors_in_an_object_have_gradients(pack: Any, traced: bool) -> None:
    wrapped = layers.WeightDropout(Packing(pack), 0.5, seed=1)
    wrapped(X)

    def step() -> tuple[tf.Tensor, list]:
        with tf.GradientTape() as tape:
            tape.watch(X)
            loss = total(wrapped(X, training=True))
        (kernel,) = wrapped.trainable_variables
        return loss, tape.gradient(loss, [X, kernel if IS_KERAS_2 else kernel.value])

    (effective,) = wrapped.effective_weights(0).values()
    loss, (of_x, of_kernel) = tf.function(step)() if traced else step()
    x, w = X.numpy().reshape(-1, 4).astype("f8"), effective.numpy().astype("f8")
    y = x @ w
    dy = 2 * y + (3.0 if pack is in_pair else 0.0)
    np.testing.assert_allclose(
        loss, (y**2).sum() + (3 * y.sum() if pack is in_pair else 0), rtol=1e-4
    )
    np.testing.assert_allclose(np.reshape(of_x, [-1, 4]), dy @ w.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_kernel, (x.T @ dy) * (w != 0) * 2, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*a custom gradient cannot see")
def test_an_object_cannot_come_out_of_a_branch() -> None:
    wrapped = layers.WeightDropout(Packing(Hidden), 0.5, seed=1, name="w")
    wrapped(X)
    with pytest.raises(TypeError, match="layer 'w' returns a Hidden.*Python bool"):
        tf.function(lambda flag: total(wrapped(X, training=flag)))(tf.constant(True))


@needs_keras3("such casts")
def test_a_call_past_the_casts_of_keras_is_past_them_inside_too() -> None:
    """Checks that a call without Keras's casts has no casts inside either.

    `TimeDistributed` calls the `call` of its layer, not the layer, in its own precision.
    """
    for kind, given in (
        (lambda: keras.layers.Dense(3, dtype="float32"), X),
        (lambda: keras.layers.Embedding(5, 3, dtype="float32"), tf.constant([[[1, 2]], [[3, 4]]])),
    ):
        plain, inner = kind(), kind()
        alone = keras.layers.TimeDistributed(plain, dtype="mixed_float16")
        wrapped = layers.WeightDropout(inner, 0.5, seed=1)
        held = keras.layers.TimeDistributed(wrapped, dtype="mixed_float16")
        alone(given), held(given)
        plain.set_weights([w + 0.1 for w in plain.get_weights()])
        inner.set_weights(plain.get_weights())
        assert held(given).dtype == alone(given).dtype
        np.testing.assert_array_equal(held(given), alone(given))
        first = wrapped.calls
        found = held(given, training=True)
        assert found.dtype == alone(given).dtype
        np.testing.assert_array_equal(found, tf.cast(tf.cast(found, tf.float16), found.dtype))
        assert wrapped.calls == first + given.shape[1]  # once a step, as the page says


@quick_rows("small-LSTM", "large-GRU")
@pytest.mark.parametrize("kind", [keras.layers.LSTM, keras.layers.GRU])
def test_static_shapes_equal_the_plain_layers(kind: Any) -> None:
    plain = kind(4, return_sequences=True, return_state=True)
    plain.build((3, 5, 2))
    wrapped = layers.WeightDropout(plain, 0.5, seed=1)
    for shape in ([3, 5, 2], [None, 5, 2], [3, None, 2]):

        def call(x):
            return wrapped(x, training=True), plain(x, training=True)

        found = tf.function(call).get_concrete_function(tf.TensorSpec(shape)).structured_outputs
        of_wrapped, of_plain = ([tuple(t.shape) for t in outputs] for outputs in found)
        assert of_wrapped == of_plain, shape


def test_arrays_lists_and_names() -> None:
    dense = keras.layers.Dense(3)
    dense.build((None, 4))
    wrapped = layers.VariationalNoise(dense, 0.5, seed=1)
    effective = wrapped.effective_weights(0)["kernel"]
    for call, given in enumerate((X, X.numpy(), X.numpy().astype("f8"))):
        effective = wrapped.effective_weights(call)["kernel"]
        found = wrapped(given, training=True)
        np.testing.assert_allclose(found, tf.matmul(X, effective), rtol=1e-5, atol=1e-6)
    effective = wrapped.effective_weights(3)["kernel"]
    np.testing.assert_allclose(
        wrapped(inputs=X, training=True), tf.matmul(X, effective), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(Exception, match="positional|argument|call"):
        wrapped(X, X, X, X)
