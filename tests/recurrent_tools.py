"""Helpers to compare recurrent layers."""

import tensorflow as tf

from tfwd import _keras


def gradients(function, weights: list, x: tf.Tensor, **arguments) -> list[tf.Tensor]:
    """Returns the result of a layer's call, and the gradients of its input and weights."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = tf.nest.flatten(function(x, **arguments))
        loss = tf.add_n([tf.reduce_sum(tf.sin(a)) for a in found])
    return found + tape.gradient(loss, [x, *map(_keras.variables.tf_variable, weights)])
