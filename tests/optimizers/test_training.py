"""Decay in compile and fit, under loss scaling, accumulation, clipping, EMA, XLA and replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import make
from optimizer_tools import X, assert_same, fit, gradients, model, tf_variable, values, variables
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended, needs_keras3, quick_rows, rest

from tfwd.optimizers import DecoupledWeightDecay

LossScale = keras.optimizers.LossScaleOptimizer
D, RATE = 0.03, 0.1


def wrap(inner):
    return DecoupledWeightDecay(inner, D, exclude="bias")


def trained(optimizer, dtype=None, **options):
    net = model(dtype)
    net.compile(optimizer, "mse", jit_compile=False, **options)
    fit(net, epochs=2)
    return net.get_weights()


@pytest.fixture(scope="module")
def plain():
    keras.backend.clear_session()
    return trained(wrap(make("Adam")))


@quick_rows("options0")
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}])
def test_the_same_however_it_runs(plain, options):
    net = model()
    net.compile(wrap(make("Adam")), "mse", **options)
    fit(net, epochs=2)
    for found, expected in zip(net.get_weights(), plain, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@quick_rows("False")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_custom_loop(plain, compiled):
    net, optimizer = model(), wrap(make("Adam"))
    loss = keras.losses.MeanSquaredError()
    from optimizer_tools import Y

    @tf.function(jit_compile=compiled)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, net(x, training=True))
        weights = net.trainable_variables
        found = tape.gradient(value, [tf_variable(v) for v in weights])
        optimizer.apply_gradients(zip(found, weights, strict=True))

    optimizer.build(net.trainable_variables)
    for _ in range(2):
        for first in range(0, 12, 4):
            step(X[first : first + 4], Y[first : first + 4])
    for found, expected in zip(net.get_weights(), plain, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_apply_alone_after_build_and_its_return_value():
    weights, optimizer = variables(), wrap(make("SGD"))
    with pytest.raises(ValueError, match="pass the variables with the gradients, or call build"):
        optimizer.apply(gradients(0))
    optimizer.build(weights)
    optimizer.build(weights)
    optimizer.apply(gradients(0))
    assert int(optimizer.apply_gradients(zip(gradients(1), weights, strict=True))) == 2
    optimizer.apply([])
    assert int(optimizer.iterations) == 2


NESTINGS = {
    "around": lambda: LossScale(wrap(make("Adam"))),
    "inside": lambda: wrap(LossScale(make("Adam"))),
    "by Keras": lambda: wrap(make("Adam")),
}


@extended
def test_the_order_of_nesting_with_loss_scaling_does_not_matter():
    """Checks both orders, also when Keras adds a loss scale around one that exists."""
    explicit = ("around", "inside")
    found = [trained(NESTINGS[name](), "mixed_float16") for name in explicit]
    keras.config.set_dtype_policy("mixed_float16")
    found += [trained(nest()) for nest in NESTINGS.values()]
    for weights in found[1:]:
        assert_same(weights, found[0])


@pytest.mark.parametrize("nest", [LossScale, lambda inner: inner], ids=["scaled", "not"])
def test_unused_variables_are_decayed_under_a_loss_scale_too(nest):
    optimizer = nest(DecoupledWeightDecay(make("SGD"), 0.5, decay_unused=True))
    weights = variables("float32")
    old = values(weights)
    optimizer.build(weights)
    for step in range(2):
        optimizer.apply([gradients(step, "float32")[0], None], weights)
    np.testing.assert_array_equal(weights[1].numpy(), old[1] * 0.25)


def test_a_custom_loss_scale_that_is_lost_gives_a_warning():
    inner = wrap(LossScale(make("Adam"), initial_scale=8.0))
    with pytest.warns(UserWarning, match="arguments of the inner one have no effect"):
        LossScale(inner)


@pytest.mark.parametrize("nest", [lambda: LossScale(wrap(make("Adam"))), NESTINGS["inside"]])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_skipped_step_changes_nothing(nest, compiled):
    optimizer, weights = nest(), variables("float32")
    optimizer.build(weights)
    step = tf.function(
        lambda a, b: optimizer.apply([a, b], weights), jit_compile=compiled, autograph=False
    )
    scale = 2.0**15
    step(*(g * scale for g in gradients(0, "float32")))
    before, slots = values(weights), values(optimizer.variables)
    step(gradients(1, "float32")[0] * np.inf, gradients(1, "float32")[1])
    assert_same(values(weights), before)
    changed = [
        v.name
        for v, old in zip(optimizer.variables, slots, strict=True)
        if not np.array_equal(v.numpy(), old)
    ]
    counters = {"iteration:0"} if IS_KERAS_2 else {"step_counter", "dynamic_scale"}
    assert changed and set(changed) <= counters


@needs_keras3("accumulation of gradients")
@pytest.mark.parametrize("compiled", [False, True])
def test_accumulated_gradients_decay_once_an_update(compiled):
    keras.config.set_floatx("float64")
    optimizer = DecoupledWeightDecay(make("SGD", gradient_accumulation_steps=3), D)
    weights = variables()
    optimizer.build(weights)
    step = tf.function(
        lambda a, b: optimizer.apply([a, b], weights), jit_compile=compiled, autograph=False
    )
    old = values(weights)
    for number in range(5):
        step(*gradients(number))
        if number == 1:
            assert_same(values(weights), old)
    for i, before in enumerate(old):
        mean = sum(gradients(number)[i].numpy() for number in range(3)) / 3
        right = before * (1 - D) - RATE * mean
        np.testing.assert_allclose(weights[i].numpy(), right, rtol=1e-13)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize(
    ("clip", "clipped"),
    [
        ({"clipvalue": 0.1}, lambda g: [np.clip(x, -0.1, 0.1) for x in g]),
        ({"clipnorm": 0.1}, lambda g: [x * 0.1 / np.linalg.norm(x) for x in g]),
        (
            {"global_clipnorm": 0.1},
            lambda g: [x * 0.1 / np.sqrt(sum((y**2).sum() for y in g)) for x in g],
        ),
    ],
    ids=["value", "norm", "global norm"],
)
def test_clipping_is_of_the_gradient_alone(clip, clipped):
    keras.config.set_floatx("float64")
    weights = variables()
    old, limited = values(weights), clipped([g.numpy() for g in gradients(0)])
    DecoupledWeightDecay(make("SGD", **clip), D).apply(gradients(0), weights)
    for found, before, gradient in zip(weights, old, limited, strict=True):
        right = before * (1 - D) - RATE * gradient
        np.testing.assert_allclose(found.numpy(), right, rtol=1e-12)


def test_ema_of_the_wrapped_one_averages_decayed_weights():
    keras.config.set_floatx("float64")
    optimizer = DecoupledWeightDecay(make("SGD", use_ema=True, ema_momentum=0.5), D)
    weights = variables()
    average = values(weights) if IS_KERAS_2 else None  # where it begins with the first value
    for step in range(3):
        optimizer.apply(gradients(step), weights)
        average = (
            values(weights)
            if average is None
            else [(a + b) / 2 for a, b in zip(average, values(weights), strict=True)]
        )
    optimizer.finalize_variable_values(weights)
    for found, expected in zip(weights, average, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


@extended
@needs_keras3("SwapEMAWeights")
@pytest.mark.parametrize("scaled", [False, True])
def test_keras_callback_that_swaps_in_the_ema(scaled):
    optimizer = wrap(make("SGD", use_ema=True, ema_momentum=0.5))
    net = model()
    net.compile(LossScale(optimizer) if scaled else optimizer, "mse", jit_compile=False)
    fit(net, epochs=2, callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)])
    averages = values(optimizer.optimizer._model_variables_moving_average)
    assert_same(net.get_weights(), averages)


def test_constraints_are_applied_after_it():
    unit = keras.constraints.UnitNorm(axis=0)
    weight = keras.layers.Layer().add_weight(shape=(2,), name="weight", constraint=unit)
    weight.assign([3.0, 4.0])
    DecoupledWeightDecay(make("SGD"), D).apply([tf.zeros([2])], [weight])
    assert float(tf.norm(tf_variable(weight))) == pytest.approx(1, rel=1e-6)


# The learning rate.


def test_learning_rate_is_the_wrapped_ones():
    inner = make("SGD")
    optimizer = LossScale(DecoupledWeightDecay(inner, D))
    assert float(optimizer.learning_rate) == float(inner.learning_rate)
    optimizer.learning_rate = 0.5
    assert float(inner.learning_rate) == 0.5
    optimizer.inner_optimizer.learning_rate.assign(0.25)
    assert float(optimizer.learning_rate) == 0.25
    scheduled = wrap(make("SGD", keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)))
    assert float(scheduled.learning_rate) == pytest.approx(0.1)
    with pytest.raises(TypeError, match="LearningRateSchedule"):
        scheduled.learning_rate = 0.1


def test_callbacks_that_set_the_learning_rate():
    net = model()
    net.compile(wrap(make("SGD")), "mse")
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    fit(net, epochs=3, callbacks=[plateau])
    assert float(net.optimizer.learning_rate) == pytest.approx(RATE / 4)
    setter = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.7)
    history = fit(net, callbacks=[setter])
    assert history.history["lr" if IS_KERAS_2 else "learning_rate"] == [pytest.approx(0.7)]
    assert float(net.optimizer.optimizer.learning_rate) == pytest.approx(0.7)


def test_keras_tuner_and_others_read_the_wrapped_ones_arguments():
    optimizer = wrap(make("SGD", momentum=0.9))
    assert optimizer.momentum == 0.9
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such


# Replicas.


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


@quick_rows("around")
@pytest.mark.parametrize("scaled", [None, "around", pytest.param("inside", marks=rest)])
def test_fit_on_two_replicas(plain, strategy, scaled):
    with strategy.scope():
        net = model()
        optimizer = NESTINGS[scaled]() if scaled else wrap(make("Adam"))
        net.compile(optimizer, "mse", jit_compile=False)
    fit(net, epochs=2)
    for found, expected in zip(net.get_weights(), plain, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("unused", [False, True])
def test_rows_on_two_replicas(strategy, unused):
    """Checks that rows of both replicas' gradients are decayed once.

    Each replica has an unused variable.
    """
    with strategy.scope():
        table = keras.Variable(np.ones((5, 2), "float32"), name="table")
        other = keras.Variable(np.ones(3, "float32"), name="other")
        optimizer = DecoupledWeightDecay(make("SGD", 0.0), 0.5, sparse="rows", decay_unused=unused)
        optimizer.build([table, other])

    @tf.function
    def step():
        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = tf.stack([1, 2 + number, 1])
            gradient = tf.IndexedSlices(tf.ones([3, 2]), rows, tf.constant([5, 2]))
            with_other = ([gradient, None], [table, other]) if unused else ([gradient], [table])
            optimizer.apply(*with_other)

        strategy.run(replica)

    step()
    for copy in strategy.experimental_local_results(tf_variable(table)):
        np.testing.assert_array_equal(copy.numpy()[:, 0], [1, 0.5, 0.5, 0.5, 1])
    for copy in strategy.experimental_local_results(tf_variable(other)):
        np.testing.assert_array_equal(copy.numpy(), 0.5 if unused else 1)


def test_changing_trainable_between_fits():
    net = model()
    net.compile(wrap(make("SGD")), "mse")
    fit(net)
    net.layers[0].trainable = False
    optimizer = net.optimizer
    net.compile(optimizer, "mse")
    frozen = values(net.layers[0].weights)
    moved = values(net.layers[1].weights)
    fit(net)
    assert_same(values(net.layers[0].weights), frozen)
    assert not np.array_equal(net.layers[1].kernel.numpy(), moved[0])
