"""Models and comparisons for tests of `tfwd.parametrize(..., in_place=True)`.

The oracle is a second plain model of the same kind. Its weights are set to the effective weights
that the parametrization announces. Its gradients are multiplied by the factors of the masks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfwd
from tfwd import _keras
from tfwd import parametrizations as P

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype("float32")
S = RNG.normal(size=(4, 3, 6)).astype("float32")
IDS = np.array([[1, 2, 0], [3, 0, 0], [4, 1, 2], [2, 2, 0]])
EXAMPLES = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
LABELS = EXAMPLES[:, :1]
DENSE = keras.layers.Dense
DROPPED = {".*kernel": P.Dropout(0.5)}


def variables(model: Any) -> list[tf.Variable]:
    return [*map(_keras.variables.tf_variable, model.trainable_variables)]


def made(make: Callable[[], Any], x: Any = EXAMPLES) -> Any:
    """Returns a built model. Models of one kind have the same weights."""
    keras.utils.set_random_seed(2)
    model = make()
    model(x)
    return model


def added(model: Any) -> Any:
    (one,) = tfwd.added_parametrizations(model)
    return one


def effective(model: Any, call: int) -> dict[int, np.ndarray]:
    """Returns the effective weights of a call, by the ids of the variables."""
    one = added(model)
    values = one.effective_weights(call).values()
    return {id(t.variable): np.asarray(v) for (t, _), v in zip(one.targeted, values, strict=True)}


def flat(outputs: Any) -> list[Any]:
    return tf.nest.flatten(outputs)


def stepped(model: Any, x: Any) -> list[Any]:
    """Returns the outputs, the loss and the gradients of a training call."""
    with tf.GradientTape() as tape:
        outputs = flat(model(x, training=True))
        loss = tf.add_n([tf.reduce_sum(tf.sin(tf.cast(o, tf.float32))) for o in outputs])
        loss += tf.add_n([tf.cast(one, tf.float32) for one in model.losses] or [0.0])
    gradients = tape.gradient(loss, variables(model))
    return [*outputs, loss, *[tf.convert_to_tensor(g) for g in gradients]]


RUNS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "eager": stepped,
    "graph": lambda model, x: tf.function(lambda: stepped(model, x))(),
}


def assert_equals_plain(
    make: Callable[[], Any], x: Any, pattern: str, run: str, calls: int = 2, **options: Any
) -> Any:
    """Compares training calls with the plain model: outputs, loss, gradients, and updates."""
    model, plain = made(make, x), made(make, x)
    expected = flat(model(x))
    tfwd.parametrize(model, {pattern: P.Dropout(0.5)}, seed=1, in_place=True, **options)
    for one, other in zip(flat(model(x)), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    trained = {id(v) for v in model.trainable_weights}
    for call in range(calls):
        values = effective(model, call)
        assert values and any((v == 0).any() for v in values.values())
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        got, wanted = RUNS[run](model, x), stepped(plain, x)
        assert len(got) == len(wanted)
        outputs = len(got) - len(model.trainable_weights)
        for a, b in zip(got[:outputs], wanted[:outputs], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        for v, a, b in zip(model.trainable_variables, got[outputs:], wanted[outputs:], strict=True):
            factor = 2.0 * (values[id(v)] != 0) if id(v) in values else 1.0
            np.testing.assert_allclose(a, b * factor, rtol=1e-4, atol=1e-5)
        for v, other in zip(model.weights, plain.weights, strict=True):
            if id(v) not in trained:  # such as moving statistics
                np.testing.assert_allclose(v, other, rtol=1e-5, atol=1e-6)
    assert added(model).calls == calls
    return model


def functional(make: Callable[[Any], Any], shape: tuple[int, ...], dtype: str = "float32") -> Any:
    x = keras.Input(shape, dtype=dtype)
    return keras.Model(x, make(x))


def stack() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), DENSE(5, activation="tanh"), DENSE(1)])


class Pair(keras.Model):
    """A custom model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DENSE(6, name="first"), DENSE(2, name="second")

    def call(self, x: Any, training: Any = None) -> Any:
        return self.second(self.first(x, training=training), training=training)


class Outer(keras.Model):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Any, training: Any = None) -> Any:
        return self.inner(x, training=training)


class Autoencoder(keras.Model):
    """A variational autoencoder with its own step. It keeps its layers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        encoder = [keras.Input((8,)), DENSE(6, activation="relu"), DENSE(4)]
        decoder = [keras.Input((2,)), DENSE(8)]
        self.parts = {"in": keras.Sequential(encoder), "out": keras.Sequential(decoder)}
        self.total = keras.metrics.Mean(name="total")

    def encoded(self, x: Any, training: Any) -> tuple[Any, Any]:
        mean, log_variance = tf.split(self.parts["in"](x, training=training), 2, axis=1)
        return mean, log_variance

    def call(self, x: Any, training: Any = False) -> Any:
        return self.parts["out"](self.encoded(x, training)[0], training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoded(x, True)
            noise = tf.random.normal(tf.shape(mean)) * tf.exp(0.5 * log_variance)
            rebuilt = self.parts["out"](mean + noise, training=True)
            divergence = mean**2 + tf.exp(log_variance) - 1 - log_variance
            loss = tf.reduce_mean((rebuilt - x) ** 2) + 0.5 * tf.reduce_mean(divergence)
        gradients = tape.gradient(loss, variables(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.total.update_state(loss)
        return {"total": self.total.result()}

    def greet(self) -> str:
        return "a method of its own"


class Adversarial(keras.Model):
    """A GAN, whose `call` is never called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), DENSE(8)])
        self.critic = keras.Sequential([keras.Input((8,)), DENSE(4, activation="relu"), DENSE(1)])

    def call(self, x: Any, training: Any = False) -> Any:
        return self.critic(self.generator(x, training=training), training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            made = self.generator(tf.random.normal([tf.shape(x)[0], 4]), training=True)
            loss = tf.reduce_mean(self.critic(x, training=True) - self.critic(made, training=True))
        gradients = tape.gradient(loss, variables(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}
