"""One training step, and evaluation: the two places where the model meets the numbers.

Each is traced once: the window's length is left open in the signature, so that random lengths
never trace anew. What a step produces stays on the device (`state.RunState`); the host fetches
it when it has something to print. A step whose loss or gradient is not finite changes nothing,
nor does any after it, so that the host may notice late and still find the weights as they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd.lm import stream
from tfwd.lm.model import LanguageModel
from tfwd.lm.precision import at_least_float32
from tfwd.lm.regularization import activation_penalty
from tfwd.lm.state import RunState


class Failure(NamedTuple):
    """A step that was not finite: its number from 1, loss, gradient norm and learning rate."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float


class Evaluation(NamedTuple):
    """A loss over a text.

    Attributes:
        nats: the mean loss, nats a token, every token counting once.
        tokens: the number of predicted tokens.
    """

    nats: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(nats)."""
        return perplexity(self.nats)

    @property
    def bits(self) -> float:
        """Bits a token."""
        return self.nats / math.log(2)


def perplexity(nats: float) -> float:
    """exp(nats), infinity where that overflows.

    Example:
        >>> perplexity(0.0), perplexity(1e4)
        (1.0, inf)
    """
    return math.exp(nats) if nats < 700 else math.inf


def token_nats(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """The cross entropy of each token in nats, `[batch, time]`."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=targets, logits=at_least_float32(logits)
    )


class TrainStep:
    """The training step: `step(inputs, targets)` with int32 `[batch, time]` each.

        objective = mean(nats) + alpha * AR + beta * TAR
        gradient  = clip by the global norm of d(objective)/d(weights)
        rate      = state.learning_rate * time / base_window

    Args:
        model: the model.
        optimizer: its slots are made here. Its learning rate is assigned at each step.
        state: what the step changes.
        clip_norm: the largest global norm; 0 does not clip.
        alpha: activation regularisation.
        beta: temporal activation regularisation.
        base_window: scale the rate by the window's length over this; 0 does not scale.
    """

    def __init__(
        self,
        model: LanguageModel,
        optimizer: keras.optimizers.Optimizer,
        state: RunState,
        *,
        clip_norm: float = 0.0,
        alpha: float = 0.0,
        beta: float = 0.0,
        base_window: int = 0,
    ):
        self.model, self.optimizer, self.state = model, optimizer, state
        self.clip_norm, self.alpha, self.beta = clip_norm, alpha, beta
        self.base_window = base_window
        # Slots made inside the traced function could not be restored before the first step.
        optimizer.build(model.trainable_variables)
        self._failed = tf.Variable(False, trainable=False)
        self._failure = tf.Variable([0.0, 0.0, 0.0], trainable=False)
        batch = state.carried[0][0].shape[0]
        window = tf.TensorSpec([batch, None], tf.int32)
        self.function = tf.function(self._step, input_signature=[window, window])

    def __call__(self, inputs: tf.Tensor, targets: tf.Tensor) -> None:
        self.function(inputs, targets)

    def failure(self) -> Failure | None:
        """The first step that was not finite, if there was one. Waits for the device."""
        if not self._failed.numpy():
            return None
        loss, norm, rate = (float(value) for value in self._failure.numpy())
        return Failure(int(self.state.step.numpy()) + 1, loss, norm, rate)

    def _step(self, inputs: tf.Tensor, targets: tf.Tensor) -> None:
        state = self.state
        scaler = self.optimizer
        scales_loss = isinstance(scaler, keras.optimizers.LossScaleOptimizer)
        carried = [[tensor.read_value() for tensor in pair] for pair in state.carried]
        with tf.GradientTape() as tape:
            output = self.model(inputs, states=carried, training=True)
            nats = token_nats(output.logits, targets)
            loss = tf.reduce_mean(nats)
            penalty = activation_penalty(output.raw, output.dropped, self.alpha, self.beta)
            objective = loss if penalty is None else loss + penalty
            if scales_loss:
                objective = scaler.scale_loss(objective)
        variables = self.model.trainable_variables
        gradients = tape.gradient(objective, [variable.value for variable in variables])
        # Dense, also for an embedding: a sparse gradient names a row once for each time it was
        # used, and the norm of that is not the norm of the gradient.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        unit = tf.cast(scaler.dynamic_scale, tf.float32) if scales_loss else None
        norm = tf.linalg.global_norm(gradients)
        if self.clip_norm:
            limit = self.clip_norm * unit if scales_loss else self.clip_norm
            gradients, _ = tf.clip_by_global_norm(gradients, limit, use_norm=norm)
        loss, norm = tf.cast(loss, tf.float32), tf.cast(norm, tf.float32)
        finite = tf.math.is_finite(loss)
        if scales_loss:
            norm = norm / unit  # a norm that is not finite is the scaler's own business
        else:
            finite = finite & tf.math.is_finite(norm)
        rate = state.learning_rate.read_value()
        if self.base_window:
            rate = rate * tf.cast(tf.shape(inputs)[1], tf.float32) / self.base_window
        total = tf.reduce_sum(tf.cast(nats, tf.float64))
        tokens = tf.cast(tf.size(nats), tf.float64)

        def update() -> tf.Tensor:
            self.optimizer.learning_rate.assign(rate)
            self.optimizer.apply(gradients, variables)
            for old, new in zip(state.carried, output.states, strict=True):
                for variable, value in zip(old, new, strict=True):
                    variable.assign(value)
            state.step.assign_add(1)
            state.gradient_norm.assign(norm)
            for nats_sum, count in (
                (state.epoch_nats, state.epoch_tokens),
                (state.log_nats, state.log_tokens),
            ):
                nats_sum.assign_add(total)
                count.assign_add(tokens)
            return tf.constant(True)

        def keep() -> tf.Tensor:
            seen = tf.stack([loss, norm, rate])
            self._failure.assign(tf.where(self._failed, self._failure, seen))
            self._failed.assign(True)
            return tf.constant(False)

        tf.cond(finite & ~self._failed, update, keep)


