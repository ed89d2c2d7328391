"""Fits with `FiniteCheck`: a small model with states, the modes, and comparisons."""

import keras
import numpy as np
import tensorflow as tf
from stacks import IS_KERAS_2

BAD = 2  # the number of the bad batch, from 0


MODES = {
    "graph": {"jit_compile": False},
    "xla": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "four steps an execution": {"steps_per_execution": 4, "jit_compile": False},
}


def make(mode="graph", optimizer="adam", strategy=None, draws=False, **compiled):
    """Returns a small model with states: BatchNormalization, Dropout, metrics."""
    keras.utils.set_random_seed(3)
    layers = keras.layers
    with (strategy or tf.distribute.get_strategy()).scope():
        model = keras.Sequential(
            [
                layers.Input((6,)),
                layers.Dense(5, activation="tanh", name="first"),
                layers.BatchNormalization(name="norm"),
                # Keras 2's layer draws again if a step is repeated or skipped.
                *([] if IS_KERAS_2 and not draws else [layers.Dropout(0.3, seed=1)]),
                layers.Dense(1, name="last"),
            ]
        )
        optimizer = keras.optimizers.get(optimizer)
        model.compile(optimizer, "mse", metrics=["mae"], **{**MODES[mode], **compiled})
    return model


def same(ours, theirs, mode="graph"):
    """Compares values bit for bit, or closely where XLA may round differently."""
    for one, other in zip(ours, theirs, strict=True):
        if mode == "xla":
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        else:
            np.testing.assert_array_equal(one, other)


def fit(model, x, y, *callbacks, **kwargs):
    defaults = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **{**defaults, **kwargs})
