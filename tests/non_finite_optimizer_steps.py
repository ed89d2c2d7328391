"""Steps of optimizers on gradients that are partly not finite, and the expected results."""

import math

import keras
import numpy as np
import tensorflow as tf
from keras_optimizers_table import HAS_MULTI, make
from optimizer_tools import assert_same, gradients, trigger, values, variables
from stack_marks import HAS_ADDONS, IS_KERAS_2

from tfwd.optimizers import ApplyIfFinite, DecoupledWeightDecay, NonMonotonicASGD

if HAS_ADDONS:
    from addons_optimizers_table import INNER as LEGACY
else:
    LEGACY = {}


LossScale = keras.optimizers.LossScaleOptimizer


def function(step, mode):
    """Returns a step that runs in a mode."""
    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "xla", autograph=False)


def stepping(optimizer, weights, mode):
    """Returns a step of an optimizer, on gradients scaled by its own loss scale if it has one."""
    return function(lambda *grads: optimizer.apply(grads, weights), mode)


def spoiled(grads, value=math.nan, which=0, place=0):
    """Returns gradients with one element that is not finite."""
    grads = list(grads)
    flat = grads[which].numpy().ravel()
    flat[place] = value
    grads[which] = tf.constant(flat.reshape(grads[which].shape), grads[which].dtype)
    return grads


def run(optimizer, steps, mode="eager", dtype="float32"):
    """Returns the weights after steps, each on a list of gradients."""
    weights = variables(dtype)
    build(optimizer, weights)
    for held in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(held, NonMonotonicASGD):
            trigger(held)

    def apply(*grads):
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    step = function(apply, mode)
    for grads in steps:
        step(*grads)
    return values(weights)


def state(optimizer):
    """Returns the values of an optimizer's variables, without ApplyIfFinite's."""
    found = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    own = ("skipped", "consecutive")
    return [np.asarray(v) for v in found if not any(name in v.name for name in own)]


def assert_alike(found, expected, mode):
    """Asserts that values are equal bit for bit, or close under XLA, which rounds differently."""
    if mode != "xla":
        assert_same(found, expected)
        return
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8)


def build(optimizer, variables):
    """Makes the state of an optimizer of any kind."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(variables)


def some_bad(dtype="float32", at=(0, 2, 3)):
    """Returns six steps, some of them bad, and the good steps alone."""
    steps = [gradients(number, dtype) for number in range(6)]
    mixed = [spoiled(grads) if number in at else grads for number, grads in enumerate(steps)]
    return mixed, [grads for number, grads in enumerate(steps) if number not in at]


def check(wrapped, plain, mode, dtype="float32"):
    """Trains both, and compares all variables."""
    mixed, good = some_bad(dtype)
    assert_alike(run(wrapped, mixed, mode, dtype), run(plain, good, mode, dtype), mode)
    assert_alike(state(wrapped), state(plain), mode)
    return wrapped


INNER = {
    "SGD": lambda: make("SGD", momentum=0.9, nesterov=True),
    "Adam": lambda: make("Adam", amsgrad=True),
    "RMSprop, centered": lambda: make("RMSprop", centered=True),
    "Lion": lambda: make("Lion"),
    "clipped": lambda: make("Adam", global_clipnorm=0.5),
    "averaged": lambda: make("Adam", use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}


if not IS_KERAS_2:
    INNER["accumulated"] = lambda: make("Adam", gradient_accumulation_steps=2)


if HAS_MULTI:
    INNER["several"] = lambda: make("Multi")


NESTINGS = {
    "decay around": (
        lambda: DecoupledWeightDecay(ApplyIfFinite(make("Adam")), 0.03),
        lambda: DecoupledWeightDecay(make("Adam"), 0.03),
    ),
    "decay inside": (
        lambda: ApplyIfFinite(DecoupledWeightDecay(make("Adam"), 0.03)),
        lambda: DecoupledWeightDecay(make("Adam"), 0.03),
    ),
    "average around": (
        lambda: NonMonotonicASGD(ApplyIfFinite(make("SGD")), 1),
        lambda: NonMonotonicASGD(make("SGD"), 1),
    ),
    "average inside": (
        lambda: ApplyIfFinite(NonMonotonicASGD(make("SGD"), 1)),
        lambda: NonMonotonicASGD(make("SGD"), 1),
    ),
    "all": (
        lambda: NonMonotonicASGD(
            DecoupledWeightDecay(ApplyIfFinite(make("Adam")), 0.03, exclude="bias"), 1
        ),
        lambda: NonMonotonicASGD(DecoupledWeightDecay(make("Adam"), 0.03, exclude="bias"), 1),
    ),
}
