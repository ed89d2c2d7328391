"""Table of the legacy optimizers of Keras 2 and of tensorflow-addons, which has no other ones."""

import keras
import numpy as np
import tensorflow as tf
import tensorflow_addons as tfa
from optimizer_tools import gradients

legacy = keras.optimizers.legacy
LossScale = keras.mixed_precision.LossScaleOptimizer
D, RATE = 0.03, 0.1
ADDONS = {
    name: lambda name=name: getattr(tfa.optimizers, name)(learning_rate=RATE)
    for name in ("LAMB", "LazyAdam", "RectifiedAdam", "NovoGrad", "Yogi", "AdaBelief")
}
ADDONS["COCOB"] = lambda: tfa.optimizers.COCOB()
ADDONS["ConditionalGradient"] = lambda: tfa.optimizers.ConditionalGradient(RATE, 10.0)
LEGACY = {
    name: lambda name=name: getattr(legacy, name)(learning_rate=RATE)
    for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
}
LEGACY["momentum"] = lambda: legacy.SGD(RATE, momentum=0.9)
INNER = {**ADDONS, **LEGACY}
AVERAGES = {
    "Lookahead": lambda inner: tfa.optimizers.Lookahead(inner, sync_period=2),
    "SWA": lambda inner: tfa.optimizers.SWA(inner, start_averaging=1, average_period=2),
    "MovingAverage": lambda inner: tfa.optimizers.MovingAverage(inner, average_decay=0.5),
}
EVERY = {
    **INNER,
    **{f"{name} of Adam": lambda f=f: f(legacy.Adam(RATE)) for name, f in AVERAGES.items()},
}


def steps(optimizer, weights, first=0, count=3, compiled=False):
    def step(*grads):
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    step = tf.function(step, autograph=False) if compiled else step
    for number in range(first, first + count):
        step(*gradients(number, "float32"))


def sparse_gradient(step):
    rng = np.random.default_rng(step)
    rows = tf.constant(rng.choice(6, 4))
    return tf.IndexedSlices(
        tf.constant(rng.normal(size=(4, 2)), tf.float32), rows, tf.constant([6, 2])
    )


def table():
    return tf.Variable(np.random.default_rng(5).normal(size=(6, 2)), dtype=tf.float32, name="table")
