"""Saving and restoring: .keras, weight files, TensorFlow checkpoints, configs, copies."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import HAS_MULTI, make
from optimizer_tools import X, Y, assert_same, fit, model, values
from stack_marks import extended, quick_rows
from tables_by_make_target import with_slow_rest

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD, NonMonotonicASGDCallback

LossScale = keras.optimizers.LossScaleOptimizer
Schedule = keras.optimizers.schedules.ExponentialDecay
OPTIMIZERS = {
    "Adam": lambda: DecoupledWeightDecay(make("Adam"), 0.03, exclude="bias"),
    "momentum, scaled": lambda: DecoupledWeightDecay(
        make("SGD", Schedule(0.1, 2, 0.5), momentum=0.9), 0.03, "schedule", multipliers={"bias": 2}
    ),
    "towards the start": lambda: DecoupledWeightDecay(
        make("Adam"), 0.03, exclude="bias", towards="start"
    ),
    "loss scale around": lambda: LossScale(DecoupledWeightDecay(make("Adam"), 0.03)),
    "loss scale inside": lambda: DecoupledWeightDecay(LossScale(make("Adam")), 0.03),
    "averaged": lambda: NonMonotonicASGD(DecoupledWeightDecay(make("Adam"), 0.03), 1),
}
if HAS_MULTI:
    OPTIMIZERS["several"] = lambda: DecoupledWeightDecay(make("Multi"), 0.03, "schedule")


def compiled(name):
    net = model()
    net.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    net.optimizer.build(net.trainable_variables)
    if name == "averaged":
        for loss in (1.0, 1.0, 2.0):
            net.optimizer.observe(loss)
    return net


def by_keras(net, folder, name):
    net.save(folder / "net.keras")
    return keras.saving.load_model(folder / "net.keras")


def by_weights(net, folder, name):
    """Saves weights; the file has the optimizer's state too, once the optimizer is built."""
    net.save_weights(folder / "net.weights.h5")
    fresh = model()
    fresh.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(folder / "net.weights.h5")
    return fresh


def by_checkpoint(net, folder, name):
    path = tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(folder / "state"))
    fresh = model()
    fresh.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    fresh.optimizer.build(fresh.trainable_variables)
    state = tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer)
    state.read(path).assert_existing_objects_matched()
    return fresh


# Averages around a decay, and a loss scale around a decay, have the state of the others.
@quick_rows("averaged")
@pytest.mark.parametrize("name", with_slow_rest(OPTIMIZERS, ("averaged", "loss scale around")))
def test_a_restart_in_the_middle_is_no_restart(name, tmp_path):
    whole = compiled(name)
    fit(whole, epochs=2)
    half = compiled(name)
    fit(half)
    for way in (by_keras, by_weights, by_checkpoint):
        again = way(half, tmp_path, name)
        assert_same(values(again.optimizer.variables), values(half.optimizer.variables))
        fit(again)
        assert_same(again.get_weights(), whole.get_weights())
        assert_same(values(again.optimizer.variables), values(whole.optimizer.variables))


@extended
def test_excluded_variables_are_bit_identical_after_save_and_load(tmp_path):
    def frozen_but_for_decay():
        optimizer = DecoupledWeightDecay(make("SGD", 0.0), 0.5, exclude=["bias", "out/kernel"])
        net = model()
        net.compile(optimizer, "mse")
        return net

    net = frozen_but_for_decay()
    start = net.get_weights()
    fit(net)
    net = by_keras(net, tmp_path, "")
    fit(net)
    hidden, *others = net.get_weights()
    np.testing.assert_allclose(hidden, start[0] * 0.5**6, rtol=1e-6)
    assert_same(others, start[1:])


def test_config_has_every_argument():
    arguments = {
        "weight_decay": 0.1,
        "scale": "learning_rate",
        "include": ["kernel"],
        "exclude": ["out/kernel"],
        "multipliers": {"hidden/.*": 0.5},
        "sparse": "rows",
        "decay_unused": True,
        "name": "mine",
    }
    optimizer = DecoupledWeightDecay(make("Adam", 0.25), **arguments)
    again = keras.optimizers.get(keras.optimizers.serialize(optimizer))
    assert again.__class__ is DecoupledWeightDecay
    for name, value in arguments.items():
        assert getattr(again, name) == value
    assert again.get_config() == optimizer.get_config()
    assert float(again.learning_rate) == 0.25
    assert type(again.optimizer) is keras.optimizers.Adam


def test_a_schedule_of_the_decay_in_a_config():
    optimizer = DecoupledWeightDecay("adam", Schedule(0.1, 5, 0.5))
    again = DecoupledWeightDecay.from_config(optimizer.get_config())
    assert again.weight_decay.get_config() == optimizer.weight_decay.get_config()


def test_the_decay_adds_no_state():
    optimizer = DecoupledWeightDecay(make("Adam"), 0.03)
    net = model()
    optimizer.build(net.trainable_variables)
    assert [id(v) for v in optimizer.variables] == [id(v) for v in optimizer.optimizer.variables]
    old = optimizer.variables
    optimizer.set_weights([v.numpy() + 1 for v in old])
    assert int(optimizer.iterations) == 1


@pytest.mark.filterwarnings("ignore:Skipping variable loading")  # Keras's own, for its optimizers
def test_deepcopy_acts_as_for_a_keras_optimizer():
    """Checks that a copy is a new optimizer with the same arguments and no state."""
    optimizer = DecoupledWeightDecay(make("Adam"), 0.03, exclude="bias")
    for made in (copy.deepcopy(optimizer), copy.copy(optimizer)):
        assert made is not optimizer and made.optimizer is not optimizer.optimizer
        assert made.get_config() == optimizer.get_config()


def test_averaged_weights_and_raw_ones_are_both_in_the_file(tmp_path):
    """Checks a file that is saved with averages in the model: `fit` resumes from raw weights."""

    def make_net():
        net = model()
        net.compile(NonMonotonicASGD(make("SGD"), 1), "mse", jit_compile=False)
        net.optimizer.build(net.trainable_variables)
        for loss in (1.0, 1.0, 2.0):
            net.optimizer.observe(loss)
        return net

    def callback():
        return [NonMonotonicASGDCallback("loss")]

    whole = make_net()
    fit(whole, epochs=4, callbacks=callback())
    half = make_net()
    fit(half, epochs=2, callbacks=callback())
    assert half.optimizer.exchanged
    again = by_keras(half, tmp_path, "")
    assert again.optimizer.exchanged
    assert_same(again.get_weights(), half.get_weights())
    fit(again, epochs=2, callbacks=callback())
    assert_same(again.get_weights(), whole.get_weights())
    assert_same(values(again.optimizer.variables), values(whole.optimizer.variables))


@extended
@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_compiled_model_from_an_hdf5_file(tmp_path):
    """Checks an HDF5 file: Keras 3 builds its optimizer without variables until training begins."""
    net = model()
    optimizer = NonMonotonicASGD(DecoupledWeightDecay(make("Adam"), 0.1, exclude="bias"))
    net.compile(optimizer, keras.losses.MeanSquaredError())
    net.optimizer.build(net.trainable_variables)
    net.save(tmp_path / "net.h5")
    again = keras.saving.load_model(tmp_path / "net.h5")
    assert again.optimizer.get_config() == optimizer.get_config()
    assert_same(again.get_weights(), net.get_weights())
    old = again.get_weights()
    fit(again, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
    assert abs(again.get_weights()[0] - old[0]).max() > 0.01
