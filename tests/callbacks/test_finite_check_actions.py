"""`FiniteCheck` at a bad step: the state that stays, and each action."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import BAD, MODES, ByOperations, fit, make, same, tf_variable, write
from planted_nan_models import data, state
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended, needs_keras3, once, quick_rows
from tables_by_make_target import with_slow_rest

import tfwd
from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError


@pytest.mark.parametrize(
    "case",
    with_slow_rest(["graph, labels", "xla, labels", "eager, data"], {"graph, labels"}),
)
def test_all_is_as_it_was_before_the_step(case):
    mode, place = case.split(", ")
    x, y = data(4)
    good = make(mode=mode)
    keras.utils.set_random_seed(4)
    fit(good, x[: 8 * BAD], y[: 8 * BAD])
    bad = make(mode=mode)
    (x if place == "data" else y)[8 * BAD + 5, 0] = np.nan
    keras.utils.set_random_seed(4)
    with pytest.raises(NonFiniteError):
        fit(bad, x, y, FiniteCheck())
    same(state(bad), state(good), mode)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"four steps an execution"}))
def test_skip_is_training_without_the_batch(mode):
    x, y = data(5)
    good = make(mode=mode)
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 40]
    keras.utils.set_random_seed(4)
    fit(good, x[rows], y[rows])
    bad = make(mode=mode)
    x[8 * BAD + 5, 0] = np.inf
    check = FiniteCheck("skip")
    keras.utils.set_random_seed(4)
    with pytest.warns(UserWarning, match="skipped a step: data 'x'"):
        fit(bad, x, y, check)
    assert check.skipped == 1
    same(state(bad), state(good), mode)


@once
def test_skip_gives_up():
    x, y = data(6)
    x[8:, 0] = np.nan
    with pytest.warns(UserWarning), pytest.raises(NonFiniteError) as caught:
        fit(make(), x, y, FiniteCheck("skip", max_consecutive=2))
    assert caught.value.report.note == (
        "Before this step, 2 consecutive bad steps were skipped. In each of these steps, NaN or "
        "infinity began in data x: check whether all batches are bad, and repair the data. The "
        "weights have their values from before the step."
    )


def test_an_epoch_whose_steps_are_all_left_out_has_no_loss():
    x, y = data(4)
    x[:16, 0] = np.nan
    with pytest.warns(UserWarning, match="skipped") as warned:
        history = fit(make(), x[:8], y[:8], FiniteCheck("skip"), epochs=2).history
    said = [str(one.message) for one in warned if "steps of epoch" in str(one.message)]
    assert len(said) == 2
    assert all(np.isnan(value) for values in history.values() for value in values)
    with pytest.warns(UserWarning, match="skipped"):
        history = fit(make(), x[8:24], y[8:24], FiniteCheck("skip")).history
    assert np.isfinite(history["loss"]).all()


def test_two_replicas_leave_a_step_out_together():
    strategy = two_replicas()
    x, y = data(5)
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 40]
    good = make(strategy=strategy)
    keras.utils.set_random_seed(4)
    fit(good, x[rows], y[rows])
    x[8 * BAD + 6, 0] = np.nan  # on the second replica
    bad = make(strategy=strategy)
    check = FiniteCheck("skip")
    keras.utils.set_random_seed(4)
    with pytest.warns(UserWarning, match=f"step {BAD + 1}, replica 1"):
        fit(bad, x, y, check)
    assert check.reports[0].first.detail.summary.size == 24
    same(state(bad), state(good))


@pytest.mark.float16
def test_a_scale_that_is_lowered_is_no_error():
    policy = keras.mixed_precision.Policy if IS_KERAS_2 else keras.DTypePolicy
    policy = policy("mixed_float16")
    x, y = data(4)
    models = []
    for callbacks in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, activation="tanh", dtype=policy),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        if IS_KERAS_2:
            optimizer = keras.mixed_precision.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), initial_scale=2.0**30
            )
        else:
            optimizer = keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.01), initial_scale=2.0**30
            )
        model.compile(optimizer, "mse", jit_compile=False)
        fit(model, 100 * x, 100 * y, *callbacks, epochs=5)
        models.append(model)
    assert callbacks[0].scaled_down > 3
    assert callbacks[0].reports == []
    for ours, theirs in zip(state(models[1]), state(models[0]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
@needs_keras3("gradient accumulation")
def test_accumulated_gradients():
    x, y = data(9)
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 72]
    optimizer = lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)  # noqa: E731
    good, bad = make(optimizer=optimizer()), make(optimizer=optimizer())
    keras.utils.set_random_seed(4)
    fit(good, x[rows], y[rows])
    x[8 * BAD + 6, 0] = np.nan
    keras.utils.set_random_seed(4)
    with pytest.warns(UserWarning, match="skipped"):
        fit(bad, x, y, FiniteCheck("skip"))
    same(state(bad), state(good))


class Careful(keras.Model):
    """A model with a custom training step of two updates."""

    def __init__(self):
        super().__init__()
        self.one, self.two = keras.layers.Dense(3, name="one"), keras.layers.Dense(1, name="two")
        self.second = keras.optimizers.SGD(0.1)

    def call(self, x):
        return self.two(self.one(x))

    def train_step(self, data):
        x, y = data
        for layer, optimizer in ((self.one, self.optimizer), (self.two, self.second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x) - y) ** 2)
            weights = layer.trainable_variables
            gradients = tape.gradient(loss, [tfwd._keras.variables.tf_variable(w) for w in weights])
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            if layer is self.one:  # the second half gets non-finite values
                x = tf.where(tf.reduce_max(x) > 1000.0, x * np.nan, x)
        return {"loss": loss}


@pytest.mark.parametrize("mode", with_slow_rest(["graph", "xla"], {"graph"}))
def test_a_custom_training_step(mode):
    x, y = data(4)
    models = [Careful(), Careful()]
    rows = np.r_[0 : 8 * BAD, 8 * (BAD + 1) : 32]
    for model in models:
        keras.utils.set_random_seed(5)
        model(x[:8])
        model.compile(keras.optimizers.SGD(0.1), **MODES[mode])
    models[1].set_weights(models[0].get_weights())
    fit(models[0], x[rows], y[rows])
    x[8 * BAD + 1, 0] = 2000.0
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match=r"layer 'one' \(call 2\): forward input"):
        fit(models[1], x, y, check)
    for ours, theirs in zip(models[1].get_weights(), models[0].get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


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


@pytest.mark.slow
def test_every_other_step():
    x, y = data(5)
    plain, checked = make(), make()
    keras.utils.set_random_seed(4)
    fit(plain, x, y)
    keras.utils.set_random_seed(4)
    fit(checked, x, y, FiniteCheck(every_n_steps=2))
    same(state(checked), state(plain))


def test_bad_steps_in_a_row_are_those_without_a_good_one_between():
    x, y = data(5)
    x[3] = x[19] = np.nan
    check = FiniteCheck("skip", max_consecutive=1)
    with pytest.warns(UserWarning, match=r"skipped a step: .*\(NaN or infinity in the input\)"):
        fit(make(), x, y, check)
    assert check.skipped == 2


@extended
def test_what_leaving_out_does_not_help_against():
    model = make()
    x, y = data(3)
    model.get_layer("last").bias.assign([np.nan])
    with pytest.raises(NonFiniteError, match="a skipped step changes no weight") as caught:
        fit(model, x, y, FiniteCheck("skip"))
    assert caught.value.report.step == 1


@pytest.mark.slow
@once
def test_a_step_that_was_not_looked_at():
    x, y = data(4)
    x[9] = np.nan
    with pytest.raises(NonFiniteError) as caught:
        fit(make(), x, y, FiniteCheck(every_n_steps=3))
    assert caught.value.report.step == 4
    assert "an unchecked step" in caught.value.report.causes[0].evidence
    assert "The weights before the step are lost: 'sequential" in caught.value.report.note
    assert "Then check each step (every_n_steps=1)" in caught.value.report.note


class BuiltBeforeItsLayers(keras.Model):
    """A subclassed model with its own step. `build` makes no weights, as in Keras 3."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, input_shape):
        self.built = True

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        return super().train_step(data)


