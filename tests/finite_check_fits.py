"""Fits with `FiniteCheck`: a small model with states, the modes, and comparisons."""

import keras
import numpy as np
import tensorflow as tf
from stack_marks import IS_KERAS_2

import tfwd

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


tf_variable = tfwd._keras.variables.tf_variable


def write(variable, value):
    """Assigns by an operation that bypasses the methods of the variable."""
    tf.raw_ops.AssignVariableOp(resource=tf_variable(variable).handle, value=value)


class ByOperations(keras.optimizers.Optimizer):
    """An optimizer that writes weights and a slot by operations.

    A large gradient makes both infinite.
    """

    def __init__(self, learning_rate=0.01, name="by_operations"):
        super().__init__(
            **({"name": name} if IS_KERAS_2 else {"learning_rate": 0.01, "name": name})
        )
        if IS_KERAS_2:
            self._learning_rate = self._build_learning_rate(learning_rate)

    def build(self, variables):
        super().build(variables)
        if not hasattr(self, "sums"):
            make = self.add_variable_from_reference
            reference = "model_variable" if IS_KERAS_2 else "reference_variable"
            name = "variable_name" if IS_KERAS_2 else "name"
            self.sums = [make(**{reference: v, name: "sum"}) for v in variables]
            self.places = {id(tf_variable(v)): i for i, v in enumerate(variables)}

    def update_step(self, gradient, variable, learning_rate=0.01):
        slot = self.sums[self.places[id(tf_variable(variable))]]
        change = gradient * tf.exp(tf.abs(gradient))
        write(slot, tf.convert_to_tensor(slot) + change)
        write(variable, tf.convert_to_tensor(variable) - 0.001 * change)
