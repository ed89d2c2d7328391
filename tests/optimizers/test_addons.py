"""Names of tensorflow-addons, with its arguments and its meaning."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import make
from optimizer_tools import assert_same, fit, gradients, model, tf_variable, values, variables
from stack_marks import quick_rows

from tfwd.optimizers.addons import SGDW, AdamW, extend_with_decoupled_weight_decay

D, RATE = 0.03, 0.1


def test_the_meaning_is_absolute_and_the_decay_comes_first():
    """Checks that the decay does not follow the learning rate."""
    ours = variables()
    optimizer = SGDW(D, RATE, momentum=0.5)
    weights, velocity = values(ours), [np.zeros(v.shape) for v in ours]
    for step in range(4):
        optimizer.learning_rate = rate = RATE / (step + 1)
        rate = float(optimizer.learning_rate)
        optimizer.apply_gradients(zip(gradients(step), ours, strict=True))
        for i, gradient in enumerate(gradients(step)):
            velocity[i] = 0.5 * velocity[i] - rate * gradient.numpy()
            weights[i] = weights[i] - D * weights[i] + velocity[i]
    for found, expected in zip(values(ours), weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("kind", "base", "arguments"),
    [
        (AdamW, "Adam", {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-5, "amsgrad": True}),
        (SGDW, "SGD", {"momentum": 0.9, "nesterov": True}),
        (extend_with_decoupled_weight_decay(keras.optimizers.Nadam), "Nadam", {"beta_1": 0.8}),
        (extend_with_decoupled_weight_decay(keras.optimizers.RMSprop), "RMSprop", {"rho": 0.8}),
    ],
)
def test_each_is_the_decay_and_then_the_extended_optimizer(kind, base, arguments):
    optimizer = kind(weight_decay=D, learning_rate=RATE, **arguments)
    bare = make(base, RATE, **arguments)
    ours, theirs = variables(), variables()
    for step in range(3):
        optimizer.apply_gradients(zip(gradients(step), ours, strict=True))
        for variable in theirs:
            variable.assign(variable * (1 - D))
        bare.apply(gradients(step), theirs)
    for found, expected in zip(values(ours), values(theirs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_positions_and_defaults_of_the_arguments():
    optimizer = AdamW(0.1, 0.2, 0.3, 0.4, 0.5, True)
    inner = optimizer.optimizer
    found = (inner.beta_1, inner.beta_2, inner.epsilon, inner.amsgrad)
    assert found == (0.3, 0.4, 0.5, True)
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    assert float(AdamW(0.1).learning_rate) == pytest.approx(0.001)
    assert (AdamW(0.1).name, SGDW(0.1).name) == ("AdamW", "SGDW")
    optimizer = SGDW(0.1, lr=0.7, clipnorm=2.0)
    assert float(optimizer.learning_rate) == pytest.approx(0.7) and optimizer.clipnorm == 2.0


def test_decay_var_list_is_of_one_step():
    ours = variables()
    optimizer = SGDW(D, RATE)
    zeros = [tf.zeros_like(tf_variable(v)) for v in ours]
    old = values(ours)
    optimizer.apply_gradients(zip(zeros, ours, strict=True), decay_var_list=ours[:1])
    np.testing.assert_allclose(ours[0].numpy(), old[0] * (1 - D))
    np.testing.assert_array_equal(ours[1].numpy(), old[1])
    optimizer.apply_gradients(zip(zeros, ours, strict=True), name="step")
    np.testing.assert_allclose(ours[1].numpy(), old[1] * (1 - D))


def test_minimize():
    weight = keras.Variable([2.0], name="w")
    other = tf.Variable([2.0], name="other")
    optimizer = SGDW(0.25, 1.0)
    optimizer.minimize(
        lambda: 3 * tf_variable(weight) + other, [weight, other], decay_var_list=[weight]
    )
    assert (float(weight[0]), float(other[0])) == (2 * 0.75 - 3, 1.0)
    with tf.GradientTape() as tape:
        loss = 3 * tf_variable(weight)
    optimizer.minimize(loss, lambda: [weight], tape=tape)
    assert float(weight[0]) == -1.5 * 0.75 - 3
    with pytest.raises(ValueError, match="needs tape="):
        optimizer.minimize(loss, [weight])


def test_exclude_from_weight_decay_is_searched_for_and_may_be_missing():
    net = model()
    optimizer = SGDW(D, 0.0, exclude_from_weight_decay=["bia", "LayerNorm"])
    net.compile(optimizer, "mse")
    old = net.get_weights()
    fit(net)
    kernel, bias, *_ = net.get_weights()
    np.testing.assert_allclose(kernel, old[0] * (1 - D) ** 3, rtol=1e-6)
    np.testing.assert_array_equal(bias, old[1])
    assert "exclude_from_weight_decay 'bia'" in str(optimizer.decay_table(net))
    with pytest.raises(ValueError, match="exclude_from_weight_decay pattern .*not a regular"):
        SGDW(D, exclude_from_weight_decay=["("])


def test_rows_of_a_sparse_gradient_unless_told_otherwise():
    for options, expected in (({}, [1, 0.5, 1]), ({"sparse": "table"}, [0.5, 0.5, 0.5])):
        table = keras.Variable(np.ones((3, 2)))
        gradient = tf.IndexedSlices(tf.zeros([2, 2]), tf.constant([1, 1]), tf.constant([3, 2]))
        SGDW(0.5, 1.0, **options).apply_gradients([(gradient, table)])
        np.testing.assert_array_equal(table.numpy()[:, 0], expected)


def test_schedules_and_functions_for_the_decay():
    halves = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    for decay in (halves, lambda: 0.5):
        weight = keras.Variable([4.0])
        optimizer = AdamW(weight_decay=decay, learning_rate=0.0)
        for _ in range(2):
            optimizer.apply_gradients([(tf.zeros([1]), weight)])
        assert float(weight[0]) == (1.5 if decay is halves else 1.0)


@quick_rows("AdamW")
@pytest.mark.parametrize("kind", [AdamW, SGDW])
def test_saved_and_restored(kind, tmp_path):
    def compiled():
        net = model()
        optimizer = kind(D, 0.1, exclude_from_weight_decay=["bias"])
        net.compile(optimizer, "mse", jit_compile=False)
        return net

    whole, half = compiled(), compiled()
    fit(whole, epochs=2)
    fit(half)
    half.save(tmp_path / "net.keras")
    again = keras.saving.load_model(tmp_path / "net.keras")
    assert again.optimizer.__class__ is kind
    assert again.optimizer.get_config() == half.optimizer.get_config()
    fit(again)
    assert_same(again.get_weights(), whole.get_weights())


def test_a_custom_class_is_saved_under_its_own_name(tmp_path):
    NadamW = extend_with_decoupled_weight_decay(keras.optimizers.Nadam)
    net = model()
    net.compile(NadamW(D, learning_rate=0.1), "mse")
    fit(net)
    net.save(tmp_path / "net.keras")
    objects = {"OptimizerWithDecoupledWeightDecay": NadamW}
    again = keras.saving.load_model(tmp_path / "net.keras", custom_objects=objects)
    assert again.optimizer.__class__ is NadamW
    assert again.optimizer.weight_decay == D
