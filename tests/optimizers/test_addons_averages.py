"""Decay inside and around Lookahead, SWA and MovingAverage of tensorflow-addons."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizer_tools import assert_same, fit, gradients, model, values, variables

from tfwd.optimizers import (
    DecoupledWeightDecay,
)

tfa = pytest.importorskip("tensorflow_addons", reason="tensorflow-addons is on the other stack")
from addons_optimizers_table import (  # noqa: E402
    AVERAGES,
    RATE,
    D,
    legacy,
    sparse_gradient,
    steps,
    table,
)


@pytest.mark.parametrize("name", AVERAGES)
def test_inside_an_average(name):
    """Checks the average against an optimizer of tensorflow-addons with its own decay."""
    average = AVERAGES[name]
    ours = average(DecoupledWeightDecay(legacy.Adam(RATE), D, sparse="rows"))
    theirs = average(tfa.optimizers.AdamW(D, RATE))
    found = []
    for optimizer in (theirs, ours):
        weights, embedding = variables("float32"), table()
        for number in range(5):
            pairs = [*zip(gradients(number, "float32"), weights, strict=True)]
            optimizer.apply_gradients([*pairs, (sparse_gradient(number), embedding)])
        found.append(values([*weights, embedding]))
        if name != "Lookahead":
            optimizer.assign_average_vars([*weights, embedding])
            found[-1] += values([*weights, embedding])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_exclusions_hold_in_and_around_an_average(name, inside, compiled):
    average = AVERAGES[name]
    if inside:
        optimizer = average(DecoupledWeightDecay(legacy.SGD(0.0), 0.5, exclude="bias"))
    else:
        optimizer = DecoupledWeightDecay(average(legacy.SGD(0.0)), 0.5, exclude="bias")
    weights = variables("float32")
    old = values(weights)
    again = optimizer.__class__.from_config(optimizer.get_config())
    steps(again, weights, 0, 1, compiled)
    np.testing.assert_array_equal(weights[1].numpy(), old[1])
    np.testing.assert_array_equal(weights[0].numpy(), old[0] * 0.5)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", AVERAGES)
def test_fit_and_a_checkpoint_with_an_average(name, inside, tmp_path):
    def compiled():
        net, average = model(), AVERAGES[name]
        decay = {"weight_decay": D, "exclude": "bias"}
        if inside:
            optimizer = average(DecoupledWeightDecay(legacy.Adam(RATE), **decay))
        else:
            optimizer = DecoupledWeightDecay(average(legacy.Adam(RATE)), **decay)
        net.compile(optimizer, "mse")
        return net

    whole, half = compiled(), compiled()
    fit(whole, epochs=2)
    fit(half)
    path = tf.train.Checkpoint(model=half, optimizer=half.optimizer).write(str(tmp_path / "state"))
    again = compiled()
    again.optimizer._create_all_weights(again.trainable_variables)
    state = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
    state.read(path).assert_existing_objects_matched()
    fit(again)
    assert_same(again.get_weights(), whole.get_weights())


def test_the_learning_rate_of_an_average_is_the_inner_optimizers():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    for optimizer in (
        DecoupledWeightDecay(tfa.optimizers.Lookahead(legacy.SGD(schedule)), 0.5, "learning_rate"),
        tfa.optimizers.Lookahead(DecoupledWeightDecay(legacy.SGD(schedule), 0.5, "learning_rate")),
    ):
        weight = tf.Variable([1.0], name="weight")
        for _ in range(2):
            optimizer.apply_gradients([(tf.zeros([1]), weight)])
        assert float(weight[0]) == 0.75 * 0.875
    optimizer = DecoupledWeightDecay(tfa.optimizers.Lookahead(legacy.SGD(0.5)), 0.5, "schedule")
    optimizer.learning_rate = 0.25
    optimizer.lr.assign(0.25)
    assert optimizer.decay_table([weight])[0].decay == 0.25


@pytest.mark.parametrize("name", ["SWA", "MovingAverage"])
def test_tensorflow_addons_saves_the_averages_of_decayed_weights(name, tmp_path):
    net = model()
    net.compile(AVERAGES[name](DecoupledWeightDecay(legacy.Adam(RATE), D)), "mse")
    path = str(tmp_path / "net.keras")
    saving = tfa.callbacks.AverageModelCheckpoint(update_weights=False, filepath=path)
    fit(net, callbacks=[saving])
    saved = keras.models.load_model(path)
    net.optimizer.assign_average_vars(net.trainable_variables)
    assert_same(saved.get_weights(), net.get_weights())
