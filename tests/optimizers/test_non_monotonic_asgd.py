"""Averaging: its trigger, the average, and the exchange of weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras_optimizers_table import make
from optimizer_tools import (
    LossScale,
    assert_same,
    fit,
    gradients,
    model,
    trigger,
    triggered_at,
    values,
    variables,
)
from replicas import two_replicas
from stack_marks import extended, needs_keras3, quick_rows

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD


def built(n=2, inner="SGD", dtype="float64", **options):
    optimizer, weights = NonMonotonicASGD(make(inner, **options), n), variables(dtype)
    optimizer.build(weights)
    return optimizer, weights


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0]), max_size=12), st.integers(1, 4))
def test_the_trigger_follows_the_paper(losses, n):
    optimizer, _ = built(n)
    seen = [optimizer.observe(loss) for loss in losses]
    expected = triggered_at(losses, n)
    assert seen == [t == expected for t in range(len(losses))]
    assert optimizer.triggered == (expected is not None)


def test_the_trigger_by_example():
    """Checks the rule with 5: the loss must exceed the minimum of all but the last five."""
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


def test_training_equals_the_wrapped_optimizers():
    """Checks training bit for bit, before and after the trigger, with evaluations in between."""
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


@extended
def test_on_two_replicas():
    strategy = two_replicas()

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


@pytest.mark.parametrize("n", [0, -1, 2.5, True, None])
def test_the_interval(n):
    with pytest.raises(ValueError, match="non_monotone_interval=.*: expected an integer"):
        NonMonotonicASGD("sgd", n)


def test_observing_before_there_are_weights():
    with pytest.raises(ValueError, match=r"call build\(variables\), or train, before"):
        NonMonotonicASGD("sgd").observe(1.0)


def test_config():
    optimizer = NonMonotonicASGD(DecoupledWeightDecay("sgd", 0.1), 3, name="mine")
    again = keras.optimizers.get(keras.optimizers.serialize(optimizer))
    assert again.non_monotone_interval == 3 and again.name == "mine"
    assert again.optimizer.weight_decay == 0.1


@quick_rows("bfloat16-*")
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
