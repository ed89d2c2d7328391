"""Every optimizer of Keras: first decay, then its own step; zero decay; saving."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import HAS_MULTI, NAMES, make
from optimizer_tools import assert_same, gradients, tf_variable, values, variables
from stack_marks import quick_rows

from tfwd import optimizers

ALL = [*NAMES, *(["Multi"] if HAS_MULTI else [])]
OF_LATER_RELEASES = [name for name in ("Muon", "Multi") if name in ALL]


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")


@quick_rows("Adam", "SGD", "Lion", "Ftrl", "Adafactor", *OF_LATER_RELEASES)
@pytest.mark.parametrize("name", ALL)
def test_decays_first_and_then_makes_the_step_of_the_wrapped_one(name):
    """Checks by hand: the decay on the variable, then the bare optimizer. Its slots come first."""
    wrapped = optimizers.DecoupledWeightDecay(make(name), 0.03)
    bare = make(name)
    ours, theirs = variables(), variables()
    wrapped.build(ours)
    bare.build(theirs)
    for step in range(3):
        wrapped.apply(gradients(step), ours)
        for variable in theirs:
            variable.assign(variable.numpy() * (1 - 0.03))
        bare.apply(gradients(step), theirs)
        for found, expected in zip(values(ours), values(theirs), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert int(wrapped.iterations) == 3


@quick_rows("Adam", "SGD", "Adadelta", "Ftrl", *OF_LATER_RELEASES)
@pytest.mark.parametrize("name", ALL)
def test_without_decay_it_is_the_wrapped_one_bit_for_bit(name):
    wrapped, bare = optimizers.DecoupledWeightDecay(make(name), 0), make(name)
    ours, theirs = variables("float32"), variables("float32")
    for step in range(3):
        wrapped.apply(gradients(step, "float32"), ours)
        bare.apply(gradients(step, "float32"), theirs)
    assert_same(values(ours), values(theirs))
    assert_same(values(wrapped.variables), values(bare.variables))


@quick_rows("Adam", "SGD", *OF_LATER_RELEASES)
@pytest.mark.parametrize("name", ALL)
def test_in_a_tf_function_from_config_and_from_a_checkpoint(name, tmp_path):
    """Checks four steps at once against two, a checkpoint, a new optimizer, and two more."""

    def steps(optimizer, variables, first, count):
        @tf.function
        def step(a, b):
            optimizer.apply([a, b], variables)

        for number in range(first, first + count):
            step(*gradients(number))

    whole, weights = optimizers.DecoupledWeightDecay(make(name), 0.03, exclude="bias"), variables()
    whole.build(weights)
    steps(whole, weights, 0, 4)

    part, others = optimizers.DecoupledWeightDecay(make(name), 0.03, exclude="bias"), variables()
    part.build(others)
    steps(part, others, 0, 2)
    state = tf.train.Checkpoint(optimizer=part, weights=[tf_variable(v) for v in others])
    path = state.write(str(tmp_path / "state"))
    fresh = variables()
    for variable in fresh:
        variable.assign(variable * 0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(part))
    again.build(fresh)
    state = tf.train.Checkpoint(optimizer=again, weights=[tf_variable(v) for v in fresh])
    state.read(path).assert_existing_objects_matched()
    steps(again, fresh, 2, 2)
    assert_same(values(fresh), values(weights))
    assert_same(values(again.variables), values(whole.variables))
