"""Losses with variables under `FiniteCheck("skip")`. The oracle is a fit without the bad batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from tfwd.callbacks import FiniteCheck

layers = keras.layers
MODES = {"graph": {}, "eager": {"run_eagerly": True}, "XLA": {"jit_compile": True}}


class Counting(keras.losses.Loss):
    """A loss that counts its calls, and divides by their number."""

    def __init__(self):
        super().__init__()
        self.calls = tf.Variable(0.0, trainable=False)

    def call(self, y, p):
        self.calls.assign_add(1.0)
        return -y * tf.math.log(p) / self.calls


def fit(x, mode, *callbacks):
    dense = layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model, loss = keras.Sequential([keras.Input((1,)), dense]), Counting()
    model.compile("sgd", loss, **{"jit_compile": False, **MODES[mode]})
    y = np.ones_like(x)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks))
    return float(loss.calls), model.get_weights()[0]


@quick_rows("graph")
@pytest.mark.parametrize("mode", MODES)
def test_the_report_does_not_change_the_variables_of_a_loss(mode):
    """The report on the loss of the bad batch computes the loss again."""
    x = np.linspace(0.2, 0.8, 12).astype("float32")[:, None]
    expected = fit(np.delete(x, np.s_[4:8], 0), mode)
    x[5] = 0.0  # a logarithm of 0
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped a step"):
        found = fit(x, mode, check)
    assert (check.skipped, found[0]) == (1, expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
