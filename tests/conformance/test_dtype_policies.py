"""Tests of the table in every floating-point type."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows, soak

from conformance import harness
from conformance.table import DROPOUT, IN_PLACE, NOISE, OWN, Case

# One type for all layers, and all types for layers that store or look up weights in a special way.
_TYPES = ("mixed_bfloat16", "float64", "bfloat16")
_EACH_TYPE = {
    "Dense, dropout",
    "Dense, in place",
    "Embedding, dropout",
    "LSTM, dropout",
    "Conv2D, dropout",
    "MultiHeadAttention, dropout",
}
# TensorFlow's orthogonal initializer, which recurrent kernels have, does not know bfloat16.
_POLICIES = [
    pytest.param(
        case,
        policy,
        id=f"{case.name}, {policy}",
        marks=[soak] * (case.name not in _EACH_TYPE and number % 2) + harness.further(case),
    )
    for number, case in enumerate((*DROPOUT, *OWN, *IN_PLACE))
    for policy in ("mixed_float16", *(_TYPES if case.name in _EACH_TYPE else ()))
    if policy != "bfloat16" or not any("recurrent" in name for name in case.rates)
]


@quick_rows(
    "LSTM, dropout, float64",
    "LSTM, dropout, mixed_float16",
    "MultiHeadAttention, dropout, mixed_float16",
    "parametrize, mixed_float16",
    "user's layer, in place, mixed_float16",
    "functional model, dropout, mixed_float16",
    "Dense, dropout, *",
    "DropoutEmbedding, mixed_float16",
    "Embedding, dropout, mixed_float16",
)
@pytest.mark.parametrize(("case", "policy"), _POLICIES)
def test_dtype_policies(case: Case, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    wrapped, plain = harness.built(case), harness.plain(case)
    assert wrapped.dtype_policy == plain.dtype_policy
    harness.assert_same(harness.run(wrapped, case), harness.run(plain, case))
    harness.reset(wrapped)
    weights = harness.all_effective(wrapped, 0)
    for weight, value in zip(wrapped.weights, weights, strict=True):
        assert value.dtype == weight.dtype
    plain = harness.plain(case, [np.asarray(tf.cast(w, tf.float64)) for w in weights])
    harness.copy_states(wrapped, plain)
    expected, _ = harness.step(plain, case)
    outputs, gradients = harness.step(wrapped, case)
    tolerance = 1e-6 if policy == "float64" else 2e-2
    harness.assert_close(outputs, expected, tolerance)
    assert [x.dtype for x in tf.nest.flatten(outputs)] == [
        x.dtype for x in tf.nest.flatten(expected)
    ]
    for weight, gradient in zip(wrapped.trainable_weights, gradients, strict=False):
        assert gradient.dtype == weight.dtype
        assert np.isfinite(tf.cast(gradient, tf.float64)).all()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@harness.each([case for case in NOISE if case.row.name in ("Dense", "LSTM")])
def test_noise_is_drawn_and_added_in_the_variables_own_type(case: Case, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    wrapped = harness.built(case)
    (value,) = harness.effective(wrapped, 0).values()
    assert value.dtype == "float32"
    # The narrow type would have only a few bits behind the point.
    narrow = tf.cast(tf.cast(value, wrapped.compute_dtype), tf.float32)
    assert np.mean(narrow == value) < 0.2
