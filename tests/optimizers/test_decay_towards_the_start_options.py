"""Decay towards the start under each option, for SGD and Adam, against NumPy in float64."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import make
from optimizer_tools import gradients, tf_variable, values, variables
from stack_marks import IS_KERAS_2, quick_rows

from tfwd.optimizers import DecoupledWeightDecay

D, RATE = 0.03, 0.125


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")


def numpy_steps(kind, starts, grads, fractions, rows=None):
    """Returns the variables after w - f (w - w0) and the step of SGD or Adam, computed by hand.

    Args:
        kind: "SGD" or "Adam".
        starts: the first weights.
        grads: for each step a list of dense gradients.
        fractions: f of each weight.
        rows: for each step a mask of the decayed rows, for sparse decay of rows.
    """
    weights, after = [w.copy() for w in starts], []
    first, second = ([np.zeros_like(w) for w in starts] for _ in range(2))
    for t, step in enumerate(grads, 1):
        for i, g in enumerate(step):
            share = fractions[i] if rows is None else fractions[i] * rows[t - 1][:, None]
            weights[i] = weights[i] - share * (weights[i] - starts[i])
            if kind == "SGD":
                weights[i] = weights[i] - RATE * g
                continue
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.999 * second[i] + 0.001 * g * g
            # As Keras writes it: epsilon is added before the bias is corrected.
            rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
            weights[i] = weights[i] - rate * first[i] / (np.sqrt(second[i]) + 1e-7)
        after.append([w.copy() for w in weights])
    return after


# Keras computes the powers of Adam's betas in float32, where 1 - 0.999 has five digits. A decay
# towards zero, or none, would be off by 1e-3 after two steps.
TOLERANCE = {"SGD": 1e-12, "Adam": 2e-5}


def assert_close(found, expected, kind="SGD"):
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=TOLERANCE[kind])


def decayed(kind, scale="absolute", **options):
    return DecoupledWeightDecay(make(kind, RATE), D, scale, towards="start", **options)


OPTIONS = {
    "every": ({}, (D, D)),
    "excluded": ({"exclude": "bias"}, (D, 0)),
    "multiplied": ({"multipliers": {"bias": 2.5}}, (D, 2.5 * D)),
    "by the rate": ({"scale": "learning_rate"}, (D * RATE, D * RATE)),
}


@quick_rows("every-Adam", "excluded-SGD", "multiplied-Adam", "by the rate-SGD")
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("name", OPTIONS)
def test_dense_steps(kind, name):
    options, fractions = OPTIONS[name]
    weights, optimizer = variables(), decayed(kind, **options)
    starts = values(weights)

    @tf.function(autograph=False)  # which builds the optimizer
    def step(*grads):
        optimizer.apply(grads, weights)

    found = []
    for t in range(5):
        step(*gradients(t))
        found.append(values(weights))
    grads = [[g.numpy() for g in gradients(t)] for t in range(5)]
    assert_close(found, numpy_steps(kind, starts, grads, fractions), kind)


def sparse(step):
    rng = np.random.default_rng(step)
    rows, parts = rng.choice(6, 4), rng.normal(size=(4, 2))
    dense, named = np.zeros((6, 2)), np.zeros(6)
    np.add.at(dense, rows, parts)
    named[rows] = 1
    return (
        tf.IndexedSlices(tf.constant(parts), tf.constant(rows), tf.constant([6, 2])),
        dense,
        named,
    )


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
@pytest.mark.parametrize("which", ["table", "rows"])
def test_sparse_steps(kind, which):
    rng = np.random.default_rng(0)
    table = keras.Variable(rng.normal(size=(6, 2)), dtype="float64", name="table")
    start, optimizer = table.numpy(), decayed(kind, sparse=which)
    found = []
    for t in range(4):
        optimizer.apply([sparse(t)[0]], [table])
        found.append([table.numpy()])
    grads, rows = [[sparse(t)[1]] for t in range(4)], [sparse(t)[2] for t in range(4)]
    assert any(mask.min() == 0 for mask in rows)
    expected = numpy_steps(kind, [start], grads, [D], rows if which == "rows" else None)
    assert_close(found, expected, kind)


def test_half_precision_is_rounded_once():
    weight = keras.Variable(np.array([1.0, 1.0]), dtype="float16", name="w")
    optimizer = decayed("SGD")
    optimizer.build([weight])
    weight.assign([2.0, -1.0])
    optimizer.apply([tf.zeros([2], tf.float16)], [weight])
    np.testing.assert_array_equal(weight.numpy(), np.array([2 - D, -1 + 2 * D], "float16"))


def test_the_start_is_the_weight_at_build_and_only_decayed_weights_have_one():
    weights, optimizer = variables(), decayed("SGD", exclude="bias")
    weights[0].assign(np.ones([3, 2]))  # as weights that are loaded
    optimizer.build(weights)
    own = [v for v in optimizer.variables if "start" in v.name]
    assert len(own) == 1 and np.all(np.asarray(own[0]) == 1.0)
    weights[0].assign_add(np.ones([3, 2]))
    assert np.all(np.asarray(own[0]) == 1.0)


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 has no legacy optimizers")
def test_legacy_optimizers():
    weights = [tf_variable(v) for v in variables()]
    starts = values(weights)
    optimizer = DecoupledWeightDecay(
        keras.optimizers.legacy.SGD(RATE), D, exclude="bias", towards="start"
    )
    found = []
    for t in range(3):
        optimizer.apply_gradients(zip(gradients(t), weights, strict=True))
        found.append(values(weights))
    grads = [[g.numpy() for g in gradients(t)] for t in range(3)]
    assert_close(found, numpy_steps("SGD", starts, grads, (D, 0)))
