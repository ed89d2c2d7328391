"""Averaging: its trigger, the average, and the exchange of weights."""

import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers_table import X, Y, assert_same, fit, gradients, make, model, values, variables
from stacks import needs_keras3

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD, NonMonotonicASGDCallback

LossScale = keras.optimizers.LossScaleOptimizer


def built(n=2, inner="SGD", dtype="float64", **options):
    optimizer, weights = NonMonotonicASGD(make(inner, **options), n), variables(dtype)
    optimizer.build(weights)
    return optimizer, weights


def trigger(optimizer):
    for loss in [1.0] * (optimizer.non_monotone_interval + 1):
        optimizer.observe(loss)
    assert optimizer.observe(2.0) and optimizer.triggered


def triggered_at(losses, n):
    """The rule of the authors' program, written out: compared before the new loss is appended."""
    before = []
    for t, loss in enumerate(losses):
        if len(before) > n and loss > min(before[:-n]):
            return t
        before.append(loss)
    return None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0]), max_size=12), st.integers(1, 4))
def test_the_trigger_is_that_of_the_paper(losses, n):
    optimizer, _ = built(n)
    seen = [optimizer.observe(loss) for loss in losses]
    expected = triggered_at(losses, n)
    assert seen == [t == expected for t in range(len(losses))]
    assert optimizer.triggered == (expected is not None)


def test_the_trigger_by_example():
    """With 5: a loss equal to the best does not, nor one that only the last five beat."""
    optimizer, _ = built(5)
    for loss in (9, 7, 8, 8, 8, 8, 8, 7):  # 7 > min(9, 7) is false
        assert not optimizer.observe(loss)
    assert optimizer.observe(7.5)
    optimizer, _ = built(5)
    for loss in (9, 3, 3, 3, 3, 3, 8.9):  # more than 3, but the best of all but five is 9
        assert not optimizer.observe(loss)
    assert optimizer.observe(3.1)


def test_losses_that_are_not_numbers_are_the_worst():
    optimizer, _ = built(1)
    assert [optimizer.observe(x) for x in (np.nan, np.inf, 3.0, 2.0, np.nan)] == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_the_average_is_the_mean_of_the_weights_since_the_trigger():
    optimizer, weights = built()
    for step in range(3):
        optimizer.apply(gradients(step), weights)
    trigger(optimizer)
    later = []
    for step in range(3, 8):
        optimizer.apply(gradients(step), weights)
        later.append(values(weights))
    raw = values(weights)
    with optimizer.averaged():
        for i, variable in enumerate(weights):
            mean = np.mean([after[i] for after in later], axis=0)
            np.testing.assert_allclose(variable.numpy(), mean, rtol=1e-13)
    assert_same(values(weights), raw)


def test_training_is_that_of_the_wrapped_optimizer():
    """Bit for bit, before the trigger and after it, with evaluations in between."""
    optimizer, weights = built(inner="Adam", dtype="float32")
    bare, others = make("Adam"), variables("float32")
    for step in range(6):
        if step == 2:
            trigger(optimizer)
        with optimizer.averaged():
            pass
        optimizer.apply(gradients(step, "float32"), weights)
        bare.apply(gradients(step, "float32"), others)
    assert_same(values(weights), values(others))


def test_before_the_trigger_and_the_first_update_the_average_is_the_raw_weights():
    optimizer, weights = built()
    optimizer.apply(gradients(0), weights)
    raw = values(weights)
    with optimizer.averaged():
        assert_same(values(weights), raw)
    trigger(optimizer)
    with optimizer.averaged():
        assert_same(values(weights), raw)
    optimizer.apply(gradients(1), weights)
    raw = values(weights)
    with optimizer.averaged():
        assert optimizer.exchanged
        assert_same(values(weights), raw)


def test_the_raw_weights_come_back_after_an_error():
    optimizer, weights = built()
    trigger(optimizer)
    for step in range(2):
        optimizer.apply(gradients(step), weights)
    raw = values(weights)
    with pytest.raises(KeyboardInterrupt), optimizer.averaged():
        assert not np.array_equal(weights[0].numpy(), raw[0])
        raise KeyboardInterrupt
    assert_same(values(weights), raw)


def test_no_update_while_the_averages_are_in_the_model():
    optimizer, weights = built()
    trigger(optimizer)
    optimizer.apply(gradients(0), weights)
    with (
        optimizer.averaged(),
        pytest.raises(tf.errors.InvalidArgumentError, match="averaged weights are in the model"),
    ):
        optimizer.apply(gradients(1), weights)


