"""Small models of every kind, for the tests of `parametrize` and `unwrap`."""

import keras
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

from tfwd import parametrizations as P

X = tf.random.stateless_normal([8, 6], [1, 2])


DROPPED = {"kernel": P.Dropout(0.5)}


def sequential() -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="relu", name="first"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(2, name="second"),
        ]
    )


def functional() -> keras.Model:
    inputs = keras.Input((6,))
    shared = keras.layers.Dense(6, name="shared")
    hidden = shared(shared(inputs)) * 2.0 + inputs
    hidden = keras.layers.LayerNormalization(name="norm")(hidden)
    return keras.Model(inputs, [keras.layers.Dense(2, name="out")(hidden), hidden])


def nested() -> keras.Model:
    inputs = keras.Input((6,))
    inner = sequential()
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(inner(inputs)))


@keras.saving.register_keras_serializable("test_models")
class Subclassed(keras.Model):
    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.blocks = [keras.layers.Dense(6, activation="tanh") for _ in range(2)]
        # A repeatable initializer: Keras 2 draws from a global state by default.
        repeatable = {"rng_type": "stateless"} if IS_KERAS_2 else {}
        self.dropout = keras.layers.Dropout(0.2, **repeatable)
        self.out = keras.layers.Dense(2)

    def build(self, shape) -> None:
        for block in self.blocks:
            block.build(shape)
        self.out.build(shape)
        self.built = True

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x)
        return self.out(self.dropout(x, training=training))


def subclassed() -> Subclassed:
    model = Subclassed()
    model(X)
    return model


MODELS = {"sequential": sequential, "functional": functional, "nested": nested}


ALL = {**MODELS, "subclassed": subclassed}


each = pytest.mark.parametrize("kind", ALL)
