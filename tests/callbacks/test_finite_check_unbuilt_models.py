"""`FiniteCheck` on models that contain a model without weights before the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import MODES, fit, same
from planted_nan_models import data
from stack_marks import quick_rows

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import unused

layers = keras.layers


class Block(layers.Layer):
    """A layer around a Sequential without inputs."""

    def __init__(self, width):
        super().__init__()
        self.body = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(width)])

    def call(self, inputs):
        return self.body(inputs)


class Around(keras.Model):
    """A subclassed model around layers."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)

    def call(self, inputs):
        for part in self.parts:
            inputs = part(inputs)
        return inputs


class WithOwnStep(Around):
    """The same, with a training step of its own."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def unbuilt(width):
    return keras.Sequential([layers.Dense(8, "relu"), layers.Dense(width)])


def built(width):
    return keras.Sequential([layers.Input((6,)), layers.Dense(width)])


MODELS = {
    "subclass": lambda: Around(unbuilt(1)),
    "own step": lambda: WithOwnStep(unbuilt(1)),
    "sequential": lambda: keras.Sequential([unbuilt(3), layers.Dense(1)]),
    "layer": lambda: keras.Sequential([Block(3), layers.Dense(1)]),
    "one is built": lambda: Around(unbuilt(6), built(3), layers.Dense(1)),
    "at depth": lambda: Around(Around(Block(1))),
}


def trained(kind, mode, x, y, *callbacks):
    keras.utils.set_random_seed(5)
    model = MODELS[kind]()
    model.compile("adam", "mse", **MODES[mode])
    fit(model, x, y, *callbacks)
    return model.get_weights()


@quick_rows("graph-subclass", "graph-layer", "eager-subclass", "xla-own step")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mode", ["graph", "eager", "xla"])
def test_an_inner_model_without_weights_trains_as_without_the_callback(kind, mode):
    x, y = data(2)
    same(trained(kind, mode, x, y, FiniteCheck()), trained(kind, mode, x, y), "xla")


@quick_rows("graph")
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_the_first_step_of_an_inner_model_without_weights_is_skipped(mode):
    """Checks that the weights equal the weights of a fit without the first batch."""
    x, y = data(3)
    others = x[8:].copy()
    x[3] = np.nan
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped a step"):
        ours = trained("own step", mode, x, y, check)
    assert [report.step for report in check.reports] == [1]
    same(ours, trained("own step", mode, others, y[8:]), "xla")


class Partial(Around):
    """A model that has another part, which it never calls. It counts as built before a call."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.other = unbuilt(1)

    def build(self, input_shape):
        self.built = True


def test_unused_weights_of_a_model_that_is_built_before_its_parts():
    model = Partial(layers.Dense(2), layers.Dense(1, kernel_initializer="zeros"))
    model.build((None, 6))
    found = unused(model, data(1)[0])
    assert sorted(path.rpartition("/")[2] for path in found) == ["bias", "bias", "kernel", "kernel"]
    assert set(found.values()) == {"a gradient of zeros"}
