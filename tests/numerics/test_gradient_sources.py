"""The layer that a report names for a gradient, in models with branches and shared layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import report_of

layers = keras.layers


class Root(layers.Layer):
    """The derivative of a root is infinite at 0."""

    def call(self, x):
        return tf.sqrt(tf.abs(x))


def data(inputs=1):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4)).astype("float32")
    return (x if inputs == 1 else [x, np.zeros_like(x)]), rng.normal(size=(8, 1)).astype("float32")


class Branches(keras.Model):
    """Two parallel branches. A root is in the code between layer 'b' and layer 'b2'."""

    def __init__(self, policy, is_first):
        super().__init__()
        given = {"dtype": policy}
        self.is_first = is_first
        self.a, self.a2 = layers.Dense(3, name="a", **given), layers.Dense(2, name="a2", **given)
        self.b = layers.Dense(3, name="b", kernel_initializer="zeros", **given)
        self.b2 = layers.Dense(2, name="b2", **given)
        self.last = layers.Dense(1, name="last")

    def call(self, x):
        a, b = self.a(x), self.b(x)
        root = tf.sqrt(tf.abs(tf.cast(b, tf.float32)))
        if self.is_first:
            second, first = self.b2(root), self.a2(a)
        else:
            first, second = self.a2(a), self.b2(root)
        return self.last(tf.concat([tf.cast(first, tf.float32), tf.cast(second, tf.float32)], -1))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("is_first", [True, False], ids=["b_first", "a_first"])
def test_code_after_a_layer_beside_a_branch(eager, policy, is_first):
    """No layer takes the output of 'b'. The layers of the other branch must not be blamed."""
    keras.utils.set_random_seed(1)
    report = report_of(Branches(policy, is_first), *data(), run_eagerly=eager)
    assert report.sentence.startswith("the loss, or code after layer 'b': backward gradient")


class CastChain(keras.Model):
    """A root between layers of different dtypes: the second layer casts the first one's output."""

    def __init__(self):
        super().__init__()
        self.other = layers.Dense(3, name="other")
        self.first = layers.Dense(3, name="first", kernel_initializer="zeros")
        self.root = Root(name="root", dtype="float64")
        self.last = layers.Dense(1, name="last")

    def call(self, x):
        other = self.other(x)
        return self.last(tf.cast(self.root(self.first(x)), tf.float32) + other)


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_layer_that_casts_its_input(eager):
    keras.utils.set_random_seed(1)
    report = report_of(CastChain(), *data(), run_eagerly=eager)
    assert report.sentence.startswith("layer 'root': backward gradient for the output of 'first'")


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
def test_a_gradient_of_one_call_of_a_shared_layer(eager):
    keras.utils.set_random_seed(1)
    first, second = keras.Input((4,)), keras.Input((4,))
    encoder = layers.Dense(3, name="encoder", use_bias=False)
    a = layers.Dense(2, name="a")(encoder(first))
    b = Root(name="b")(encoder(second))
    outputs = layers.Dense(1)(layers.Concatenate()([a, b]))
    report = report_of(keras.Model([first, second], outputs), *data(2), run_eagerly=eager)
    assert report.where == "layer b"
    assert report.sentence.startswith("layer 'b': backward gradient for the output of 'encoder'")


class EqualOutputs(keras.Model):
    """Two layers whose outputs are equal, and code whose result is equal to an output."""

    def __init__(self, case):
        super().__init__()
        self.case, half = case, {"kernel_initializer": "zeros", "dtype": "mixed_bfloat16"}
        self.z1 = layers.Dense(3, name="z1", **half)
        if case == "second":
            self.z2 = layers.Dense(3, name="z2", **half)
        if case != "code":
            self.taker = layers.Dense(3, name="taker", dtype="mixed_bfloat16")
            self.root = Root(name="root", dtype="float32")
        self.last = layers.Dense(1, name="last")

    def call(self, x):
        first = self.z1(x)
        if self.case == "second":  # only z2 is under the root
            root = self.root(self.z2(x))
        elif self.case == "both":  # z1 is under the root, and another layer takes it too
            root = self.root(first)
        else:  # the root is code
            return self.last(tf.sqrt(tf.abs(tf.cast(first, tf.float32))))
        return self.last(root + tf.cast(self.taker(first), tf.float32))


@pytest.mark.parametrize("eager", [False, True], ids=["graph", "eager"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("second", "layer 'root': backward gradient for the output of 'z2'"),
        ("both", "layers 'root' and 'taker': backward gradient for the output of 'z1'"),
        ("code", "the loss, or code after layer 'z1': backward gradient"),
    ],
)
def test_casts_of_equal_outputs(case, expected, eager):
    keras.utils.set_random_seed(1)
    report = report_of(EqualOutputs(case), *data(), run_eagerly=eager)
    assert report.sentence.startswith(expected)
