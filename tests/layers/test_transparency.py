"""Wrapping does not change the training flag, losses, masks, statistics or states."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import needs_keras3

from tfwd import _keras, layers

X = tf.random.stateless_normal([4, 5], [1, 2])
SEQUENCE = tf.random.stateless_normal([2, 6, 3], [1, 2])


class Recorder(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def call(self, x, training=None):
        self.seen.append(training)
        return x


@keras.saving.register_keras_serializable("test_parametrized")
class FrozenNorm(keras.layers.Layer):
    """A layer with a normalization that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(3)

    def build(self, shape) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(self.norm(x, training=False))


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_frozen_normalization_inside_does_not_change_later_layers_flag(
    rate: float, recompute: bool
) -> None:
    class Model(keras.Model):
        """A model that passes no flag on, so that its layers use the flag of the current call."""

        def __init__(self) -> None:
            super().__init__()
            inner = FrozenNorm()
            self.wrapped = layers.WeightDropout(inner, rate, weights="kernel", recompute=recompute)
            self.recorder = Recorder()

        def call(self, x):
            return self.recorder(self.wrapped(x))

    model = Model()
    model(X)
    model.recorder.seen.clear()
    model(X, training=True)
    tf.function(lambda: model(X, training=True))()
    model(X, training=False)
    assert model.recorder.seen == [True, True, False]
    np.testing.assert_array_equal(model.wrapped.layer.norm.moving_mean, np.zeros(5))
    assert model.wrapped.calls == 2  # with a rate of 0 too


def test_the_flag_of_the_model_reaches_the_wrapper() -> None:
    wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5)
    model = keras.Sequential([keras.layers.Dense(5), wrapped])
    model(X, training=True)
    assert wrapped.calls == 1
    model.predict(X, verbose=0)
    model(X)
    assert wrapped.calls == 1


@pytest.mark.parametrize("recompute", [True, False])
def test_batch_statistics_equal_the_plain_layers(recompute: bool) -> None:
    wrapped = layers.WeightDropout(
        keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(2)]),
        0.5,
        recompute=recompute,
    )
    plain = keras.layers.BatchNormalization()
    for _ in range(3):
        with tf.GradientTape() as tape:
            y = wrapped(X, training=True)
        tape.gradient(y, _keras.variables.tf_variable(wrapped.trainable_weights[0]))
        plain(X, training=True)
    norm = wrapped.layer.layers[0]
    np.testing.assert_allclose(norm.moving_mean, plain.moving_mean, rtol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, plain.moving_variance, rtol=1e-6)


@needs_keras3("dropout whose draws follow from its seed and the number of its call")
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_an_inner_dropout_draws_once_a_call_and_backward_draws_the_same(
    recompute: bool, traced: bool
) -> None:
    wrapped = layers.WeightDropout(
        keras.Sequential(
            [keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1, use_bias=False)]
        ),
        0.5,
        weights="kernel",
        recompute=recompute,
        seed=1,
    )
    plain = keras.layers.Dropout(0.5, seed=3)
    x = tf.ones([8, 100])
    wrapped.build(x.shape)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = wrapped(x, training=True)
        return tape.gradient(y, _keras.variables.tf_variable(wrapped.weights[0]))

    step = tf.function(step) if traced else step
    for call in range(3):
        kept = wrapped.effective_weights(call)["kernel"].numpy() != 0
        expected = tf.reduce_sum(plain(x, training=True), axis=0)[:, None] * np.where(kept, 2, 0)
        np.testing.assert_allclose(step(), expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_stateful_layer_keeps_its_state(recompute: bool) -> None:
    wrapped = layers.WeightDropout(
        keras.layers.LSTM(3, stateful=True), 0.5, recompute=recompute, seed=1
    )
    wrapped(SEQUENCE)
    wrapped.reset_state()
    values = [np.asarray(w) for w in wrapped.weights]
    values[1] = wrapped.effective_weights(0)["recurrent_kernel"].numpy()
    plain = keras.layers.LSTM(3, stateful=True)
    plain(SEQUENCE)
    plain.reset_state()
    plain.set_weights(values)
    np.testing.assert_allclose(wrapped(SEQUENCE, training=True), plain(SEQUENCE), rtol=1e-5)
    for one, other in zip(wrapped.layer.states, plain.states, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


class WithLosses(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel", regularizer="l2")

    def call(self, x):
        y = keras.ops.matmul(x, self.kernel)
        self.add_loss(keras.ops.sum(y))
        self.add_loss(keras.ops.sum(self.kernel))
        return y


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_losses_are_preserved_in_number_and_value(
    recompute: bool, traced: bool, outer: bool
) -> None:
    wrapped = layers.WeightDropout(WithLosses(), 0.5, recompute=recompute, seed=1)
    holder = keras.Sequential([wrapped]) if outer else wrapped
    holder.build((None, 5))
    losses = []

    def step() -> tuple:
        with tf.GradientTape() as tape:
            y = holder(X, training=True)
            losses[:] = holder.losses
            total = tf.add_n(losses[:])
        return (
            y,
            tuple(losses),
            tape.gradient(total, _keras.variables.tf_variable(wrapped.weights[0])),
        )

    y, found, gradient = tf.function(step)() if traced else step()
    kernel, raw = wrapped.effective_weights(0)["kernel"].numpy(), wrapped.weights[0].numpy()
    expected = [np.sum(X.numpy() @ kernel), kernel.sum(), 0.01 * np.sum(raw**2)]
    assert len(found) == 3
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-4)
    np.testing.assert_allclose(y, X.numpy() @ kernel, rtol=1e-4, atol=1e-6)
    # The regularizer's part of the gradient goes to the raw weight without a mask.
    keep = np.where(kernel == 0, 0.0, 2.0)
    data = keep * (X.numpy().sum(0)[:, None] + 1)
    np.testing.assert_allclose(gradient, data + 0.02 * raw, rtol=1e-4)
    holder(X)
    assert len(holder.losses) == 3


def test_activity_regularizers_see_the_output_of_the_effective_weights() -> None:
    inner = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L1(1.0))
    wrapped = layers.WeightDropout(inner, 0.5, seed=1)
    plain = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L1(1.0))
    plain(X)
    y = wrapped(X, training=True)
    plain.set_weights([wrapped.effective_weights(0)["kernel"].numpy(), np.zeros(3)])
    plain(X)
    assert len(wrapped.losses) == 1
    np.testing.assert_allclose(wrapped.losses[0], plain.losses[0], rtol=1e-5)
    assert float(tf.reduce_sum(abs(y))) > 0


