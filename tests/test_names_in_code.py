"""Names in the code of a user's layer: of its methods, its attributes and their helpers."""

import keras
import pytest
import tensorflow as tf

from tfwd._keras import names_in_code


def helper(x):
    return [tf.reshape(one, (1, -1)) for one in x]


def calls_a_helper(x):
    return helper(x)


def make_closure():
    inner = helper
    return lambda x: inner(x)


class OfMethods(keras.layers.Layer):
    def call(self, x):
        return self.prepared(x)

    def prepared(self, x):
        return tf.reshape(x, (1, -1))


class OfFunction(keras.layers.Layer):
    @tf.function
    def call(self, x):
        return tf.reshape(x, (1, -1))


class Inherited(OfMethods):
    pass


class OfAttribute(keras.layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    "layer",
    [
        OfMethods(),
        OfFunction(),
        Inherited(),
        OfAttribute(calls_a_helper),
        OfAttribute(make_closure()),
        OfAttribute(tf.function(calls_a_helper)),
    ],
)
def test_a_reshape_is_found(layer):
    assert "reshape" in names_in_code(layer)


@pytest.mark.parametrize("layer", [OfAttribute(tf.nn.softmax), keras.layers.Reshape((1, -1))])
def test_the_code_of_libraries_does_not_count(layer):
    assert "reshape" not in names_in_code(layer)


def test_a_function_without_a_module():
    names = {"tf": tf}
    exec("def made(x):\n    return tf.reshape(x, (1, -1))", names)
    assert names["made"].__module__ is None or names["made"].__module__ == "builtins"
    assert isinstance(names_in_code(OfAttribute(names["made"])), set)
