"""Names of losses in reports: a loss object without a name has the name of its class."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from non_finite_reports import dense, report_of


class ContrastiveMargin(keras.losses.Loss):
    """A loss without a name of its own."""

    def call(self, y, p):
        return tf.math.log(tf.reduce_mean(p, -1) - 100.0)


class ShiftedLog:
    """A callable object that is no Keras loss."""

    def __call__(self, y, p):
        return tf.math.log(tf.reduce_mean(p, -1) - 100.0)


def shifted_log(y, p, shift):
    return tf.math.log(tf.reduce_mean(p, -1) - shift)


LOSSES = {
    "contrastive_margin": ContrastiveMargin,
    "given": lambda: ContrastiveMargin(name="given"),
    "shifted_log": lambda: functools.partial(shifted_log, shift=100.0),
    "shifted_log of a callable": ShiftedLog,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_a_name(name):
    """The text of the object has its address in memory, which differs between runs."""
    report = report_of(
        dense(), np.ones((8, 6), "float32"), np.ones((8, 1), "float32"), LOSSES[name]()
    )
    assert report.sentence.startswith(f"loss '{name.partition(' ')[0]}': NaN, step 1")
    assert " at 0x" not in str(report)
