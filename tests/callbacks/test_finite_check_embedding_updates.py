"""`FiniteCheck` with optimizers whose update fails if the gradient of an `Embedding` is NaN.

Keras 3 divides the gradient, which has only some rows, by a tensor of all rows. The division fails
if a divisor is NaN. Other weights may have changed before.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import MODES, fit, same
from replicas import two_replicas
from stack_marks import extended, needs_keras3, quick_rows

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

layers, optimizers = keras.layers, keras.optimizers
OPTIMIZERS = {
    "rmsprop": lambda: optimizers.RMSprop(1e-2),
    "centered": lambda: optimizers.RMSprop(1e-2, centered=True),
    "adagrad": lambda: optimizers.Adagrad(1e-2),
    "adadelta": lambda: optimizers.Adadelta(1.0),
}
BAD = 1  # the number of the bad batch, from 0


class WithOwnStep(keras.Model):
    """A model with a training step of its own."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.update(gradients, weights)
        return {"loss": loss}

    def update(self, gradients, weights):
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))


class InABranch(WithOwnStep):
    """The same, with the update in a branch of the graph."""

    def update(self, gradients, weights):
        tf.cond(
            tf.size(gradients[0].indices) > 0,
            lambda: [super(InABranch, self).update(gradients, weights), tf.constant(True)][1],
            lambda: tf.constant(False),
        )


class Same(keras.constraints.Constraint):
    """A custom constraint that changes nothing."""

    def __call__(self, w):
        return w * 1.0


KINDS = {"fit": keras.Model, "constraint": keras.Model, "own step": WithOwnStep}


def make(optimizer, kind="own step", mode="graph", loss="mse", cls=None, strategy=None):
    keras.utils.set_random_seed(2)
    with (strategy or tf.distribute.get_strategy()).scope():
        inputs = layers.Input((5,), dtype="int32")
        constraint = Same() if kind == "constraint" else None
        hidden = layers.Flatten()(layers.Embedding(20, 3)(inputs))
        outputs = layers.Dense(1, kernel_constraint=constraint)(hidden)
        model = (cls or KINDS[kind])(inputs, outputs)
        model.compile(OPTIMIZERS[optimizer](), loss, **MODES[mode])
    return model


def batches(count=4):
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, (8 * count, 5)).astype("int32")
    return ids, rng.normal(size=(8 * count, 1)).astype("float32")


def without_bad(array):
    return np.delete(array, np.s_[8 * BAD : 8 * BAD + 8], axis=0)


def state(model):
    """Returns copies of all weights and of the optimizer's slots and counters."""
    variables = model.optimizer.variables
    slots = variables() if callable(variables) else variables
    return [*model.get_weights(), *(np.array(v.numpy()) for v in slots)]


def nan_for_large_labels(labels, predicted):
    """A loss that makes NaN from finite labels."""
    return tf.reduce_mean((predicted - labels) ** 2, -1) * tf.sqrt(9.0 - labels[:, 0])


def skipped(ours, plain, x, y, **kwargs):
    """Trains one model with a bad batch, and the other without this batch."""
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped a step"):
        fit(ours, x, y, check, **kwargs)
    assert (check.skipped, check.reports[0].step) == (1, BAD + 1)
    fit(plain, without_bad(x), without_bad(y))
    same(state(ours), state(plain), "xla")
    return check.reports[0]


@quick_rows(
    "graph-own step-adagrad", "graph-constraint-rmsprop", "graph-fit-centered", "eager-own*rmsprop"
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["graph", "eager", "xla", "four steps an execution"])
def test_a_step_with_nan_is_skipped(optimizer, kind, mode):
    x, y = batches()
    y[8 * BAD + 3] = np.nan
    report = skipped(make(optimizer, kind, mode), make(optimizer, kind), x, y)
    assert report.first.frame.label == "y, data"


@quick_rows("own step-adagrad")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_is_nan_for_finite_data_has_a_report(optimizer, kind):
    x, y = batches()
    y[8 * BAD + 3] = 10.0
    models = [make(optimizer, kind, loss=nan_for_large_labels) for _ in range(2)]
    report = skipped(*models, x, y)
    assert report.first.frame.kind == "loss"
    assert "in row 3" in report.causes[0].evidence


@quick_rows("adagrad-own step")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_error_leaves_the_state_from_before_the_step(optimizer, kind):
    x, y = batches()
    y[8 * BAD + 3] = np.nan
    model, plain = make(optimizer, kind), make(optimizer, kind)
    with pytest.raises(NonFiniteError) as caught:
        fit(model, x, y, FiniteCheck())
    assert caught.value.report.note == "The weights have their values from before the step."
    fit(plain, x[: 8 * BAD], y[: 8 * BAD])
    same(state(model), state(plain), "xla")


@extended
@pytest.mark.parametrize("kind", ["fit", "own step"])
def test_two_replicas_skip_the_step(kind):
    x, y = batches()
    y[8 * BAD + 3] = np.nan
    strategy = two_replicas()
    skipped(*(make("adagrad", kind, strategy=strategy) for _ in range(2)), x, y)


@needs_keras3("update that fails")
@quick_rows("own step")
@pytest.mark.parametrize("kind", ["own step", "branch"])
def test_a_failed_operation_of_an_update_is_undone(kind):
    """The update fails although the gradient is finite, or where the gradient is not known."""
    x, y = batches()
    if kind == "branch":
        y[8 * BAD + 3] = np.nan
        given = {"optimizer": "adagrad", "cls": InABranch}
    else:  # the square of the gradient is infinite, and infinity minus infinity is NaN
        y[8 * BAD : 8 * BAD + 8] = 1e25
        given = {"optimizer": "centered", "loss": lambda y, p: tf.reduce_mean(p * y, -1)}
    model, plain = make(**given), make(**given)
    with pytest.raises((NonFiniteError, tf.errors.InvalidArgumentError)) as caught:
        fit(model, x, y, FiniteCheck())
    if kind == "branch":
        assert "The weights have their values from before the step" in caught.value.report.note
    fit(plain, x[: 8 * BAD], y[: 8 * BAD])
    same(state(model), state(plain), "xla")