@pytest.mark.parametrize("training", [False, True])
def test_masks_pass_in_and_out(training: bool) -> None:
    ids = tf.constant([[1, 2, 0, 0], [3, 4, 5, 6]])
    embedding = layers.WeightDropout(keras.layers.Embedding(7, 3, mask_zero=True), 0.5, seed=1)
    lstm = layers.WeightDropout(keras.layers.LSTM(2), 0.5, seed=2)
    embedded = embedding(ids, training=training)
    np.testing.assert_array_equal(embedded._keras_mask, ids != 0)
    found = lstm(embedded, training=training)
    short = lstm.layer.cell
    del short
    if not training:
        plain = lstm.layer(embedding.layer(ids))
        np.testing.assert_array_equal(found, plain)
    else:
        # The masked steps change nothing.
        other = layers.WeightDropout(keras.layers.LSTM(2), 0.5, seed=2)
        other.build((None, None, 3))
        other.set_weights(lstm.get_weights())
        np.testing.assert_allclose(other(embedded[:1, :2], training=True), found[:1], rtol=1e-5)


def test_masks_pass_through_a_model() -> None:
    model = keras.Sequential(
        [
            layers.DropoutEmbedding(7, 3, 0.5, mask_zero=True),
            layers.WeightDropout(keras.layers.GRU(3, return_sequences=True), 0.5),
            layers.LockedDropout(0.5),
            layers.WeightDropLSTM(2),
        ]
    )
    model(tf.constant([[1, 2, 0, 0]]))
    np.testing.assert_allclose(
        model(tf.constant([[1, 2, 0, 0]])), model(tf.constant([[1, 2]])), rtol=1e-5
    )


def test_the_wrapped_layer_stands_bare_in_an_evaluation_model() -> None:
    dense = keras.layers.Dense(4)
    inputs = keras.Input((5,))
    training = keras.Model(inputs, layers.WeightDropout(dense, 0.5)(inputs))
    evaluation = keras.Model(inputs, dense(inputs))
    np.testing.assert_array_equal(evaluation(X, training=True), training(X))
    training.compile("sgd", "mse")
    training.fit(X, tf.ones([4, 4]), verbose=0)
    np.testing.assert_array_equal(evaluation(X, training=True), training(X))


def test_no_call_assigns_to_a_weight() -> None:
    model = keras.Sequential([layers.WeightDropout(keras.layers.Dense(4), 0.5)])
    before = [w.copy() for w in (model(X), model.get_weights())[1]]
    model.predict(X, verbose=0)
    model(X, training=True)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("traced", [False, True])
def test_statistics_of_the_batch_are_kept(traced: bool, all_large: None) -> None:
    """Checks statistics against a plain model whose kernel was assigned by hand."""

    def make() -> keras.Sequential:
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.BatchNormalization()])
        model.build(X.shape)
        return model

    plain, inner = make(), make()
    plain.set_weights(inner.get_weights())
    wrapped = layers.WeightDropout(inner, 0.5, weights=".*kernel", seed=1)
    (effective,) = wrapped.effective_weights(0).values()
    plain.layers[0].kernel.assign(effective)
    call = lambda: wrapped(X, training=True)  # noqa: E731
    (tf.function(call) if traced else call)()
    plain(X, training=True)
    for name in ("moving_mean", "moving_variance"):
        found, wanted = (getattr(model.layers[1], name).numpy() for model in (inner, plain))
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        assert not np.allclose(found, wanted[::-1])
