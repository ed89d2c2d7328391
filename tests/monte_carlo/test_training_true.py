"""`predict_samples` with and without `training=True`, and the model's state afterwards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from monte_carlo_tools import predicted, wrappers
from small_models import ALL, X
from stack_marks import IS_KERAS_2, needs_keras3, quick_rows

import tfwd
from tfwd import layers
from tfwd import parametrizations as P


def with_dropout() -> keras.Sequential:
    """Returns a model with dropout, whose masks have the state of a generator."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, name="first"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Dropout(0.5, seed=7),
            keras.layers.Dense(2, name="second"),
        ]
    )


@quick_rows("False")
@pytest.mark.parametrize("training", [False, True])
def test_training_continues_as_if_nothing_had_been_predicted(training: bool) -> None:
    def trained(between: bool) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        plain = ALL["sequential"]() if IS_KERAS_2 and training else with_dropout()
        model = tfwd.parametrize(plain, {"kernel": P.Mixout(0.5)}, seed=3)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        states = []
        for _ in range(2):
            if between:
                before = [np.asarray(v) for v in model.variables]
                predicted(model, X, 3, 4, training=training)
                for old, new in zip(before, model.variables, strict=True):
                    np.testing.assert_array_equal(old, new)
            model.fit(X, tf.ones((8, 2)), batch_size=4, shuffle=False, verbose=0)
            states += model.get_weights()
        return states

    for one, two in zip(trained(False), trained(True), strict=True):
        np.testing.assert_array_equal(one, two)


def test_training_runs_dropout_and_leaves_statistics_alone() -> None:
    """Checks that every activation is dropped or scaled, after the moving statistics."""
    inputs = keras.Input((6,))
    norm = keras.layers.BatchNormalization(name="norm")
    hidden = keras.layers.Dense(6, name="dense")(inputs)
    hidden = keras.layers.Dropout(0.5)(norm(hidden))
    model = tfwd.parametrize(
        keras.Model(inputs, hidden), {"dense/kernel": P.GaussianNoise(0.5)}, seed=1
    )
    norm.moving_mean.assign(np.arange(6.0))
    norm.moving_variance.assign(np.full(6, 4.0))
    before = [np.asarray(w) for w in model.weights]
    n = 40
    plain, dropped = (
        predicted(model, X, n, return_samples=True, training=flag).samples for flag in (False, True)
    )
    (wrapper,) = wrappers(model)
    for sample in range(n):
        kernel = wrapper.effective_weights(sample)["kernel"]
        normal = (X @ kernel - np.arange(6.0)) / np.sqrt(4.0 + 1e-3)
        np.testing.assert_allclose(plain[sample], normal, rtol=1e-4, atol=1e-5)
        kept = dropped[sample] != 0
        np.testing.assert_allclose(dropped[sample][kept], 2 * normal[kept], rtol=1e-4, atol=1e-5)
    share = (dropped != 0).mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(dropped.size)
    assert len({(dropped[s] != 0).tobytes() for s in range(n)}) == n  # each mask is another one
    for old, new in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(old, new)


def test_training_runs_locked_dropout() -> None:
    model = keras.Sequential(
        [
            keras.Input((3, 6)),
            layers.LockedDropout(0.5, seed=2),
            layers.VariationalNoise(keras.layers.Dense(4), 0.1, seed=1),
        ]
    )
    x = tf.ones((2, 3, 6))
    calls = [int(layer.draws.calls) for layer in model.layers]
    quiet, noisy = (predicted(model, x, 30, training=flag).stddev for flag in (False, True))
    assert quiet.mean() < 0.5 * noisy.mean()
    assert [int(layer.draws.calls) for layer in model.layers] == calls == [0, 0]


@needs_keras3("random state in its variables")
def test_the_generators_of_dropout_are_restored() -> None:
    model = tfwd.parametrize(with_dropout(), {"kernel": P.Dropout(0.5)}, seed=1)
    states = [np.asarray(v) for v in model.variables]
    one, two = (predicted(model, X, 3, 4, training=True, return_samples=True) for _ in range(2))
    np.testing.assert_array_equal(one.samples, two.samples)
    for old, new in zip(states, model.variables, strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_stateful_layer_keeps_its_state() -> None:
    lstm = keras.layers.LSTM(3, stateful=True)
    model = keras.Sequential(
        [keras.Input((4, 2), batch_size=2), layers.WeightDropout(lstm, 0.5, seed=1)]
    )
    x = np.asarray(X[:2, :2])[:, None].repeat(4, 1)
    model(x)
    states = [np.asarray(state) for state in lstm.states]
    assert np.abs(states[0]).max() > 0
    samples = predicted(model, x, 3, return_samples=True).samples
    for old, new in zip(states, lstm.states, strict=True):
        np.testing.assert_array_equal(old, new)
    (wrapper,) = wrappers(model)
    raw = np.asarray(lstm.cell.recurrent_kernel)
    for sample in range(3):
        lstm.cell.recurrent_kernel.assign(wrapper.effective_weights(sample)["recurrent_kernel"])
        expected = np.asarray(lstm(x))
        for state, value in zip(lstm.states, states, strict=True):
            state.assign(value)
        lstm.cell.recurrent_kernel.assign(raw)
        np.testing.assert_allclose(samples[sample], expected, rtol=1e-4, atol=1e-5)


class Statistic(keras.layers.Layer):
    """A layer that updates a weight in training, and reads it after the update."""

    def build(self, shape) -> None:
        self.seen = self.add_weight(
            name="seen", shape=(), initializer="zeros", trainable=False, dtype="float32"
        )

    def call(self, x, training=False):
        if training:
            self.seen.assign(self.seen + 1.0)
        return x + self.seen


def test_the_updates_of_a_users_layer_are_discarded() -> None:
    inputs = keras.Input((6,))
    statistic = Statistic()
    plain = keras.Model(inputs, statistic(keras.layers.Dense(2)(inputs)))
    model = tfwd.parametrize(plain, {"kernel": P.Dropout(0.5)}, seed=1)
    one, two = (predicted(model, X, 3, training=flag).mean for flag in (False, True))
    np.testing.assert_allclose(one + 1.0, two, rtol=1e-5, atol=1e-6)
    assert float(statistic.seen) == 0.0