@pytest.mark.parametrize("outside", [False, True])
def test_a_skipped_step_is_not_averaged(outside):
    weights = variables("float32")
    asgd = NonMonotonicASGD(make("SGD") if outside else LossScale(make("SGD")), 1)
    optimizer = LossScale(asgd) if outside else asgd
    optimizer.build(weights)
    trigger(asgd)
    scale, after = 2.0**15, []
    for step, factor in enumerate((scale, np.inf, scale / 2)):
        optimizer.apply([g * factor for g in gradients(step, "float32")], weights)
        if factor < np.inf:
            after.append(values(weights))
    with asgd.averaged():
        for i, variable in enumerate(weights):
            mean = (after[0][i] + after[1][i]) / 2
            np.testing.assert_allclose(variable.numpy(), mean, rtol=1e-5)


@needs_keras3("accumulation of gradients")
def test_accumulated_gradients_are_averaged_once_an_update():
    optimizer, weights = built(gradient_accumulation_steps=2)
    trigger(optimizer)
    after = []
    for step in range(4):
        optimizer.apply(gradients(step), weights)
        if step % 2:
            after.append(values(weights))
    with optimizer.averaged():
        np.testing.assert_allclose(weights[0].numpy(), (after[0][0] + after[1][0]) / 2, rtol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_in_a_tf_function_it_need_not_be_traced_again(compiled):
    optimizer, weights = built()
    step = tf.function(
        lambda a, b: optimizer.apply([a, b], weights), jit_compile=compiled, autograph=False
    )
    step(*gradients(0))
    trigger(optimizer)
    after = []
    for number in range(1, 4):
        step(*gradients(number))
        after.append(weights[0].numpy())
    with optimizer.averaged():
        np.testing.assert_allclose(weights[0].numpy(), np.mean(after, axis=0), rtol=1e-12)
    assert step.experimental_get_tracing_count() == 1


def test_on_two_replicas():
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )

    def train():
        net = model()
        decayed = DecoupledWeightDecay(make("SGD"), 0.01)
        net.compile(NonMonotonicASGD(decayed, 1), "mse", jit_compile=False)
        net.optimizer.build(net.trainable_variables)
        trigger(net.optimizer)
        return net

    with strategy.scope():
        mirrored = train()
    single = train()
    for net in (mirrored, single):
        fit(net)
        net.optimizer.exchange()
    for found, expected in zip(mirrored.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


class Seen(keras.callbacks.Callback):
    """The weights at the end of each epoch, and after each step."""

    def __init__(self):
        super().__init__()
        self.at_epochs, self.steps = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.at_epochs.append(self.model.get_weights())

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(self.model.get_weights())


def test_the_callback_in_fit():
    """Validation rises: triggered after the third epoch; then all that is seen is averaged."""
    net, seen = model(), Seen()
    net.compile(NonMonotonicASGD(make("SGD"), 1), "mse", jit_compile=False)
    history = fit(
        net,
        epochs=5,
        validation_data=(X, -Y),
        callbacks=[NonMonotonicASGDCallback(), seen],
    ).history["val_loss"]
    epoch = triggered_at(history, 1)
    assert epoch is not None and 3 * (epoch + 1) < len(seen.steps)
    for end in range(5):
        since = seen.steps[3 * (epoch + 1) : 3 * (end + 1)] or [seen.steps[3 * end + 2]]
        for i, found in enumerate(seen.at_epochs[end]):
            mean = np.mean([step[i] for step in since], axis=0, dtype="float64")
            np.testing.assert_allclose(found, mean, atol=1e-6)
    assert_same(net.get_weights(), seen.at_epochs[-1])
    assert net.optimizer.exchanged
    assert net.evaluate(X, -Y, verbose=0) == pytest.approx(history[-1], rel=1e-5)


def test_the_callback_needs_the_optimizer_and_a_loss():
    net = model()
    net.compile("sgd", "mse")
    with pytest.raises(ValueError, match="compiled with one NonMonotonicASGD; .*SGD, with 0"):
        fit(net, callbacks=[NonMonotonicASGDCallback()])
    net.compile(LossScale(NonMonotonicASGD(make("SGD"))), "mse")
    with pytest.warns(UserWarning, match="no 'val_loss', only loss"):
        fit(net, epochs=2, callbacks=[NonMonotonicASGDCallback()])


def test_a_moving_average_of_keras_s_gives_way_once_this_one_is_in_the_model():
    """Keras writes its own into the model when `fit` ends; until the trigger it may."""
    average = {"use_ema": True, "ema_momentum": 0.5}
    weights = []
    for options in ({}, average):
        net = model()
        net.compile(NonMonotonicASGD(make("SGD", 0.01, **options), 1), "mse")
        net.optimizer.build(net.trainable_variables)
        trigger(net.optimizer)
        fit(net, epochs=2, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
        assert net.optimizer.exchanged
        weights.append(net.get_weights())
        net.optimizer.exchange()
        weights.append(net.get_weights())
    assert_same(weights[2], weights[0])
    assert_same(weights[3], weights[1])  # the raw ones
    net = model()
    net.compile(NonMonotonicASGD(make("SGD", 0.01, **average), 9), "mse")
    fit(net, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
    slots = net.optimizer._model_variables_moving_average
    assert_same(net.get_weights(), values(slots))


SILENT = "was told of no validation loss yet, so it averages nothing and is SGD alone"


@pytest.mark.parametrize("around", [lambda o: o, LossScale, lambda o: DecoupledWeightDecay(o, 0.1)])
def test_a_fit_without_the_callback_says_once_that_nothing_is_averaged(around):
    net = model()
    net.compile(around(NonMonotonicASGD(make("SGD"), name="average")), "mse")
    with pytest.warns(UserWarning, match="'average' " + SILENT) as caught:
        fit(net, validation_data=(X, Y))
    assert "callbacks=[NonMonotonicASGDCallback()]" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(net)


def test_it_says_nothing_where_the_callback_or_the_user_tells_it_losses():
    net = model()
    net.compile(NonMonotonicASGD(make("SGD")), "mse")
    net.optimizer.build(net.trainable_variables)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(net, validation_data=(X, Y), callbacks=[NonMonotonicASGDCallback()])
        fit(net)
    net = model()
    net.compile(NonMonotonicASGD(make("SGD")), "mse")
    with pytest.warns(UserWarning, match="an epoch's logs have no 'val_loss'") as caught:
        fit(net, callbacks=[NonMonotonicASGDCallback()])
    assert not any(re.search(SILENT, str(warning.message)) for warning in caught)
    with pytest.warns(UserWarning, match=SILENT):  # the callback was of the other fit
        fit(net)


@pytest.mark.parametrize("n", [0, -1, 2.5, True, None])
def test_the_interval(n):
    with pytest.raises(ValueError, match="non_monotone_interval=.*: give a whole number"):
        NonMonotonicASGD("sgd", n)


def test_observing_before_there_are_weights():
    with pytest.raises(ValueError, match=r"call build\(variables\), or train, before"):
        NonMonotonicASGD("sgd").observe(1.0)


def test_config():
    optimizer = NonMonotonicASGD(DecoupledWeightDecay("sgd", 0.1), 3, name="mine")
    again = keras.optimizers.get(keras.optimizers.serialize(optimizer))
    assert again.non_monotone_interval == 3 and again.name == "mine"
    assert again.optimizer.weight_decay == 0.1


@pytest.mark.parametrize(("dtype", "n"), [("bfloat16", 300), ("float16", 1200)])
def test_averages_of_half_precision_are_in_single(dtype: str, n: int) -> None:
    weight = keras.Variable([0.0], dtype=dtype)
    optimizer = NonMonotonicASGD(keras.optimizers.SGD(1.0), 1)
    optimizer.build([weight])
    for loss in (3.0, 2.0, 4.0):
        optimizer.observe(loss)

    @tf.function
    def steps(count: tf.Tensor) -> None:
        for _ in tf.range(count):
            optimizer.apply([tf.zeros([1], dtype)], [weight])

    for value in (2.0, 1.0078125):
        weight.assign([value])
        steps(tf.constant(n))
    with optimizer.averaged():
        ulp = 2.0**-10 if dtype == "float16" else 2.0**-7
        assert float(weight[0]) == pytest.approx(1.50390625, abs=ulp)
    assert float(weight[0]) == 1.0078125  # the raw weight again, to the last bit
    steps(tf.constant(1))
    expected = (2.0 * n + 1.0078125 * (n + 1)) / (2 * n + 1)
    assert float(optimizer._averages[0][0]) == pytest.approx(expected, abs=1e-5)


class Watching(keras.callbacks.Callback):
    """What a callback that saves the optimizer when an epoch ends would find there."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluations: list[int] = []

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.evaluations.append(int(self.model.optimizer._evaluations.numpy()))


@pytest.mark.parametrize("first", [False, True])
def test_callbacks_before_it_find_the_epochs_loss_observed(first: bool) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(NonMonotonicASGD("sgd", 1), "mse")
    x, y = np.zeros((4, 2)), np.ones((4, 1))
    watching, own = Watching(), NonMonotonicASGDCallback()
    callbacks = [watching, own] if first else [own, watching]
    model.fit(x, y, validation_data=(x, -y), epochs=3, verbose=0, callbacks=callbacks)
    assert watching.evaluations == [1, 2, 3]
