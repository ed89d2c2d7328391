"""Decay of legacy optimizers in `fit`, under loss scales and on replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_tools import X, Y, assert_same, fit, gradients, model, values, variables
from replicas import two_replicas

from tfwd.optimizers import (
    DecoupledWeightDecay,
    NonMonotonicASGD,
    NonMonotonicASGDCallback,
)

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons is on the other stack")
from addons_optimizers_table import (  # noqa: E402
    AVERAGES,
    RATE,
    D,
    LossScale,
    legacy,
    steps,
)

# Loss scales, replicas, custom averages.

NESTINGS = {
    "around": lambda: LossScale(DecoupledWeightDecay(legacy.Adam(RATE), D, exclude="bias")),
    "inside": lambda: DecoupledWeightDecay(LossScale(legacy.Adam(RATE)), D, exclude="bias"),
    "none": lambda: DecoupledWeightDecay(legacy.Adam(RATE), D, exclude="bias"),
}


def test_the_order_of_nesting_with_loss_scaling_does_not_matter():
    keras.mixed_precision.set_global_policy("mixed_float16")
    found = []
    for nest in NESTINGS.values():  # Keras puts a loss scale around the second and the third
        net = model()
        net.compile(nest(), "mse")
        fit(net, epochs=2)
        found.append(net.get_weights())
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@pytest.mark.parametrize("nest", ["around", "inside"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_skipped_step_changes_nothing(nest, compiled):
    optimizer, weights = NESTINGS[nest](), variables("float32")
    steps(optimizer, weights, compiled=compiled)
    before, slots = values(weights), [v.numpy() for v in optimizer.variables()]
    infinite = [g * np.inf for g in gradients(0, "float32")]

    def step():
        optimizer.apply_gradients(zip(infinite, weights, strict=True))

    (tf.function(step, autograph=False) if compiled else step)()
    assert_same(values(weights), before)
    for variable, old in zip(optimizer.variables(), slots, strict=True):
        assert "iter" in variable.name or np.array_equal(variable.numpy(), old)


@pytest.mark.parametrize("nest", NESTINGS)
def test_fit_on_two_replicas(nest):
    strategy = two_replicas()
    with strategy.scope():
        mirrored = model()
        mirrored.compile(NESTINGS[nest](), "mse")
    single = model()
    single.compile(NESTINGS[nest](), "mse")
    for net in (mirrored, single):
        fit(net, epochs=2)
    for found, expected in zip(mirrored.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", AVERAGES)
def test_averages_on_two_replicas(name, inside):
    def compiled():
        net, average = model(), AVERAGES[name]
        if inside:
            optimizer = average(DecoupledWeightDecay(legacy.Adam(RATE), D, exclude="bias"))
        else:
            optimizer = DecoupledWeightDecay(average(legacy.Adam(RATE)), D, exclude="bias")
        net.compile(optimizer, "mse")
        return net

    strategy = two_replicas()
    with strategy.scope():
        mirrored = compiled()
    single = compiled()
    for net in (mirrored, single):
        fit(net, epochs=2)
    for found, expected in zip(mirrored.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_rows_on_two_replicas():
    """Checks that the rows of both replicas' gradients are decayed once."""
    strategy = two_replicas()
    with strategy.scope():
        table = tf.Variable(np.ones((5, 2), "float32"), name="table")
        optimizer = DecoupledWeightDecay(legacy.SGD(0.0), 0.5, sparse="rows")
        optimizer.build([table])

    @tf.function
    def step():
        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = tf.stack([1, 2 + number, 1])
            gradient = tf.IndexedSlices(tf.ones([3, 2]), rows, tf.constant([5, 2]))
            optimizer.apply([gradient], [table])

        strategy.run(replica)

    step()
    for copy in strategy.experimental_local_results(table):
        np.testing.assert_array_equal(copy.numpy()[:, 0], [1, 0.5, 0.5, 0.5, 1])


def test_non_monotonic_averages_around_the_decay_of_a_legacy_optimizer():
    """Checks averages under a loss scale, with every wrapper of the legacy kind."""
    weights = variables("float32")
    asgd = NonMonotonicASGD(DecoupledWeightDecay(legacy.SGD(0.0), 0.5), 1)
    optimizer = LossScale(asgd)
    asgd.build(weights)
    for loss in (1.0, 1.0, 2.0):
        asgd.observe(loss)
    old, grads = values(weights), gradients(0, "float32")
    for factor in (1.0, np.inf, 1.0):
        optimizer.apply_gradients([(g * factor, v) for g, v in zip(grads, weights, strict=True)])
    with asgd.averaged():
        for variable, before in zip(weights, old, strict=True):
            np.testing.assert_allclose(variable.numpy(), before * (0.5 + 0.25) / 2, rtol=1e-6)


def test_non_monotonic_averages_of_a_legacy_optimizer(tmp_path):
    def compiled():
        net = model()
        net.compile(NonMonotonicASGD(legacy.SGD(RATE), 1), "mse")
        net.optimizer.build(net.trainable_variables)
        for loss in (1.0, 1.0, 2.0):
            net.optimizer.observe(loss)
        return net

    net, seen = compiled(), []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(net.get_weights())
    )
    fit(net, epochs=2, callbacks=[NonMonotonicASGDCallback("loss"), keep])
    for i, found in enumerate(net.get_weights()):
        np.testing.assert_allclose(found, np.mean([w[i] for w in seen], axis=0), atol=1e-6)
    path = tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(tmp_path / "state"))
    again = compiled()
    state = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    state.read(path).assert_existing_objects_matched()
    assert again.optimizer.exchanged
    for optimizer in (net.optimizer, again.optimizer):
        optimizer.exchange()
    assert_same(again.get_weights(), seen[-1])


