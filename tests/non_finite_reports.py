"""Reports of small models that are fitted until a value is not finite."""

import keras
import pytest

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

layers = keras.layers


class Elementwise(layers.Layer):
    """A custom layer that calls a function."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def call(self, x):
        return self.function(x)


class Times(layers.Layer):
    """A layer that multiplies by a weight. With the loss below, its gradient is the mean input."""

    def build(self, shape):
        self.w = self.add_weight(shape=(1,), initializer="ones", name="w")

    def call(self, inputs):
        return inputs * self.w


def own_output(y, p):
    return p


def report_of(model, x, y, loss="mse", optimizer="sgd", epochs=1, **fitted):
    how = {key: fitted.pop(key, False) for key in ("jit_compile", "run_eagerly")}
    model.compile(optimizer, loss, **how)
    with pytest.raises(NonFiniteError) as caught:
        model.fit(
            x,
            y,
            batch_size=8,
            shuffle=False,
            verbose=0,
            epochs=epochs,
            callbacks=[FiniteCheck()],
            **fitted,
        )
    return caught.value.report


def dense(*others, units=1, **kwargs):
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(units, name="dense", **kwargs), *others]
    )


def names(report):
    return [cause.name for cause in report.causes]
