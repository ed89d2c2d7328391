"""AR and TAR, computed by hand."""

import numpy as np
import pytest
import tensorflow as tf

from tfwd.lm.losses import activation_penalty


def test_penalties_by_hand():
    generator = np.random.default_rng(0)
    raw = generator.normal(size=(2, 5, 3)).astype(np.float32)
    dropped = raw * generator.integers(0, 2, (2, 1, 3))
    found = activation_penalty(tf.constant(raw), tf.constant(dropped, tf.float32), 2.0, 3.0)
    changes = [(raw[:, t] - raw[:, t - 1]) ** 2 for t in range(1, 5)]
    assert float(found) == pytest.approx(2 * (dropped**2).mean() + 3 * np.mean(changes), rel=1e-6)
    one = tf.constant(raw[:, :1])
    assert float(activation_penalty(one, one, 0.0, 3.0)) == 0.0
    assert activation_penalty(one, one) is None