def test_a_custom_loop_with_a_loss_scale_inside():
    """Checks the same loop as on Keras 3: `scale_loss`, then `apply`."""
    found = []
    for nest in ("inside", "none"):
        net, optimizer = model(), NESTINGS[nest]()
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((net(X) - Y) ** 2)
                scaled = optimizer.scale_loss(loss)
            weights = net.trainable_variables
            optimizer.apply(tape.gradient(scaled, weights), weights)
        found.append(net.get_weights())
    assert_same(found[0], found[1])  # the scale is a power of two


# Files of Keras 2.

KINDS = {
    "new": lambda schedule: keras.optimizers.Adam(schedule),
    "legacy": lambda schedule: legacy.Adam(schedule),
    "Lookahead": lambda schedule: AVERAGES["Lookahead"](legacy.Adam(schedule)),
}


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
@pytest.mark.parametrize("form", ["net.keras", "net.h5", "net"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_as_a_whole_model(kind, form, tmp_path):
    """Checks whole models.

    HDF5 holds the state of each optimizer. `.keras` holds it for new optimizers only.
    """
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5)
    net = model()
    net.compile(DecoupledWeightDecay(KINDS[kind](schedule), schedule, exclude="bias"), "mse")
    fit(net)
    net.save(tmp_path / form)
    again = keras.models.load_model(tmp_path / form)
    assert again.optimizer.__class__ is DecoupledWeightDecay
    assert again.optimizer.inner.__class__ is net.optimizer.inner.__class__
    config = again.optimizer.get_config()
    assert config["exclude"] == ["bias"] and again.optimizer.weight_decay.decay_rate == 0.5
    assert_same(again.get_weights(), net.get_weights())
    if form == "net.h5" or (kind == "new" and form == "net.keras"):
        for found in (net, again):
            fit(found)
        assert_same(again.get_weights(), net.get_weights())


def test_an_update_that_keras_compiles_keeps_nothing_of_the_decay():
    inner, weights = keras.optimizers.SGD(RATE), variables("float32")
    inner.jit_compile = True  # its value on a GPU
    old, grads = values(weights), gradients(0, "float32")
    DecoupledWeightDecay(inner, 0.5).apply(grads, weights)
    DecoupledWeightDecay(inner, 0.25).apply(grads, weights)
    inner.apply_gradients(zip(grads, weights, strict=True))
    for found, before, gradient in zip(weights, old, grads, strict=True):
        step = RATE * gradient.numpy()
        right = ((before * 0.5 - step) * 0.75 - step) - step
        np.testing.assert_allclose(found.numpy(), right, rtol=1e-5, atol=1e-6)


# Arguments and errors.


def test_hyperparameters_are_the_wrapped_ones():
    inner = legacy.Adam(RATE, beta_1=0.5)
    optimizer = DecoupledWeightDecay(inner, D, name="mine")
    optimizer.beta_1 = 0.75
    optimizer.lr = 0.5
    assert (float(inner.beta_1), float(inner.learning_rate)) == (0.75, 0.5)
    assert optimizer.name == "mine" and optimizer.epsilon == inner.epsilon
    with pytest.raises(AttributeError, match="no_such"):
        _ = optimizer.no_such
    with pytest.raises(AttributeError, match="pass a schedule, a function or a tf.Variable"):
        DecoupledWeightDecay(tfa.optimizers.LAMB(), D).weight_decay = 0.2


def test_weights_as_lists():
    optimizer, weights = DecoupledWeightDecay(legacy.Adam(RATE), D), variables("float32")
    steps(optimizer, weights)
    new = [value + 1 for value in optimizer.get_weights()]
    optimizer.set_weights(new)
    assert_same(optimizer.get_weights(), new)
    assert int(optimizer.iterations) == 4
    assert optimizer.get_slot(weights[0], "m").shape == weights[0].shape


def test_a_variable_that_has_its_first_gradient_later():
    optimizer, weights = DecoupledWeightDecay(legacy.SGD(0.0), 0.5), variables("float32")
    old = values(weights)
    grads = gradients(0, "float32")
    optimizer.apply_gradients([(grads[0], weights[0])])
    optimizer.apply_gradients(zip(grads, weights, strict=True))
    np.testing.assert_array_equal(weights[0].numpy(), old[0] * 0.25)
    np.testing.assert_array_equal(weights[1].numpy(), old[1] * 0.5)


@pytest.mark.parametrize("scale", ["absolute", "learning_rate"])
def test_unused_variables_are_decayed_when_asked(scale):
    optimizer = DecoupledWeightDecay(legacy.SGD(0.5), 0.5, scale, decay_unused=True)
    weights = variables("float32")
    old = values(weights)
    optimizer.apply([gradients(0, "float32")[0], None], weights)
    left = 0.5 if scale == "absolute" else 0.75
    np.testing.assert_array_equal(weights[1].numpy(), old[1] * left)
