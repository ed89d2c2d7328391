"""Training step of the language model: a window of text, with the state of the previous window.

The step is traced once. The signature leaves the window's length unknown, so random lengths never
retrace it.
"""

from __future__ import annotations

from typing import Any

import keras
import ml_collections
import tensorflow as tf

from tfwd.lm.losses import activation_penalty, token_nats
from tfwd.lm.model import LanguageModel
from tfwd.runs.training import step
from tfwd.runs.training.optimizer import optimizer_and_options
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.workers.worker_group import Workers


class TrainStep(step.TrainStep):
    """Training step on a window: `step(inputs, targets)` with int32 `[batch, time]` each.

        objective = mean(nats) + alpha * AR + beta * TAR
        gradient  = clip by the global norm of d(objective)/d(weights), + l2 * weights
        rate      = state.learning_rate * time / base_window

    Args:
        model, optimizer, state: as in `tfwd.runs.training.step.TrainStep`.
        alpha: float. Factor of the activation regularization.
        beta: float. Factor of the temporal activation regularization.
        base_window: int. The rate is multiplied by `time / base_window`; 0 disables the scaling.
        **options: further arguments of `tfwd.runs.training.step.TrainStep`.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: keras.optimizers.Optimizer,
        state: StepVariables,
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
        own = self.workers.own_rows
        carried = [[own(tensor.read_value()) for tensor in pair] for pair in self.state.carried]
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
    config: ml_collections.ConfigDict,
    model: LanguageModel,
    state: StepVariables,
    workers: Workers | None = None,
) -> TrainStep:
    """Makes the training step of a configuration, with a new optimizer.

    Args:
        config: the whole configuration.
        model: the model, from `model.make_model`.
        state: the `StepVariables` that the step changes.
        workers: the `Workers` that train together. A single process by default.

    Raises:
        UserError: the optimizer does not take its arguments.
    """
    optimizer, options = optimizer_and_options(config, model, own=["scale_lr_by_window"])
    scaled = config.optimizer.scale_lr_by_window and config.data.random_windows
    return TrainStep(
        model,
        optimizer,
        state,
        alpha=config.model.activation_regularization,
        beta=config.model.temporal_activation_regularization,
        base_window=config.data.window if scaled else 0,
        workers=workers,
        **options,
    )
