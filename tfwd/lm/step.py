"""The language model's training step: a window of text, the state carried on from the one before.

It is traced once: the window's length is left open in the signature, so that random lengths never
trace anew.
"""

from __future__ import annotations

from typing import Any

import keras
import ml_collections
import tensorflow as tf

from tfwd.lm.losses import activation_penalty, token_nats
from tfwd.lm.model import LanguageModel
from tfwd.runs.storage.state import RunState
from tfwd.runs.training import step


class TrainStep(step.TrainStep):
    """The training step: `step(inputs, targets)` with int32 `[batch, time]` each.

        objective = mean(nats) + alpha * AR + beta * TAR
        gradient  = clip by the global norm of d(objective)/d(weights), + l2 * weights
        rate      = state.learning_rate * time / base_window

    Args:
        model, optimizer, state: as in `tfwd.runs.training.step.TrainStep`.
        alpha: activation regularisation.
        beta: temporal activation regularisation.
        base_window: scale the rate by the window's length over this; 0 does not scale.
        **options: further arguments of that class.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: keras.optimizers.Optimizer,
        state: RunState,
        *,
        alpha: float = 0.0,
        beta: float = 0.0,
        base_window: int = 0,
        **options: Any,
    ):
        self.alpha, self.beta, self.base_window = alpha, beta, base_window
        window = tf.TensorSpec([state.carried[0][0].shape[0], None], tf.int32)
        super().__init__(model, optimizer, state, [window, window], **options)

    def forward(self, *batch: tf.Tensor) -> step.Forward:
        inputs, targets = batch
        carried = [[tensor.read_value() for tensor in pair] for pair in self.state.carried]
        output = self.model(inputs, states=carried, training=True)

        def objective(loss: tf.Tensor) -> tf.Tensor:
            penalty = activation_penalty(output.raw, output.dropped, self.alpha, self.beta)
            return loss if penalty is None else loss + penalty

        return step.Forward(token_nats(output.logits, targets), objective, output.states)

    def rate(self, *batch: tf.Tensor) -> tf.Tensor:
        rate = super().rate(*batch)
        if self.base_window:
            rate = rate * tf.cast(tf.shape(batch[0])[1], tf.float32) / self.base_window
        return rate


def make_step(
    config: ml_collections.ConfigDict, model: LanguageModel, state: RunState
) -> TrainStep:
    """The training step that a configuration describes, with a new optimizer.

    Args:
        config: the whole configuration.
        model: as `saved.make_model` makes it.
        state: what the step is to change.

    Raises:
        UserError: the optimizer does not take its arguments.
    """
    optimizer, options = step.optimizer_and_options(config, model, own=["scale_lr_by_window"])
    scaled = config.optimizer.scale_lr_by_window and config.data.random_windows
    return TrainStep(
        model,
        optimizer,
        state,
        alpha=config.model.activation_regularization,
        beta=config.model.temporal_activation_regularization,
        base_window=config.data.window if scaled else 0,
        **options,
    )
