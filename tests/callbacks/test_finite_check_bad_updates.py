"""`FiniteCheck` on finite gradients whose update is not finite: an overflow, or a division by 0."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import BAD, MODES, ByOperations, fit, tf_variable, write
from planted_nan_models import data, state
from stack_marks import IS_KERAS_2, once, quick_rows
from tables_by_make_target import with_slow_rest

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

# In float16, the square of a gradient overflows at 256.
OF_LARGE_GRADIENTS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "global_clipnorm": lambda: keras.optimizers.SGD(1e-3, global_clipnorm=1.0),
}


# Averages that are 1 in the dtype of the weights. Their corrections divide by 1 - 1.
OF_AVERAGES = {
    "bfloat16": ("bfloat16", keras.optimizers.Nadam),
    "float32": ("float32", lambda: keras.optimizers.Adam(beta_1=1 - 1e-9)),
}


def half_model(optimizer, dtype="float16"):
    keras.utils.set_random_seed(1)
    kind = {"dtype": dtype}
    model = keras.Sequential(
        [keras.Input((4,), **kind), keras.layers.Dense(3, **kind), keras.layers.Dense(1, **kind)]
    )
    model.compile(optimizer, "mae", jit_compile=False)
    return model


def values(model):
    variables = model.optimizer.variables
    return [*model.get_weights(), *map(np.asarray, variables() if IS_KERAS_2 else variables)]


def large_data():
    rng = np.random.default_rng(0)
    return 1000 * rng.normal(size=(8, 4)).astype("float16"), rng.normal(size=(8, 1)).astype("f")


def are_finite(found):
    return all(np.isfinite(np.asarray(value, "float64")).all() for value in found)


def check_first_update(make_model, x, y):
    """Checks that plain training makes bad weights, and that `FiniteCheck` keeps the good ones."""
    plain = make_model()
    plain.fit(x, y, verbose=0)
    assert not are_finite(values(plain))
    model = make_model()
    before = model.get_weights()
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, y, verbose=0, callbacks=[FiniteCheck()])
    assert caught.value.report.step == 1 and caught.value.report.first.frame.kind == "update"
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert are_finite(values(model))


@pytest.mark.parametrize("name", OF_LARGE_GRADIENTS)
def test_an_update_that_overflows_is_not_made(name):
    check_first_update(lambda: half_model(OF_LARGE_GRADIENTS[name]()), *large_data())


@pytest.mark.parametrize("name", OF_AVERAGES)
def test_an_update_that_divides_by_0_is_not_made(name):
    dtype, optimizer = OF_AVERAGES[name]
    x, y = large_data()
    check_first_update(lambda: half_model(optimizer(), dtype), x.astype("float32") / 1000, y)


@pytest.mark.skipif(not IS_KERAS_2, reason="Nadam of Keras 3 is right")
def test_nadam_makes_no_single_weight_infinite():
    """Checks a defect of Keras 2.15: its trace divides by 0 if the model has a single weight.

    A checked step has another trace, whose update is finite or reported.
    """
    found = []
    for callbacks in ([], [FiniteCheck()]):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), dense])
        model.compile(keras.optimizers.Nadam(0.01), "mse", jit_compile=False)
        with contextlib.suppress(NonFiniteError):
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0, callbacks=callbacks)
        found.append(are_finite(model.get_weights()))
    assert found == [False, True]


@quick_rows("*range0-graph", "*finite-graph")
@pytest.mark.parametrize("mode", with_slow_rest(["graph", "xla"], {"graph"}))
@pytest.mark.parametrize(
    ("optimizer", "cause"),
    [
        (lambda: keras.optimizers.Adam(0.1, epsilon=0.0), "an update out of range"),
        (lambda: keras.optimizers.SGD(3e38), "an update out of range"),
        (lambda: keras.optimizers.AdamW(0.1, weight_decay=float("inf")), "an update out of range"),
        (lambda: keras.optimizers.SGD(float("nan")), "a learning rate that is not finite"),
        (lambda: keras.optimizers.SGD(-0.1), "a learning rate that is not finite or negative"),
    ],
)
def test_an_update_that_is_not_finite_changes_nothing(optimizer, cause, mode):
    x, y = 100 * np.ones((8, 6), "float32"), np.ones((8, 1), "float32")
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1), keras.layers.ReLU()])
    model.set_weights([-np.ones((6, 1)), np.zeros(1)] if "Adam" in cause else model.get_weights())
    model.layers[0].set_weights([np.full((6, 1), -1.0), np.zeros(1)])
    if "update" in cause and optimizer().__class__.__name__ == "SGD":
        model.layers[0].set_weights([np.full((6, 1), 1.0), np.zeros(1)])
    model.compile(optimizer(), "mse", **MODES[mode])
    model.optimizer.build(model.trainable_variables)
    before = state(model)
    with pytest.raises(NonFiniteError) as caught:
        fit(model, x, y, FiniteCheck())
    assert caught.value.report.causes[0].name.startswith(cause)
    held = len(model.variables) + len(model.optimizer.variables)
    for ours, theirs in zip(state(model)[:held], before[:held], strict=True):
        np.testing.assert_array_equal(ours, theirs)


class StepByOperations(keras.Sequential):
    """A training step that updates its weights by operations."""

    def train_step(self, data):
        x, y = data
        weights = [tf_variable(v) for v in self.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            write(weight, weight - 0.001 * gradient * tf.exp(tf.abs(gradient)))
        return {"loss": loss}


@quick_rows("optimizer-graph")
@pytest.mark.parametrize("mode", with_slow_rest(["graph", "eager", "xla"], {"graph"}))
@pytest.mark.parametrize("kind", ["optimizer", "training step"])
def test_an_infinity_that_an_operation_writes(kind, mode):
    """Checks that a bad batch leaves weights and slots unchanged.

    The rest equals training without the bad batch.
    """
    x, y = data(4)
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 32]
    checks = [[], [FiniteCheck("skip")], [FiniteCheck()]]
    held = []
    for callbacks in checks:
        keras.utils.set_random_seed(1)
        model = (keras.Sequential if kind == "optimizer" else StepByOperations)(
            [keras.layers.Input((6,)), keras.layers.Dense(1, name="last")]
        )
        model.compile(
            ByOperations() if kind == "optimizer" else "sgd", **{"loss": "mse", **MODES[mode]}
        )
        if not callbacks:
            fit(model, x[rows], y[rows])
        elif callbacks[0].action == "skip":
            x[8 * BAD + 1, 0] = 2000.0
            with pytest.warns(UserWarning, match="weight '.*kernel': update has"):
                fit(model, x, y, *callbacks)
        else:
            with pytest.raises(NonFiniteError) as caught:
                fit(model, x, y, *callbacks)
            assert "The weights have their values from before the step." in caught.value.report.note
            assert all(np.isfinite(weight).all() for weight in model.get_weights())
        slots = model.optimizer.sums if kind == "optimizer" else []
        held.append([v.numpy() for v in [*model.variables, *slots]])
    assert checks[1][0].skipped == 1
    for ours, theirs in zip(held[1], held[0], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@once
def test_finite_but_enormous_steps_are_made():
    """Checks that a step with enormous but finite values is made.

    One pass over such tensors cannot decide, so a closer look follows.
    """
    x, y = data(3)
    models = []
    for callbacks in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, name="d")])
        model.compile(keras.optimizers.SGD(1e-36), "mae", jit_compile=False)
        fit(model, 1e36 * np.abs(x) / np.abs(x).max(), 0 * y, *callbacks)
        models.append(model)
    assert callbacks[0].reports == []
    for ours, theirs in zip(state(models[1]), state(models[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)
