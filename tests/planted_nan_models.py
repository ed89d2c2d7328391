"""Models with a non-finite number planted at a known position, and the expected reports."""

import keras
import numpy as np
import tensorflow as tf

VALUES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
TRIGGER = 1000.0  # the value is planted in a batch that has an input of this size
TRIGGERS = {"nan": 1.2e3, "inf": 4e3, "-inf": 1.6e4}  # the planted value, if none is given


@keras.saving.register_keras_serializable("tests")
class Plant(keras.layers.Layer):
    """The identity, with one element changed in a batch that has the trigger.

    Args:
        value: new value of the element. None: the value of `TRIGGERS` for the batch.
        direction: "forward", or "backward" for the gradient.
        place: indices of the element.
    """

    def __init__(self, value=None, direction="forward", place=(1, 2), **kwargs):
        super().__init__(**kwargs)
        self.value, self.direction, self.place = value, direction, place

    def call(self, inputs):
        mask = np.zeros([n or 8 for n in inputs.shape], bool)
        mask[tuple(self.place)] = True
        mask = tf.constant(mask)[: tf.shape(inputs)[0]]
        most = tf.reduce_max(tf.abs(tf.stop_gradient(inputs)))
        planted = most >= TRIGGER
        if self.value is None:
            value = tf.where(most >= 1e4, -np.inf, tf.where(most >= 3e3, np.inf, np.nan))
            value = tf.cast(value, inputs.dtype)
        else:
            value = tf.constant(self.value, inputs.dtype)

        def change(tensor):
            return tf.where(mask & planted, value, tensor)

        if self.direction == "forward":
            return change(inputs)

        @tf.custom_gradient
        def identity(tensor):
            return tf.identity(tensor), change

        return identity(inputs)


def counts(value):
    """Returns how many NaN, +Inf and -Inf a single planted value makes."""
    return int(np.isnan(value)), int(value == np.inf), int(value == -np.inf)


def data(batches=4, bad=None, size=8, features=6, seed=0):
    """Returns inputs and labels of some batches, with the trigger in one of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batches * size, features)).astype("float32")
    y = rng.normal(size=(batches * size, 1)).astype("float32")
    if bad is not None:
        x[bad * size + 3, 0] = 2 * TRIGGER
    return x, y


def state(model):
    """Returns all values of a model, its optimizer and its metrics."""
    held = [*model.variables, *model.optimizer.variables]
    held += [v for metric in model.metrics for v in metric.variables]
    return [v.numpy() for v in held]
