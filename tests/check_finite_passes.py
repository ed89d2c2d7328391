"""Passes through `CheckFinite`, forward and backward, with non-finite values."""

import numpy as np
import tensorflow as tf

ROWS, COLUMNS = 16, 8


SIZE = ROWS * COLUMNS


def planted(value, places=(0,), dtype="float32"):
    flat = np.arange(1.0, SIZE + 1, dtype="float32") / 64
    flat[list(places)] = value
    return tf.cast(tf.constant(flat.reshape(ROWS, COLUMNS)), dtype)


def function(call, mode):
    return call if mode == "eager" else tf.function(call, jit_compile=mode == "xla")


def both_ways(layer):
    """Returns a layer's output and its input's gradient, for an input and an upstream gradient."""

    def call(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, x, upstream)

    return call


def line(way, *, nan=0, positive=0, negative=0, size=SIZE, name="scores"):
    share = 100 * (nan + positive + negative) / size
    return (
        f"layer '{name}': {way} pass has {share:.2f} % non-finite elements "
        f"({nan} NaN, {positive} +Inf, {negative} -Inf of {size})"
    )


def said(caught):
    """Returns the message of an error, without TensorFlow's backslash before a quote."""
    return str(caught.value).replace("\\'", "'")
