"""Training step of a classifier: a batch of texts, with a learning rate per step and layer."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import ml_collections
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import update_interception, wrapped_optimizers
from tfwd.finetune import learning_rate_schedule
from tfwd.finetune.model import classifier_of, named_weights
from tfwd.runs.training import step
from tfwd.runs.training.optimizer import optimizer_and_options
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.workers.worker_group import Workers


class TrainStep(step.TrainStep):
    """Training step on a batch: `step(ids, labels)` with int32 `[batch, positions]` and `[batch]`.

        nats   = -log softmax(logits)[label]
        rate   = state.learning_rate * learning_rate_schedule.factor(state.step)
        rate_v = rate * learning_rate_schedule.layer_factors[v]    for a weight v

    Weight decay with `scale="learning_rate"` or "schedule" uses rate_v. Batch sizes and lengths are
    unknown in the signature, so the step is traced once.

    Args:
        model, optimizer, state: as in `tfwd.runs.training.step.TrainStep`.
        steps: int. The number of steps of the schedule.
        warmup: int. The number of steps in which the rate rises.
        linear: bool. True lowers the rate after the warm-up. False keeps the rate constant.
        layer_decay: float. The argument `decay` of `learning_rate_schedule.layer_factors`.
        **options: further arguments of `tfwd.runs.training.step.TrainStep`.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        state: StepVariables,
        *,
        steps: int,
        warmup: int = 0,
        linear: bool = True,
        layer_decay: float = 1.0,
        **options: Any,
    ):
        self.steps, self.warmup, self.linear = steps, warmup, linear
        self._factors: dict[int, float] = {}
        if layer_decay != 1:
            names = named_weights(model)
            layers = len(classifier_of(model).encoder.stack.layers)
            factors = learning_rate_schedule.layer_factors(list(names), layers, layer_decay)
            for name, variable in names.items():
                self._factors[id(_keras.variables.tf_variable(variable))] = factors[name]
        texts = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None], tf.int32)
        super().__init__(model, optimizer, state, texts, **options)

    def forward(self, *batch: tf.Tensor) -> step.Forward:
        ids, labels = batch
        logits = self.model(ids, training=True)
        return step.Forward(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        )

    def rate(self, *batch: tf.Tensor) -> tf.Tensor:
        return super().rate(*batch) * self.factor()

    def factor(self) -> tf.Tensor:
        """Returns the schedule's factor for the next step."""
        return learning_rate_schedule.factor(self.state.step, self.steps, self.warmup, self.linear)

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        scaled: Any = contextlib.nullcontext()
        if self._factors:
            leaves = wrapped_optimizers.leaves(self.optimizer)
            scaled = update_interception.rates_scaled(
                leaves, lambda v: self._factors.get(id(v), 1.0)
            )
        with scaled:
            super().apply(gradients, variables)


def make_step(
    config: ml_collections.ConfigDict,
    model: Any,
    state: StepVariables,
    epoch_steps: int,
    workers: Workers | None = None,
) -> TrainStep:
    """Makes the training step of a configuration, with a new optimizer.

    Args:
        config: the whole configuration.
        model: the model, from `model.make_model`.
        state: the `StepVariables` that the step changes.
        epoch_steps: int. The steps of an epoch.
        workers: the `Workers` that train together. A single process by default.

    Raises:
        UserError: the optimizer does not take its arguments.
    """
    own = ("warmup", "schedule", "schedule_epochs", "layer_decay")
    optimizer, options = optimizer_and_options(config, model, own)
    chosen = config.optimizer
    steps = epoch_steps * (chosen.schedule_epochs or config.training.epochs)
    return TrainStep(
        model,
        optimizer,
        state,
        steps=steps,
        warmup=learning_rate_schedule.warmup_steps(steps, chosen.warmup),
        linear=chosen.schedule == "linear",
        layer_decay=chosen.layer_decay,
        workers=workers,
        **options,
    )
