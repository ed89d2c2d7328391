"""The training step against its formula."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, extended, once, quick_rows

from tfwd import _keras
from tfwd.lm import training_step as train_step
from tfwd.lm.data import text_windows
from tfwd.lm.model import LanguageModel
from tfwd.lm.training_step import TrainStep
from tfwd.runs.training.optimizer import make_optimizer
from tfwd.runs.training.step_variables import StepVariables

pytestmark = SLOW_ON_KERAS_2

INPUTS = tf.constant([[1, 2, 3, 1], [5, 6, 2, 2]], tf.int32)
TARGETS = tf.constant([[2, 3, 1, 0], [6, 2, 2, 4]], tf.int32)


def make(rate=0.5, optimizer="sgd", policy="float32", model=None, **options):
    model = LanguageModel(7, 4, (6, 4), seed=3, dtype_policy=policy, **(model or {}))
    state = StepVariables(model.zero_state(2), rate)
    made = make_optimizer(optimizer, rate, dtype_policy=policy)
    return TrainStep(model, made, state, **options)


def weights(step):
    return [variable.numpy() for variable in step.model.trainable_variables]


def expected_gradients(model, alpha=0.0, beta=0.0):
    """Returns the gradients by Keras's own loss, in eager mode, with the penalties written out."""
    with tf.GradientTape() as tape:
        output = model(INPUTS, training=False)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(TARGETS, output.logits)
        total = loss + alpha * tf.reduce_mean(output.dropped**2)
        total += beta * tf.reduce_mean((output.raw[:, 1:] - output.raw[:, :-1]) ** 2)
    gradients = tape.gradient(
        total, [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    )
    return float(loss), [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


def norm(arrays):
    return np.sqrt(sum((array.astype(np.float64) ** 2).sum() for array in arrays))


@quick_rows("True-*")
@pytest.mark.parametrize(("tied", "penalties"), [(True, (2.0, 3.0)), (False, (0.0, 0.0))])
def test_a_step_is_its_formula(tied, penalties):
    step = make(rate=0.5, model={"tie_weights": tied}, alpha=penalties[0], beta=penalties[1])
    before = weights(step)
    loss, gradients = expected_gradients(step.model, *penalties)
    step(INPUTS, TARGETS)
    for old, new, gradient in zip(before, weights(step), gradients, strict=True):
        np.testing.assert_allclose(new, old - 0.5 * gradient, atol=1e-6)
    assert step.state.take_log_loss() == pytest.approx(loss, abs=1e-6)  # without the penalties
    assert float(step.state.gradient_norm) == pytest.approx(norm(gradients), rel=1e-5)


def test_clipping_is_by_the_global_norm():
    step = make(rate=1.0, clip_norm=0.01)
    before = weights(step)
    _, gradients = expected_gradients(step.model)
    assert norm(gradients) > 0.1
    step(INPUTS, TARGETS)
    changes = [old - new for old, new in zip(before, weights(step), strict=True)]
    assert norm(changes) == pytest.approx(0.01, rel=1e-3)
    for change, gradient in zip(changes, gradients, strict=True):
        np.testing.assert_allclose(change, gradient * 0.01 / norm(gradients), atol=1e-7)
    assert float(step.state.gradient_norm) == pytest.approx(norm(gradients), rel=1e-5)


def test_coupled_decay_is_added_after_clipping():
    step = make(rate=1.0, clip_norm=0.01, l2=0.5)
    before = weights(step)
    _, gradients = expected_gradients(step.model)
    step(INPUTS, TARGETS)
    for old, new, gradient in zip(before, weights(step), gradients, strict=True):
        clipped = gradient * 0.01 / norm(gradients)
        np.testing.assert_allclose(new, old - clipped - 0.5 * old, atol=1e-6)
    assert float(step.state.gradient_norm) == pytest.approx(norm(gradients), rel=1e-5)


@pytest.mark.slow
def test_coupled_decay_under_a_loss_scale():
    steps = [make(rate=1.0, policy=p, l2=0.5) for p in ("float32", "mixed_float16")]
    for step in steps:
        step(INPUTS, TARGETS)
    for one, other in zip(*map(weights, steps), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


@extended
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_an_embedding_that_is_only_looked_up(tied):
    """Checks rows of an embedding: the window has no 0 and no 4; a tied gradient is dense."""
    model = LanguageModel(7, 4, (6, 4), seed=3, tie_weights=tied)
    made = make_optimizer("sgd", 0.0, weight_decay=0.5, decay_scale="absolute", decay_sparse="rows")
    step = TrainStep(model, made, StepVariables(model.zero_state(2), 1e-30), sparse=True)
    (table,) = (v for v in model.trainable_variables if _keras.variables.name(v) == "embeddings")
    old = table.numpy()
    step(INPUTS, TARGETS)
    expected = np.full(7, 0.5)
    if not tied:
        expected[[0, 4]] = 1
    np.testing.assert_allclose(table.numpy(), old * expected[:, None], rtol=1e-6)


@extended
def test_a_sparse_gradient_has_the_norm_of_the_dense_one():
    found = []
    for sparse in (False, True):
        step = make(rate=0.5, model={"tie_weights": False}, sparse=sparse, clip_norm=0.01)
        step(INPUTS, TARGETS)
        found.append((float(step.state.gradient_norm), weights(step)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7)


def test_the_rate_follows_the_windows_length():
    plain, scaled = make(rate=0.5), make(rate=0.5, base_window=8)
    before = weights(plain)
    plain(INPUTS, TARGETS)
    scaled(INPUTS, TARGETS)
    for old, new, half in zip(before, weights(plain), weights(scaled), strict=True):
        np.testing.assert_allclose(half - old, (new - old) / 2, atol=1e-6)
    assert float(scaled.state.learning_rate) == 0.5
    assert float(scaled.optimizer.learning_rate.numpy()) == 0.25


@extended
def test_random_lengths_trace_once():
    step = make(model={"weight_dropout": 0.5, "hidden_dropout": 0.2}, base_window=5)
    columns = text_windows.columns(np.arange(200) % 7, 2)
    lengths = text_windows.window_lengths(99, 12, random=True, seed=1)
    assert len(set(lengths)) > 3
    for inputs, targets in text_windows.windows(columns, lengths):
        step(inputs, targets)
    assert step.function.experimental_get_tracing_count() == 1


def test_the_state_is_carried_and_the_sums_are_of_tokens():
    step = make(rate=1e-30)  # so that the weights stay
    model = step.model
    step(INPUTS[:, :3], TARGETS[:, :3])
    step(INPUTS[:, 3:], TARGETS[:, 3:])
    loss, _ = expected_gradients(model)
    assert step.state.take_log_loss() == pytest.approx(loss, abs=1e-6)
    states = model(INPUTS, training=False).states
    for pair, carried in zip(states, step.state.carried, strict=True):
        for state, variable in zip(pair, carried, strict=True):
            np.testing.assert_allclose(state, variable, atol=1e-6)
    assert step.state.take_epoch_loss() == pytest.approx(loss, abs=1e-6)
    assert not any(variable.numpy().any() for pair in step.state.carried for variable in pair)
    assert int(step.state.step) == 2


def test_a_step_that_is_not_finite_changes_nothing():
    step = make(rate=0.5, optimizer="adam", base_window=8)
    step(INPUTS, TARGETS)
    step.state.learning_rate.assign(0.25)
    step.model.decoder.bias.assign(np.full(7, np.nan))
    before = weights(step), [v.numpy() for v in step.optimizer.variables]
    carried = [v.numpy() for pair in step.state.carried for v in pair]
    step(INPUTS, TARGETS)
    step.model.decoder.bias.assign(np.zeros(7))
    step(INPUTS, TARGETS)  # is finite, but the run is over
    step.model.decoder.bias.assign(np.full(7, np.nan))
    after = weights(step), [v.numpy() for v in step.optimizer.variables]
    for old, new in zip(before[0] + before[1], after[0] + after[1], strict=True):
        np.testing.assert_array_equal(old, new)
    now = [v.numpy() for pair in step.state.carried for v in pair]
    for old, new in zip(carried, now, strict=True):
        np.testing.assert_array_equal(old, new)
    failure = step.failure()
    assert failure.step == 2 and np.isnan(failure.loss) and failure.learning_rate == 0.125


@pytest.mark.slow
@once
@pytest.mark.parametrize("whole", [False, True])
def test_a_step_that_is_left_out_is_as_if_it_had_not_been(whole, monkeypatch):
    """Checks that a skipped step has no effect, draws included.

    The next step equals the step of a model that never saw the bad window.
    """
    own = train_step.token_nats
    monkeypatch.setattr(
        train_step,
        "token_nats",
        lambda logits, targets: (
            own(logits, targets) * tf.where(tf.reduce_any(targets == 5), np.inf, 1.0)
        ),
    )
    rates = {"weight_dropout": 0.5, "hidden_dropout": 0.3, "output_dropout": 0.3}
    skipped, plain = (make(optimizer="adam", model=rates, whole=whole) for _ in range(2))
    bad = tf.constant([[2, 3, 1, 0], [6, 2, 5, 4]], tf.int32)
    for step in (skipped, plain):
        step(INPUTS, TARGETS)
    skipped(INPUTS, bad)
    report = skipped.diagnose(INPUTS, bad)
    assert report.sentence.startswith("loss: +Inf")
    assert skipped.failure().step == 2
    skipped.resume_after_failure()
    assert skipped.failure() is None and int(skipped.state.step) == 2
    for step in (skipped, plain):
        step(INPUTS, TARGETS)
    for one, other in zip(weights(skipped), weights(plain), strict=True):
        np.testing.assert_array_equal(one, other)


@extended
def test_finite_steps_are_made_however_large():
    step = make(whole=True)
    step.model.decoder.bias.assign(np.linspace(-1, 1, 7) * 1e25)
    step(INPUTS, TARGETS)
    assert step.failure() is None and int(step.state.step) == 1


@extended
def test_unchecked_steps_are_made():
    step = make(checked=False)
    step.model.decoder.bias.assign(np.full(7, np.nan))
    step(INPUTS, TARGETS)
    assert step.failure() is None and int(step.state.step) == 1
    assert all(np.isnan(each).any() for each in weights(step))


@extended
def test_a_learning_rate_that_is_not_finite():
    step = make()
    before = weights(step)
    step.state.learning_rate.assign(np.inf)
    step(INPUTS, TARGETS)
    assert step.failure().learning_rate == np.inf
    report = step.diagnose(INPUTS, TARGETS)
    assert report.sentence.startswith("learning rate: +Inf")
    assert [cause.name for cause in report.causes] == [
        "a learning rate that is not finite or negative"
    ]
    for one, other in zip(weights(step), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_finite_run_has_no_failure():
    step = make()
    step(INPUTS, TARGETS)
    assert step.failure() is None


def test_half_precision_scales_the_loss_and_outlives_an_overflow():
    step = make(rate=0.5, policy="mixed_float16", clip_norm=0.01)
    optimizer = step.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    before = weights(step)
    optimizer.dynamic_scale.assign(2.0**40)  # float16 ends at 2^16
    step(INPUTS, TARGETS)
    assert step.failure() is None and float(optimizer.dynamic_scale.numpy()) == 2.0**39
    for old, new in zip(before, weights(step), strict=True):
        np.testing.assert_array_equal(old, new)
    optimizer.dynamic_scale.assign(2.0**8)
    step.state.take_epoch_loss()  # the state to zero
    step(INPUTS, TARGETS)
    changes = [old - new for old, new in zip(before, weights(step), strict=True)]
    assert norm(changes) == pytest.approx(0.5 * 0.01, rel=0.02)
    reference = make()
    reference(INPUTS, TARGETS)
    assert float(step.state.gradient_norm) == pytest.approx(
        float(reference.state.gradient_norm), rel=0.02
    )
