"""Gradients of several steps in one update, against the gradients of each step by Keras's loss."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, once

from tfwd import _keras
from tfwd.lm.model import LanguageModel
from tfwd.lm.training_step import TrainStep
from tfwd.runs.training.optimizer import make_optimizer
from tfwd.runs.training.step_variables import StepVariables

pytestmark = SLOW_ON_KERAS_2

# Two columns in windows of 4, 2 and 3 tokens.
TEXT = np.random.default_rng(0).integers(0, 7, (2, 10)).astype(np.int32)
WINDOWS = [(0, 4), (4, 6), (6, 9)]


def window(number: int) -> tuple[tf.Tensor, tf.Tensor]:
    start, end = WINDOWS[number]
    return tf.constant(TEXT[:, start:end]), tf.constant(TEXT[:, start + 1 : end + 1])


def make(**options: Any) -> TrainStep:
    model = LanguageModel(7, 4, (6, 4), seed=3)
    state = StepVariables(model.zero_state(2), 0.5)
    return TrainStep(model, make_optimizer("sgd", 0.5), state, **options)


def weights(step: TrainStep) -> list[np.ndarray]:
    return [variable.numpy() for variable in step.model.trainable_variables]


def gradients_of_windows(model: LanguageModel) -> list[list[np.ndarray]]:
    """Returns the gradient of each window at the present weights, with the state carried on."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    states, found = model.zero_state(2), []
    variables = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    for number in range(3):
        inputs, targets = window(number)
        with tf.GradientTape() as tape:
            output = model(inputs, states=states, training=False)
            value = loss(targets, output.logits)
        states = output.states
        found.append([tf.convert_to_tensor(g).numpy() for g in tape.gradient(value, variables)])
    return found


def test_an_update_has_the_mean_gradient_and_the_mean_rate() -> None:
    step = make(steps_per_update=3, base_window=2, clip_norm=0.02, l2=0.1)
    before, each = weights(step), gradients_of_windows(step.model)
    mean = [np.mean(those, axis=0) for those in zip(*each, strict=True)]
    size = np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in mean))
    assert size > 0.05
    for number in range(3):
        for old, new in zip(before, weights(step), strict=True):
            np.testing.assert_array_equal(new, old)
        step(*window(number), update=number == 2)
    rate = 0.5 * np.mean([4, 2, 3]) / 2
    for old, new, gradient in zip(before, weights(step), mean, strict=True):
        np.testing.assert_allclose(
            new, old - rate * (gradient * 0.02 / size + 0.1 * old), atol=1e-6
        )
    assert float(step.state.gradient_norm) == pytest.approx(size, rel=1e-5)
    assert int(step.state.step) == 3


def test_the_next_update_has_only_its_own_gradients() -> None:
    step, once_more = make(steps_per_update=2), make()
    for number in (0, 1):
        step(*window(number), update=number == 1)
    for variable, weight in zip(once_more.model.trainable_variables, weights(step), strict=True):
        variable.assign(weight)
    for old, new in zip(step.state.carried, once_more.state.carried, strict=True):
        for one, other in zip(old, new, strict=True):
            other.assign(one)
    step(*window(2), update=True)  # as the last step of an epoch
    once_more(*window(2))
    for one, other in zip(weights(step), weights(once_more), strict=True):
        np.testing.assert_array_equal(one, other)


@once
def test_a_skipped_step_drops_what_was_gathered() -> None:
    step, other = make(steps_per_update=3), make(steps_per_update=3)
    step(*window(0), update=False)
    kept = [[tensor.numpy() for tensor in pair] for pair in step.state.carried]
    step.state.learning_rate.assign(np.nan)
    step(*window(1), update=False)
    assert step.failure() is not None and step.failure().step == 2
    for pair, values in zip(step.state.carried, kept, strict=True):
        for tensor, value in zip(pair, values, strict=True):
            np.testing.assert_array_equal(tensor.numpy(), value)
    step.state.learning_rate.assign(0.5)
    step.resume_after_failure()
    step(*window(2), update=True)
    for pair, values in zip(other.state.carried, kept, strict=True):
        for tensor, value in zip(pair, values, strict=True):
            tensor.assign(value)
    other(*window(2), update=True)
    for one, another in zip(weights(step), weights(other), strict=True):
        np.testing.assert_array_equal(one, another)
