"""Comparison with optimizers that decay by themselves: Keras's AdamW, PyTorch's AdamW and SGD."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import make
from optimizer_tools import gradients, values, variables

from tfwd.optimizers import DecoupledWeightDecay


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")


@pytest.mark.parametrize("name", ["SGD", "Adam", "Nadam", "RMSprop", "Lion"])
def test_keras_own_decay_is_the_learning_rate_scale(name):
    ours, theirs = variables(), variables()
    wrapped = DecoupledWeightDecay(make(name), 0.25, scale="learning_rate")
    kind = keras.optimizers.AdamW if name == "Adam" else getattr(keras.optimizers, name)
    own = kind(learning_rate=0.1, weight_decay=0.25)
    for step in range(10):
        wrapped.apply(gradients(step), ours)
        own.apply(gradients(step), theirs)
    # (Keras takes the decay in float32, where this one is exact.)
    for found, expected in zip(values(ours), values(theirs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11)


def torch_run(make_optimizer, steps):
    torch = pytest.importorskip("torch")
    weights = [torch.tensor(v, requires_grad=True) for v in values(variables())]
    optimizer = make_optimizer(torch.optim, weights)
    for step in range(steps):
        for weight, gradient in zip(weights, gradients(step), strict=True):
            weight.grad = torch.tensor(gradient.numpy())
        optimizer.step()
    return [weight.detach().numpy() for weight in weights]


def test_pytorchs_adamw():
    expected = torch_run(lambda o, w: o.AdamW(w, lr=0.01, weight_decay=0.3, eps=1e-7), 10)
    ours = variables()
    optimizer = DecoupledWeightDecay(make("Adam", 0.01), 0.3, scale="learning_rate")
    for step in range(10):
        optimizer.apply(gradients(step), ours)
    # Keras adds its epsilon before the correction of the second moment, PyTorch after it.
    for found, right in zip(values(ours), expected, strict=True):
        np.testing.assert_allclose(found, right, atol=2e-6)


def test_pytorchs_sgd():
    """Checks SGD without momentum: PyTorch's coupled decay is decoupled decay times the rate."""
    expected = torch_run(lambda o, w: o.SGD(w, lr=0.1, weight_decay=0.3), 10)
    ours = variables()
    optimizer = DecoupledWeightDecay(make("SGD"), 0.3, scale="learning_rate")
    for step in range(10):
        optimizer.apply(gradients(step), ours)
    for found, right in zip(values(ours), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-12)


def test_with_momentum_coupled_and_decoupled_differ():
    expected = torch_run(lambda o, w: o.SGD(w, lr=0.1, weight_decay=0.3, momentum=0.9), 5)
    ours = variables()
    optimizer = DecoupledWeightDecay(make("SGD", momentum=0.9), 0.3, scale="learning_rate")
    for step in range(5):
        optimizer.apply(gradients(step), ours)
    assert max(abs(a - b).max() for a, b in zip(values(ours), expected, strict=True)) > 1e-3


def test_tensorflow_sees_no_difference_between_keras_variables_and_its_own():
    ours, plain = variables(), [tf.Variable(v) for v in values(variables())]
    for weights in (ours, plain):
        optimizer = DecoupledWeightDecay(make("SGD"), 0.3)
        for step in range(3):
            optimizer.apply(gradients(step), weights)
    for found, expected in zip(values(ours), plain, strict=True):
        np.testing.assert_array_equal(found, expected.numpy())
