"""Tests of the table under XLA."""

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, soak

from conformance import harness
from conformance.table import DROPOUT, IN_PLACE, OWN, Case

# XLA compiles slowly, and keeps compiled functions. So there is one layer for each kind of kernel.
_KERNELS = {
    "Dense, dropout",
    "Embedding, dropout",
    "masked GRU, dropout",
    "MultiHeadAttention, dropout",
    "WeightDropLSTM",
    "DropoutEmbedding",
}
_FAST = {"Dense, dropout", "MultiHeadAttention, dropout", "DropoutEmbedding"}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    if name in _FAST:
        return []
    return [pytest.mark.slow if name in _KERNELS else soak]


_COMPILED = [
    pytest.param(case, id=case.name, marks=_marks(case.name))
    for number, case in enumerate((*DROPOUT, *OWN, *IN_PLACE))
    if (case in DROPOUT and number % 2 == IS_KERAS_2) or case.name in _KERNELS
]


@pytest.mark.parametrize("case", _COMPILED)
def test_jit_compiled_training_step(case: Case) -> None:
    wrapped = harness.built(case)
    outputs, gradients = tf.function(lambda: harness.step(wrapped, case), jit_compile=True)()
    assert all(np.isfinite(x).all() for x in harness.numbers([outputs, gradients]))
    assert harness.differ(outputs, harness.run(harness.plain(case), case, training=True))
    # Under XLA the masks may differ, but they must be masks: exact zeros in the gradient.
    trainable = [i for i, w in enumerate(wrapped.weights) if w.trainable]
    for position, rate in harness.rates(case, wrapped).items():
        if rate is not None and wrapped.weights[position].shape.num_elements() > 20:
            gradient = gradients[trainable.index(position)].numpy()
            assert 0 < np.sum(gradient == 0.0) < gradient.size
