"""Names and values of several losses in one step of a custom loop, against NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from tfwd import _keras
from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError, Probes

layers = keras.layers
X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
# The losses of each way to compute gradients, and their names. The second is the bad loss.
NAMES = {
    "list": ("loss[0]", "loss[1]"),
    "dict": ("loss['one']", "loss['two']"),
    "one gradient for each": ("loss", "loss 2"),
    "two lists": ("loss[0]", "loss 2[0]"),
}


def two_outputs(bias=0.0):
    """Returns a model whose second output is its bias."""
    inputs = layers.Input((3,))
    two = layers.Dense(
        1,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(bias),
        name="two",
    )
    return keras.Model(inputs, [layers.Dense(1, name="one")(inputs), two(inputs)])


def gradients(way, tape, one, two, sources):
    if way == "list":
        return tape.gradient([one, two], sources)
    if way == "dict":
        return tape.gradient({"one": one, "two": two}, sources)
    if way == "two lists":
        return tape.gradient([one], sources), tape.gradient([two], sources)
    return tape.gradient(one, sources), tape.gradient(two, sources)


def step_of(model, way):
    sources = [_keras.variables.tf_variable(v) for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            one, two = model(x, training=True)
            losses = tf.reduce_mean(one**2), -tf.reduce_mean(tf.math.log(two))
        gradients(way, tape, *losses, sources)
        return losses

    return step


@quick_rows("list-False", "dict-True", "one gradient for each-False", "two lists-True")
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", NAMES)
def test_each_of_several_losses_has_its_name(way, eager):
    """The second loss is -mean(log(bias)): finite for a bias of 2, and infinite for 0."""
    model = two_outputs(bias=2.0)
    probes = Probes(model, weights=False)
    own = step_of(model, way)

    def watched(x):
        with probes:
            return own(x)

    step = watched if eager else tf.function(watched, autograph=False)
    for _ in range(2):  # each step begins with the first name again
        step(tf.constant(X))
    kernel, bias = model.get_layer("one").get_weights()
    expected = [np.mean((X.astype(np.float64) @ kernel + bias) ** 2), np.log(2.0)]
    report = probes.report()
    found = {one.frame.name: one.detail for one in report.found if one.frame.kind == "loss"}
    assert tuple(found) == NAMES[way]
    np.testing.assert_allclose([one.summary.abs_max for one in found.values()], expected, rtol=1e-5)
    model.get_layer("two").set_weights([np.zeros((3, 1)), np.zeros(1)])
    step(tf.constant(X))
    report = probes.report()
    name = NAMES[way][1]
    assert report.sentence == f"{name}: +Inf, step 3"
    assert report.causes[0].name == "the loss function"


class TwoLosses(keras.Model):
    """A model with two losses in its training step."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = two_outputs(), way

    def call(self, inputs):
        return self.inner(inputs)

    def train_step(self, batch):
        one, two = step_of(self.inner, self.way)(batch[0])
        return {"one": one, "two": two}


@pytest.mark.parametrize("way", ["list", "one gradient for each"])
def test_the_losses_of_a_custom_training_step(way):
    model = TwoLosses(way)
    model(X)
    model.compile("sgd", jit_compile=False)
    with pytest.raises(NonFiniteError) as caught:
        model.fit(X, X[:, :1], verbose=0, callbacks=[FiniteCheck()])
    report = caught.value.report
    assert report.sentence.startswith(f"{NAMES[way][1]}: +Inf, step 1")
    found = [one.frame.name for one in report.found if one.frame.kind == "loss"]
    assert tuple(found) == NAMES[way]
