"""The training step of a classifier: a batch of texts, at the rate of its step and its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import ml_collections
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import updates, wrapped_optimizers
from tfwd.finetune import schedule
from tfwd.finetune.model import classifier_of, named_weights
from tfwd.runs.storage.state import RunState
from tfwd.runs.training import step


class TrainStep(step.TrainStep):
    """The training step: `step(ids, labels)` with int32 `[batch, places]` and `[batch]`.

        nats   = -log softmax(logits)[label]
        rate   = state.learning_rate * schedule.factor(state.step)
        rate_v = rate * schedule.layer_factors[v]    for a weight v

    A decay of weights by `scale="learning_rate"` or "schedule" goes by rate_v. Batches and lengths
    are left open, so that the step is traced once.

    Args:
        model, optimizer, state: as in `tfwd.runs.training.step.TrainStep`.
        steps: all steps of the schedule.
        warmup: those of them in which the rate rises.
        linear: whether it falls after them.
        layer_decay: as in `schedule.layer_factors`.
        **options: further arguments of that class.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        state: RunState,
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
            factors = schedule.layer_factors(list(names), layers, layer_decay)
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
        """The schedule's factor of the step that is next."""
        return schedule.factor(self.state.step, self.steps, self.warmup, self.linear)

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        scaled: Any = contextlib.nullcontext()
        if self._factors:
            leaves = wrapped_optimizers.leaves(self.optimizer)
            scaled = updates.rates_scaled(leaves, lambda v: self._factors.get(id(v), 1.0))
        with scaled:
            super().apply(gradients, variables)


def make_step(
    config: ml_collections.ConfigDict, model: Any, state: RunState, epoch_steps: int
) -> TrainStep:
    """The training step that a configuration describes, with a new optimizer.

    Args:
        config: the whole configuration.
        model: as `model.make_model` makes it.
        state: what the step is to change.
        epoch_steps: the steps of an epoch.

    Raises:
        UserError: the optimizer does not take its arguments.
    """
    own = ("warmup", "schedule", "schedule_epochs", "layer_decay")
    optimizer, options = step.optimizer_and_options(config, model, own)
    chosen = config.optimizer
    steps = epoch_steps * (chosen.schedule_epochs or config.training.epochs)
    return TrainStep(
        model,
        optimizer,
        state,
        steps=steps,
        warmup=schedule.warmup_steps(steps, chosen.warmup),
        linear=chosen.schedule == "linear",
        layer_decay=chosen.layer_decay,
        **options,
    )
