"""`FiniteCheck` at bad steps of custom training steps, and of models that the first step builds."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import BAD, MODES, fit, make, same
from planted_nan_models import data, state
from stack_marks import needs_keras3
from tables_by_make_target import with_slow_rest

import tfwd
from tfwd.callbacks import FiniteCheck


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