def test_a_model_that_is_built_before_its_layers():
    x, y = data(2)
    found = []
    for check in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(4)
        model = BuiltBeforeItsLayers()
        model.build((None, 6))
        model.compile("adam", "mse", jit_compile=False)
        fit(model, x, y, *check)
        found.append(model.get_weights())
    same(*found)


class Accumulating(keras.Model):
    """A model that updates its weights after every second step, in a branch of the graph."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sums = [
            tf.Variable(tf.zeros(v.shape), trainable=False) for v in self.trainable_weights
        ]
        self.steps = tf.Variable(0, trainable=False)

    def train_step(self, data):
        x, y = data
        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)

        def update():
            sums = [tf.convert_to_tensor(total) for total in self.sums]
            self.optimizer.apply_gradients(zip(sums, self.trainable_variables, strict=True))
            for total in self.sums:
                total.assign(tf.zeros_like(total))
            return 1

        tf.cond(self.steps % 2 == 0, update, lambda: 1)
        return {"loss": loss}


@pytest.mark.parametrize("is_bad", [False, True])
def test_an_update_in_a_branch_of_the_graph(is_bad):
    x = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
    y, bad = x[:, :1] * 2, x.copy()
    bad[17, 2] = np.nan
    kept = np.r_[0:16, 24:48] if is_bad else np.arange(48)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((6,))
        models.append(Accumulating(inputs, keras.layers.Dense(1)(inputs)))
        models[-1].compile(keras.optimizers.Adam(0.01))
    options = {"batch_size": 8, "shuffle": False, "epochs": 2, "verbose": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        models[0].fit(bad if is_bad else x, y, callbacks=[FiniteCheck("skip")], **options)
    models[1].fit(x[kept], y[kept], **options)
    for ours, theirs in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert models[0].steps == models[1].steps


@pytest.mark.filterwarnings("ignore:FiniteCheck")
@pytest.mark.parametrize("mode", ["graph", "eager"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_sequential_without_inputs(number, mode):
    """Checks a model that has no weights before its first step, which may be bad."""
    x = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    bad = np.arange(40) // 8 == number
    results = []
    for given, callbacks in ((x[~bad], []), (np.where(bad[:, None], np.nan, x), ["skip"])):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("adam", "mse", **MODES[mode])
        labels = np.ones((len(given), 1), "float32")
        fit(model, given.astype("float32"), labels, *map(FiniteCheck, callbacks))
        results.append(model.get_weights())
    same(*results)
