"""A strategy with two replicas on one machine."""

import tensorflow as tf


def two_replicas():
    """Returns a MirroredStrategy on two logical CPUs.

    Its gradients are added on one device. TensorFlow's collective operations, the default, have the
    same keys in all strategies of a process, and fail if a test before used other shapes.
    """
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
