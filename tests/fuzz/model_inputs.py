"""Inputs of the random models, and their first weights."""

import keras
import numpy as np
import tensorflow as tf

from fuzz.given_weights import IS_KERAS_2, states

BATCH = 2
RATE = 0.125  # the learning rate of the optimizer, which is SGD


def set_policy(policy):
    """Sets the dtype policy of all layers that are made from now on."""
    float64 = policy == "float64"
    if IS_KERAS_2:
        keras.backend.set_floatx("float64" if float64 else "float32")
        keras.mixed_precision.set_global_policy(policy)
    else:
        keras.config.set_floatx("float64" if float64 else "float32")
        keras.config.set_dtype_policy(policy)


def floatx():
    return keras.backend.floatx() if IS_KERAS_2 else keras.config.floatx()


def inputs(letters, step, batch=BATCH):
    """Returns a list of the inputs of one step, a tensor for each letter."""
    rng = np.random.default_rng([7, step])
    shown = rng.random((batch, 3)) < 0.7
    shown[:, step % 3] = True
    made = {
        "i": tf.constant(rng.integers(0, 4, (batch, 3)), tf.int32),
        "s": tf.constant(rng.normal(size=(batch, 3, 4)), floatx()),
        "v": tf.constant(rng.normal(size=(batch, 4)), floatx()),
        "m": tf.constant(shown),
    }
    return [made[letter] for letter in letters]


def targets(shapes, step):
    """Returns a tensor for each output."""
    rng = np.random.default_rng([11, step])
    return [tf.constant(rng.normal(size=shape), floatx()) for shape in shapes]


def weights(model):
    """Returns random values for all weights of a model; positive ones for non-trainable weights."""
    rng = np.random.default_rng(3)
    trained = {id(v) for v in model.trainable_weights}
    values = []
    for variable in model.weights:
        value = 0.5 * rng.normal(size=tuple(variable.shape))
        # A variance must be positive, whether the layer is frozen or not.
        positive = "variance" in variable.name or id(variable) not in trained
        values.append(np.abs(value) + 0.5 if positive else value)
    return values


def made(model):
    """Returns the existing weights; Keras 2 refuses to list them before all exist."""
    try:
        return model.weights
    except ValueError:
        return []


def set_weights(model, values):
    for variable, value in zip(model.weights, values, strict=True):
        variable.assign(value)


def forget(model):
    """Resets recurrent layers that keep their states to zero."""
    for variable in states(model):
        if "float" in str(variable.dtype):
            variable.assign(np.zeros(tuple(variable.shape)))


def flat(nest):
    """Returns the tensors of a model's result."""
    return tf.nest.flatten(nest)
