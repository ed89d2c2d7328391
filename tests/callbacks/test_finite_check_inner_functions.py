"""`FiniteCheck` on steps that call a `tf.function` of a layer or of the model.

Such a function is traced once, and then assigns to variables without their Python methods. The
oracle is Keras's `fit` without the callback, on the data without the bad batch.
"""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from tfwd.callbacks import FiniteCheck

layers = keras.layers
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(40, 6)).astype("float32")
Y = GENERATOR.normal(size=(40, 6)).astype("float32")
SIZE = 8
MODES = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
}
everywhere = pytest.mark.parametrize("mode", list(MODES))


class Normalized(layers.Layer):
    """A layer whose whole call is a `tf.function`."""

    def build(self, shape):
        self.dense, self.norm = layers.Dense(4, use_bias=False), layers.BatchNormalization()
        self.dense.build(shape)
        self.norm.build((None, 4))
        super().build(shape)

    @tf.function
    def call(self, x, training=False):
        return self.norm(self.dense(x), training=training)

    def compute_output_shape(self, shape):
        return (shape[0], 4)


class Averaging(layers.Layer):
    """A layer that assigns an average to a variable in a list, in a `tf.function`."""

    def build(self, shape):
        self.kept = [tf.Variable(tf.zeros(shape[-1:]), trainable=False)]
        self.update = tf.function(self._update)
        super().build(shape)

    def _update(self, x):
        self.kept[0].assign(0.9 * self.kept[0] + 0.1 * tf.reduce_mean(x, 0))

    def call(self, x, training=False):
        if training:
            self.update(x)
        return x - self.kept[0]

    def compute_output_shape(self, shape):
        return shape


def with_layer(kind):
    def made():
        inputs = keras.Input((6,))
        model = keras.Model(inputs, layers.Dense(6)(kind()(inputs)))
        model.compile(keras.optimizers.Adam(0.01), "mse")
        for training in (False, True):
            model(X[:SIZE], training=training)  # traces the function
        return model

    return made


class Adversarial(keras.Model):
    """A generator and a discriminator, each with an optimizer in a dict and an inner function."""

    def __init__(self):
        super().__init__()
        dense = layers.Dense
        self.made = keras.Sequential(
            [
                keras.Input((6,)),
                dense(6, use_bias=False),
                layers.BatchNormalization(),
                dense(6),
            ]
        )
        self.judge = keras.Sequential([keras.Input((6,)), dense(6, "tanh"), dense(1)])
        self.rules = {"made": keras.optimizers.Adam(0.01), "judge": keras.optimizers.Adam(0.01)}
        self.steps = {"made": tf.function(self._made), "judge": tf.function(self._judge)}
        self.built = True

    def call(self, x):
        return self.judge(self.made(x))

    def _apply(self, name, tape, loss):
        weights = getattr(self, name).trainable_weights
        gradients = tape.gradient(loss, weights)
        self.rules[name].apply_gradients(zip(gradients, weights, strict=True))
        return loss

    def _judge(self, x, y):
        with tf.GradientTape() as tape:
            fooled = tf.nn.softplus(self.judge(self.made(x, training=True)))
            loss = tf.reduce_mean(tf.nn.softplus(-self.judge(y)) + fooled)
        return self._apply("judge", tape, loss)

    def _made(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.softplus(-self.judge(self.made(x, training=True))))
        return self._apply("made", tape, loss)

    def train_step(self, data):
        x, y = data
        return {"judge_loss": self.steps["judge"](x, y), "made_loss": self.steps["made"](x)}


def adversarial():
    model = Adversarial()
    model.compile()
    return model


class Unknown(Adversarial):
    """The same model with optimizers that no attribute holds."""

    def __init__(self):
        super().__init__()
        rules = dict(self.rules)
        self.rules = None
        self._apply_with = lambda name, pairs: rules[name].apply_gradients(pairs)
        self.others = lambda: list(rules.values())

    def _apply(self, name, tape, loss):
        weights = getattr(self, name).trainable_weights
        self._apply_with(name, zip(tape.gradient(loss, weights), weights, strict=True))
        return loss


def unknown():
    model = Unknown()
    model.compile()
    return model


