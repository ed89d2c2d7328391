"""Measures moments of per-example gradients during training: `--config.gradients.every=N`.

An example is a column of the window: the tokens of one row and its initial state. The loss is the
cross entropy alone, with dropout. The measurement changes nothing. It uses the draws of the next
training step without consuming them.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, gradients
from tfwd._graph import stateless_call
from tfwd.gradients import statistics
from tfwd.lm.losses import token_nats
from tfwd.lm.model import LanguageModel
from tfwd.runs.training.step_variables import StepVariables


class GradientMeter:
    """Meter of the gradient moments of a window, with the forward pass of the training step.

    Args:
        model: the model.
        state: the `StepVariables` with the state that is carried from window to window.
    """

    def __init__(self, model: LanguageModel, state: StepVariables):
        self._model = _Logits(model)
        self._variables = model.trainable_variables
        self._state = state
        batch = state.carried[0][0].shape[0]
        window = tf.TensorSpec([batch, None], tf.int32)
        self._batch = batch
        self._function = tf.function(self._measure, input_signature=[window, window])

    def __call__(self, inputs: tf.Tensor, targets: tf.Tensor) -> dict[str, Any]:
        """Returns the numbers of `gradients.statistics.describe`. A weight's key is `name/path`.

        A window is one batch, and may be too noisy. Then `signal` is zero or less and `noise_scale`
        is infinite, which `metrics.jsonl` stores as null. To average over several lines, divide the
        mean of `variance` by the mean of `signal`.
        """
        sums = self._function(inputs, targets).numpy()
        paths = [_keras.variables.path(v) for v in self._variables]
        sizes = [int(tf.size(_keras.variables.value(v))) for v in self._variables]
        record = statistics.describe(sums, paths, sizes, self._batch)
        for path, values in record.pop("variables").items():
            record |= {f"{name}/{path}": value for name, value in values.items()}
        return record

    def _measure(self, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        carried = [[tensor.read_value() for tensor in pair] for pair in self._state.carried]
        given = {"ids": inputs, "states": carried}

        def compute() -> tf.Tensor:
            moments = gradients.moments(self._model, given, targets, _nats, training=True)
            return statistics.compress(moments)

        return stateless_call.call(compute, [], capture=True).outputs


class _Logits(keras.Model):
    """Model of a dict of ids and states that returns only the logits."""

    def __init__(self, model: LanguageModel):
        super().__init__(dtype=model.dtype_policy, name="logits")
        self.model = model
        self.built = True

    def call(self, given: Any, training: Any = None) -> tf.Tensor:
        return self.model(given["ids"], states=given["states"], training=training).logits


def _nats(targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return token_nats(logits, tf.cast(targets, tf.int32))