class Evaluator:
    """Evaluates a model on columns of text, the state carried from window to window.

    Args:
        model: the model; it runs with `training=False`.
        batch_size: the number of columns.
    """

    def __init__(self, model: LanguageModel, batch_size: int):
        self.model = model
        zeros = model.zero_state(batch_size)
        self._carried = [[tf.Variable(t, trainable=False) for t in pair] for pair in zeros]
        self._nats = tf.Variable(0, dtype=tf.float64, trainable=False)
        window = tf.TensorSpec([batch_size, None], tf.int32)
        self.function = tf.function(self._window, input_signature=[window, window])

    def __call__(
        self, columns: np.ndarray, window: int, stop: Callable[[], bool] = lambda: False
    ) -> Evaluation | None:
        """The loss over all of `columns`.

        Args:
            columns: int32 `[batch_size, n + 1]`, as `stream.columns` makes them.
            window: steps at a time; the result does not depend on it, memory does.
            stop: asked after each window; `True` ends the evaluation.

        Returns:
            The evaluation, or `None` if it was ended.
        """
        for pair in self._carried:
            for tensor in pair:
                tensor.assign(tf.zeros_like(tensor))
        self._nats.assign(0)
        lengths = stream.window_lengths(columns.shape[1] - 1, window, random=False)
        for inputs, targets in stream.windows(columns, lengths):
            self.function(inputs, targets)
            if stop():
                return None
        tokens = columns.shape[0] * (columns.shape[1] - 1)
        return Evaluation(float(self._nats.numpy()) / tokens, tokens)

    def _window(self, inputs: tf.Tensor, targets: tf.Tensor) -> None:
        carried = [[tensor.read_value() for tensor in pair] for pair in self._carried]
        output = self.model(inputs, states=carried, training=False)
        for old, new in zip(self._carried, output.states, strict=True):
            for variable, value in zip(old, new, strict=True):
                variable.assign(value)
        nats = token_nats(output.logits, targets)
        self._nats.assign_add(tf.reduce_sum(tf.cast(nats, tf.float64)))


def evaluate(
    model: LanguageModel, ids: np.ndarray, batch_size: int, window: int, what: str = "the text"
) -> Evaluation:
    """The loss of a model on a numbered text.

    Args:
        model: the model.
        ids: int32 `[tokens]`.
        batch_size: the text is read in so many columns, each begun with the zero state. With 1
            every token but the first is predicted from all that comes before it.
        window: steps at a time.
        what: the text's name for an error message.

    Returns:
        The mean loss, nats a token, and the number of tokens it is over.

    Raises:
        UserError: the text is too short for the batch size.

    Example:
        >>> model = LanguageModel(5, embedding_dim=2, hidden_units=(2,))
        >>> model.set_weights([0 * weight for weight in model.get_weights()])
        >>> round(evaluate(model, np.arange(10) % 5, batch_size=2, window=3).perplexity, 6)
        5.0
    """
    columns = stream.columns(ids, batch_size, what=what)
    evaluation = Evaluator(model, batch_size)(columns, window)
    assert evaluation is not None
    return evaluation