class Accumulating(keras.Model):
    """A model that adds gradients to variables in a list, and applies them every second step."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(6)
        self.dense.build((None, 6))
        self.sums = [
            tf.Variable(tf.zeros(weight.shape), trainable=False)
            for weight in self.dense.trainable_weights
        ]
        self.number = tf.Variable(0, trainable=False)
        self.add, self.apply = tf.function(self._add), tf.function(self._apply)
        self.built = True

    def call(self, x):
        return self.dense(x)

    def _add(self, x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(x) - y) ** 2)
        gradients = tape.gradient(loss, self.dense.trainable_weights)
        for kept, gradient in zip(self.sums, gradients, strict=True):
            kept.assign_add(gradient)
        self.number.assign_add(1)
        return loss

    def _apply(self):
        sums = [tf.identity(kept) for kept in self.sums]
        self.optimizer.apply_gradients(zip(sums, self.dense.trainable_weights, strict=True))
        for kept in self.sums:
            kept.assign(tf.zeros_like(kept))

    def train_step(self, data):
        loss = self.add(*data)
        tf.cond(self.number % 2 == 0, lambda: [self.apply(), 1][1], lambda: 0)
        return {"loss": loss}


def accumulating():
    model = Accumulating()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
    model.optimizer.build(model.dense.trainable_weights)
    return model


def state(model):
    optimizers = getattr(model, "others", lambda: [])()
    optimizers += list(getattr(model, "rules", None) or {}) and list(model.rules.values())
    optimizers += [model.optimizer] if getattr(model, "optimizer", None) is not None else []
    found = [*model.variables, *getattr(model, "sums", ())]
    found += [kept for layer in model.layers for kept in getattr(layer, "kept", ())]
    for optimizer in optimizers:
        given = optimizer.variables
        found += given() if callable(given) else given
    return [np.asarray(variable) for variable in found]


def trained(make, mode, x, *callbacks, epochs=2):
    keras.utils.set_random_seed(3)
    model = make()
    model.run_eagerly = MODES[mode].get("run_eagerly", False)
    model.jit_compile = MODES[mode].get("jit_compile", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = np.isfinite(x).all(1) if not callbacks else slice(None)
        model.fit(
            x[kept], Y[kept], SIZE, epochs, verbose=0, shuffle=False, callbacks=list(callbacks)
        )
    return state(model)


def with_bad_batch(number):
    bad = X.copy()
    bad[number * SIZE : (number + 1) * SIZE] = np.nan
    return bad


MAKERS = {
    "a layer whose call is a function": with_layer(Normalized),
    "a state in a list of a layer": with_layer(Averaging),
    "optimizers in a dict": adversarial,
    "optimizers that no attribute holds": unknown,
    "sums in a list": accumulating,
}


@quick_rows("*-graph", "0-optimizers in a dict-eager")
@everywhere
@pytest.mark.parametrize("kind", list(MAKERS))
@pytest.mark.parametrize("number", [0, 2])
def test_a_skipped_step_changes_no_variable(number, kind, mode):
    bad = with_bad_batch(number)
    skipped = trained(MAKERS[kind], mode, bad, FiniteCheck("skip"))
    without = trained(MAKERS[kind], mode, bad)
    assert len(skipped) == len(without)
    for one, other in zip(skipped, without, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class Lazy(layers.Layer):
    """A layer whose call is a `tf.function` that creates its variables in the first call."""

    def __init__(self):
        super().__init__()
        self.kernel_of_call = None

    @tf.function
    def call(self, x):
        if self.kernel_of_call is None:
            self.kernel_of_call = tf.Variable(tf.ones(x.shape[-1:]), name="gain")
        return x * self.kernel_of_call

    def compute_output_shape(self, shape):
        return shape


@everywhere
@pytest.mark.parametrize("kind", [Normalized, Lazy])
def test_a_function_of_a_class_keeps_its_traces(kind, mode):
    """A `tf.function` in a class has its own traces for each layer, also those before `fit`."""
    histories = []
    for callbacks in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), kind(), layers.Dense(6), kind()])
        model.compile(keras.optimizers.SGD(0.05), "mse", **MODES[mode])
        fitted = model.fit(
            X, Y[:, : 4 if kind is Normalized else 6], SIZE, 2, verbose=0, shuffle=False,
            callbacks=callbacks,
        )  # fmt: skip
        histories.append(fitted.history["loss"])
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-5)


def test_restore_includes_variables_in_a_list():
    """Checks that "restore" sets the sums to their values at the end of the last good epoch."""

    class Bad(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.inputs_are_bad.assign(epoch == 1)

    class Spoiled(Accumulating):
        def __init__(self):
            super().__init__()
            self.inputs_are_bad = tf.Variable(False, trainable=False)

        def train_step(self, data):
            x, y = data
            is_last = self.number % 5 == 4
            x = tf.where(self.inputs_are_bad & is_last, np.nan, x)
            return super().train_step((x, y))

    def made():
        model = Spoiled()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9))
        model.optimizer.build(model.dense.trainable_weights)
        return model

    first = trained(made, "graph", X, epochs=1)
    second = trained(made, "graph", X, Bad(), FiniteCheck("restore"), epochs=2)
    model = made()
    n = len(model.variables) + len(model.sums)
    for one, other in list(zip(first, second, strict=True))[:n]:
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_trace_inside_a_checked_step_serves_later_steps():
    """Checks a metric whose update is a function, which a step traces after its decision."""

    class Counter(keras.metrics.Metric):
        def __init__(self, **options):
            super().__init__(**options)
            self.sum = self.add_weight(name="sum", initializer="zeros")
            self._add = tf.function(lambda value: self.sum.assign_add(value))

        def update_state(self, y_true, y_pred, sample_weight=None):
            self._add(tf.reduce_sum(tf.cast(y_true, tf.float32)))

        def result(self):
            return tf.convert_to_tensor(self.sum)

    histories = []
    for callbacks in ([], [FiniteCheck(every_n_steps=2)]):
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6)])
        model.compile("sgd", "mse", metrics=[Counter(name="total")], jit_compile=False)
        fitted = model.fit(X, Y, SIZE, 2, verbose=0, shuffle=False, callbacks=callbacks)
        histories.append(fitted.history["total"])
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-6)
    np.testing.assert_allclose(histories[0], [Y.sum()] * 2, rtol=1e-5)
