"""`--config.gradients.every`: its output, and no effect on training."""

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SOAK_ON_KERAS_2, extended

from tfwd import _keras
from tfwd.lm.gradient_moments import GradientMeter
from tfwd.lm.losses import token_nats
from tfwd.lm.model import LanguageModel
from tfwd.runs.training.step_variables import StepVariables

pytestmark = SOAK_ON_KERAS_2


def make(**kwargs: float) -> tuple[LanguageModel, StepVariables]:
    model = LanguageModel(7, embedding_dim=4, hidden_units=(5, 4), seed=1, **kwargs)
    state = StepVariables(model.zero_state(3), 1.0)
    for pair in state.carried:
        for tensor in pair:
            tensor.assign(tf.random.stateless_normal(tensor.shape, [1, 2]))
    return model, state


@extended
def test_record_is_of_the_columns_with_their_states() -> None:
    model, state = make()
    ids = np.random.default_rng(0).integers(0, 7, size=(3, 6)).astype("int32")
    inputs, targets = tf.constant(ids[:, :-1]), tf.constant(ids[:, 1:])
    record = GradientMeter(model, state)(inputs, targets)
    rows = []
    for b in range(3):
        carried = [[t[b : b + 1] for t in pair] for pair in state.carried]
        with tf.GradientTape() as tape:
            logits = model(inputs[b : b + 1], states=carried).logits
            loss = tf.reduce_mean(token_nats(logits, targets[b : b + 1]))
        found = tape.gradient(
            loss, [_keras.variables.tf_variable(v) for v in model.trainable_variables]
        )
        rows.append(np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in found]))
    rows = np.stack(rows)
    assert record["squared_mean"] == pytest.approx((rows**2).mean(), rel=1e-4)
    assert record["square_of_mean"] == pytest.approx((rows.mean(0) ** 2).mean(), rel=1e-4)
    # Three columns: V = 3/2 sum (s - m^2), and G = sum m^2 - V/3. G may be below zero, so
    # that lines of the log can be averaged.
    variance = 1.5 * ((rows**2).mean(0) - rows.mean(0) ** 2).sum()
    signal = (rows.mean(0) ** 2).sum() - variance / 3
    assert record["variance"] == pytest.approx(variance, rel=1e-3)
    assert record["signal"] == pytest.approx(signal, rel=1e-3, abs=1e-4 * float(variance))
    assert record["noise_scale"] == (
        record["variance"] / record["signal"] if signal > 0 else np.inf
    )
    first = model.trainable_variables[0]
    size = int(np.prod(first.shape))
    wanted = (rows[:, :size] ** 2).mean()
    assert record[f"squared_mean/{_keras.variables.path(first)}"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
def test_measuring_changes_nothing() -> None:
    model, state = make(weight_dropout=0.5, embedding_dropout=0.3, hidden_dropout=0.2)
    before = [v.numpy() for v in model.variables] + [t.numpy() for p in state.carried for t in p]
    meter = GradientMeter(model, state)
    for length in (4, 6):
        ids = tf.ones([3, length], tf.int32)
        assert np.isfinite(meter(ids, ids)["squared_mean"])
    after = [v.numpy() for v in model.variables] + [t.numpy() for p in state.carried for t in p]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
