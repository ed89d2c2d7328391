"""Layers with dropout: all weights get the same masks, and later draws do not change."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, rewinding
from stack_marks import quick_rows
from tables_by_make_target import with_slow_rest

from tfwd import _keras, gradients
from tfwd._graph import stateless_call

L = keras.layers


class Scale(L.Layer):
    """A layer without a rule, so that the model runs a second time."""

    def build(self, shape: tuple) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.sin(x * self.scale)


STACKS: dict[str, Callable[[], list]] = {
    "dropout": lambda: [L.Dropout(0.5)],
    "noise": lambda: [L.GaussianNoise(0.5), L.GaussianDropout(0.3), L.AlphaDropout(0.3)],
    "same_for_all_steps": lambda: [L.SpatialDropout1D(0.5)],
    "simple_rnn": lambda: [L.SimpleRNN(3, dropout=0.4, recurrent_dropout=0.3)],
    "lstm": lambda: [L.LSTM(3, dropout=0.4, return_sequences=True)],
    "lstm_of_states": lambda: [L.LSTM(3, recurrent_dropout=0.4)],
    "gru": lambda: [L.GRU(3, dropout=0.4, return_sequences=True)],
    "gru_of_states": lambda: [L.GRU(3, dropout=0.3, recurrent_dropout=0.4)],
    "cells": lambda: [L.RNN([L.LSTMCell(3, dropout=0.3), L.GRUCell(2, recurrent_dropout=0.2)])],
    "bidirectional": lambda: [L.Bidirectional(L.GRU(2, dropout=0.3, return_sequences=True))],
}


@quick_rows("dropout", "lstm", "same_for_all_steps")
@pytest.mark.parametrize("name", with_slow_rest(STACKS, list(STACKS)[::2]))
def test_all_weights_see_one_draw(name: str) -> None:
    stack = [keras.Input((4, 3)), L.Dense(3), *STACKS[name](), Scale(), L.Dense(2)]
    model = keras.Sequential(stack)
    x = np.random.default_rng(1).normal(size=(4, 4, 3)).astype("f")
    y = np.random.default_rng(2).normal(size=model(x).shape).astype("f")
    rewind = rewinding(model)
    moments = gradients.moments(model, x, y, "mse", training=True)
    # A weight without a gradient in the trial, since all is dropped, has no rule either.
    assert moments.methods[-3] == "backward_each" and "dense" in moments.methods
    rewind()
    with tf.GradientTape(persistent=True) as tape:
        squares = (model(x, training=True) - y) ** 2
        losses = tf.unstack(tf.reduce_mean(tf.reshape(squares, [4, -1]), -1))
    sources = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    rows = [[np.asarray(tf.convert_to_tensor(g)) for g in tape.gradient(one, sources)]
            for one in losses]  # fmt: skip
    assert_moments(moments, [np.stack(parts) for parts in zip(*rows, strict=True)], 1e-4)


@pytest.mark.parametrize("traced", [False, True])
def test_a_captured_call_does_not_change_later_draws(traced: bool) -> None:
    """Checks that a captured call does not change later draws, and makes another draw each time."""
    model = keras.Sequential([keras.Input((3,)), L.Dense(4), L.Dropout(0.5), L.Dense(2)])
    x, y = tf.random.normal([6, 3]), tf.random.normal([6, 2])

    def compute() -> list[tf.Tensor]:
        return gradients.moments(model, x, y, "mse", training=True).mean_square

    def run() -> list[tf.Tensor]:
        return stateless_call.call(compute, [], capture=True).outputs

    once = tf.function(run) if traced else run
    rewind = rewinding(model)
    wanted = [model(x, training=True) for _ in range(3)]
    rewind()
    first = once()
    found = [model(x, training=True) for _ in range(2)]
    second = once()
    found.append(model(x, training=True))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    if _keras.IS_KERAS_2:  # on Keras 3 the state of draws is a variable, which stays
        assert any(np.any(a != b) for a, b in zip(first, second, strict=True))
