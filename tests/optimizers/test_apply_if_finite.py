"""`ApplyIfFinite`: a skipped step changes nothing, and other steps equal the bare optimizer's.

The oracle is the plain optimizer, which gets the good gradients only.
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import make
from non_finite_optimizer_steps import (
    INNER,
    LEGACY,
    NESTINGS,
    LossScale,
    assert_alike,
    check,
    function,
    run,
    some_bad,
    spoiled,
    state,
    stepping,
)
from optimizer_tools import assert_same, gradients, trigger, values, variables
from stack_marks import quick_rows
from tables_by_make_target import with_slow_rest

from tfwd.optimizers import ApplyIfFinite, NonMonotonicASGD

Schedule = keras.optimizers.schedules.LearningRateSchedule


BAD = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}


MODES = ("eager", "graph", "xla")


@quick_rows("nan-*")
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("value", BAD)
def test_a_single_element(value, mode):
    """Checks one element in the first and the last position of the first and the last weight."""
    optimizer, weights = ApplyIfFinite(make("Adam"), max_consecutive=9), variables("float32")
    optimizer.build(weights)
    step = stepping(optimizer, weights, mode)
    step(*gradients(0, "float32"))
    before, kept = values(weights), state(optimizer)
    bad = 0
    for which in (0, -1):
        for place in (0, -1):
            bad += 1
            step(*spoiled(gradients(1, "float32"), BAD[value], which, place))
            assert_same(values(weights), before)
            assert_same(state(optimizer), kept)
            assert (optimizer.skipped, optimizer.consecutive) == (bad, bad)
    step(*gradients(1, "float32"))
    assert (optimizer.skipped, optimizer.consecutive, int(optimizer.iterations)) == (4, 0, 2)
    plain = make("Adam")
    expected = run(plain, [gradients(n, "float32") for n in range(2)], mode)
    assert_alike(values(weights), expected, mode)
    assert_alike(state(optimizer), state(plain), mode)


@quick_rows("*Adam*", "*SGD*")
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("name", INNER)
def test_as_the_bare_optimizer_on_good_steps(name, mode):
    optimizer = check(ApplyIfFinite(INNER[name]()), INNER[name](), mode)
    assert (optimizer.skipped, optimizer.consecutive) == (3, 0)


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("name", LEGACY)
def test_legacy_optimizers(name, mode):
    if mode == "xla" and name not in ("Adam", "SGD", "momentum"):
        pytest.skip("some are enough, and some XLA cannot compile")
    check(ApplyIfFinite(LEGACY[name]()), LEGACY[name](), mode)


def test_large_numbers_are_finite():
    """Checks large numbers: their sum overflows, of either sign or to NaN; none is infinite."""
    huge = float(np.finfo("float32").max)
    for row in ([huge, huge], [-huge, -huge], [huge, -huge]):
        steps = [[tf.constant([row] * 3), tf.constant(row)]]
        optimizer = ApplyIfFinite(make("SGD", 1e-30))
        assert_same(run(optimizer, steps), run(make("SGD", 1e-30), steps))
        assert optimizer.skipped == 0


@quick_rows("decay inside-*", "all-*")
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("name", NESTINGS)
def test_in_and_around_other_wrappers(name, mode):
    found = []
    for nest, steps in zip(NESTINGS[name], some_bad(), strict=True):
        optimizer = nest()
        weights = run(optimizer, steps, mode)
        found.append([*weights, *sorted(state(optimizer), key=str)])
    assert_alike(*found, mode)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("around", [True, False])
def test_a_loss_scale_sees_what_it_must(around, mode):
    """Checks that a loss scale is lowered as without the wrapper, and counts no more steps."""

    def nest(inner):
        return ApplyIfFinite(LossScale(inner)) if around else LossScale(ApplyIfFinite(inner))

    mixed, _ = some_bad()
    mixed = [[gradient * 2.0**15 for gradient in grads] for grads in mixed]
    wrapped, plain = nest(make("Adam")), LossScale(make("Adam"))
    found = []
    for optimizer in (wrapped, plain):
        weights = variables("float32")
        optimizer.build(weights)

        step = stepping(optimizer, weights, mode)
        for grads in mixed:
            step(*grads)
        found.append(values(weights))
    assert_alike(*found, mode)
    held = wrapped.optimizer if around else wrapped
    assert float(held.dynamic_scale) == float(plain.dynamic_scale) == 2.0**12
    assert (wrapped if around else wrapped.inner_optimizer).skipped == 0


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_an_average_around_that_has_a_loss_scale_inside(mode):
    """Checks that a step is averaged if neither wrapper has skipped it."""
    optimizer = NonMonotonicASGD(ApplyIfFinite(LossScale(make("SGD"))), 1)
    weights = variables("float32")
    optimizer.build(weights)
    trigger(optimizer)
    step = stepping(optimizer, weights, mode)
    after = []
    for number, grads in enumerate(some_bad()[0]):
        rate = math.nan if number == 1 else 0.1
        optimizer.learning_rate.assign(rate)
        step(*grads)
        if number in (4, 5):
            after.append(values(weights))
    assert optimizer.optimizer.skipped >= 1
    with optimizer.averaged():
        for found, one, two in zip(values(weights), *after, strict=True):
            np.testing.assert_allclose(found, (one + two) / 2, rtol=1e-6)


def test_a_loss_scale_that_acts_outside():
    """Checks that the loss scale inside is turned off, so that gradients are checked again."""
    inner = ApplyIfFinite(LossScale(make("Adam")))
    LossScale(inner)
    weights = variables("float32")
    inner.build(weights)
    inner.apply_gradients(zip(spoiled(gradients(0, "float32")), weights, strict=True))
    assert inner.skipped == 1


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1])
def test_a_learning_rate_that_is_assigned(value, mode):
    optimizer, plain = ApplyIfFinite(make("Adam")), make("Adam")
    weights = variables("float32")
    optimizer.build(weights)
    step = stepping(optimizer, weights, mode)
    for number in range(4):
        optimizer.learning_rate.assign(value if number in (0, 2) else 0.1)
        step(*gradients(number, "float32"))
    good = [gradients(number, "float32") for number in (1, 3)]
    assert_alike(values(weights), run(plain, good, mode), mode)
    assert optimizer.skipped == 2
    assert int(optimizer.iterations) == 2


@keras.saving.register_keras_serializable("test_apply_if_finite")
class Broken(Schedule):
    """A schedule of 0.1, except for one step."""

    def __init__(self, value, at):
        self.value, self.at = value, at

    def __call__(self, step):
        return tf.where(tf.cast(step, tf.int64) == self.at, self.value, 0.1)

    def get_config(self):
        return {"value": self.value, "at": self.at}


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("value", [math.nan, -0.5])
def test_a_schedule_that_breaks_is_left_out_until_that_is_too_often(value, mode):
    """Checks that the counter and the schedule stay: the same step is tried again."""
    optimizer = ApplyIfFinite(make("SGD", Broken(value, 1)), max_consecutive=3)
    weights = variables("float32")
    optimizer.build(weights)
    step = stepping(optimizer, weights, mode)
    step(*gradients(0, "float32"))
    before = values(weights)
    for number in (1, 2, 3):
        step(*gradients(number, "float32"))
        assert_same(values(weights), before)
        assert (optimizer.skipped, optimizer.consecutive) == (number, number)
    step(*gradients(4, "float32"))
    assert (optimizer.skipped, optimizer.consecutive, int(optimizer.iterations)) == (3, 4, 2)
    for found, old, gradient in zip(values(weights), before, gradients(4, "float32"), strict=True):
        np.testing.assert_allclose(found, old - value * gradient.numpy(), rtol=1e-5)


def test_a_rate_of_zero_is_good():
    optimizer = ApplyIfFinite(make("SGD", 0.0))
    run(optimizer, [gradients(0, "float32")])
    assert optimizer.skipped == 0 and int(optimizer.iterations) == 1


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_more_than_so_many_in_a_row_are_made(allowed, mode):
    optimizer, weights = ApplyIfFinite(make("SGD"), max_consecutive=allowed), variables("float32")
    optimizer.build(weights)
    step = stepping(optimizer, weights, mode)
    good, bad = gradients(0, "float32"), spoiled(gradients(1, "float32"))
    for _ in range(allowed):
        step(*bad)
    step(*good)
    assert optimizer.consecutive == 0 and optimizer.skipped == allowed
    for _ in range(allowed):
        step(*bad)
    assert np.isfinite(weights[0].numpy()).all()
    assert int(optimizer.iterations) == 1
    step(*bad)
    assert np.isnan(weights[0].numpy().ravel()[0])
    assert optimizer.consecutive == allowed + 1 and optimizer.skipped == 2 * allowed
    step(*bad)
    assert int(optimizer.iterations) == 3 and optimizer.skipped == 2 * allowed


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_sparse_gradients(kind, mode):
    def train(optimizer, bad):
        table = keras.Variable(np.arange(1.0, 11).reshape(5, 2), dtype="float32", name="table")
        optimizer.build([table])

        def apply(parts):
            rows = tf.IndexedSlices(parts, tf.constant([3, 0, 3]), tf.constant([5, 2]))
            optimizer.apply_gradients([(rows, table)])

        step = function(apply, mode)
        for number in range(4):
            parts = np.random.default_rng(number).normal(size=(3, 2)).astype("float32")
            if number % 2:
                parts[-1, -1] = np.inf
            if bad or not number % 2:
                step(tf.constant(parts))
        return [table.numpy(), *state(optimizer)]

    optimizer = ApplyIfFinite(make(kind))
    assert_alike(train(optimizer, True), train(make(kind), False), mode)
    assert optimizer.skipped == 2


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_variables_without_a_gradient(mode):
    def train(optimizer, steps):
        weights = variables("float32")
        optimizer.build(weights)
        step = function(
            lambda g: optimizer.apply_gradients(zip([g, None], weights, strict=True)), mode
        )
        for grads in steps:
            step(grads[0])
        return [*values(weights), *state(optimizer)]

    mixed, good = some_bad()
    found = train(ApplyIfFinite(make("Adam")), mixed)
    assert_alike(found, train(make("Adam"), good), mode)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_other_dtypes(dtype, mode):
    def steps(bad):
        for number in range(4):
            found = gradients(number, "float32")
            if number != 2 or bad:
                found = spoiled(found, math.inf, 1, -1) if number == 2 else found
                yield [tf.cast(gradient, dtype) for gradient in found]

    optimizer = ApplyIfFinite(make("SGD", momentum=0.9))
    found = run(optimizer, steps(True), mode, dtype)
    expected = run(make("SGD", momentum=0.9), steps(False), mode, dtype)
    assert_alike(*([tf.cast(v, tf.float32) for v in vs] for vs in (found, expected)), mode)
    assert optimizer.skipped == 1


def test_arrays_are_looked_at_too():
    optimizer, weight = ApplyIfFinite(make("SGD")), keras.Variable([1.0, 2.0])
    optimizer.build([weight])
    optimizer.apply([np.array([np.nan, 1.0], "float32")], [weight])
    assert optimizer.skipped == 1
    assert_same([weight.numpy()], [[1.0, 2.0]])
