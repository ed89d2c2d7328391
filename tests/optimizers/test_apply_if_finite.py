"""What ApplyIfFinite leaves out changes nothing; what it makes is the bare optimizer's step.

The oracle is the plain optimizer that is given only the good gradients.
"""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from optimizers_table import (
    HAS_MULTI,
    X,
    Y,
    assert_same,
    gradients,
    make,
    model,
    tf_variable,
    trigger,
    values,
    variables,
)
from stacks import HAS_ADDONS, IS_KERAS_2, needs_keras3
from tables import with_slow_rest

from tfwd.optimizers import ApplyIfFinite, DecoupledWeightDecay, NonMonotonicASGD

if HAS_ADDONS:
    from addons_table import INNER as LEGACY
else:
    LEGACY = {}

LossScale = keras.optimizers.LossScaleOptimizer
Schedule = keras.optimizers.schedules.LearningRateSchedule
BAD = {"nan": math.nan, "+inf": math.inf, "-inf": -math.inf}
MODES = ("eager", "graph", "xla")


def function(step, mode):
    """A step in a mode."""
    if mode == "eager":
        return step
    return tf.function(step, jit_compile=mode == "xla", autograph=False)


def stepping(optimizer, weights, mode):
    """A step of an optimizer, of gradients that it has scaled itself where it does."""
    return function(lambda *grads: optimizer.apply(grads, weights), mode)


def spoiled(grads, value=math.nan, which=0, place=0):
    """Gradients with one element that is not finite."""
    grads = list(grads)
    flat = grads[which].numpy().ravel()
    flat[place] = value
    grads[which] = tf.constant(flat.reshape(grads[which].shape), grads[which].dtype)
    return grads


def run(optimizer, steps, mode="eager", dtype="float32"):
    """The weights after steps, each a list of gradients."""
    weights = variables(dtype)
    build(optimizer, weights)
    for held in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(held, NonMonotonicASGD):
            trigger(held)

    def apply(*grads):
        optimizer.apply_gradients(zip(grads, weights, strict=True))

    step = function(apply, mode)
    for grads in steps:
        step(*grads)
    return values(weights)


def state(optimizer):
    """The values of all variables of an optimizer, without those of ApplyIfFinite itself."""
    found = optimizer.variables() if callable(optimizer.variables) else optimizer.variables
    own = ("skipped", "consecutive")
    return [np.asarray(v) for v in found if not any(name in v.name for name in own)]


def assert_alike(found, expected, mode):
    """Equal, bit for bit; XLA fuses operations otherwise, which may round otherwise."""
    if mode != "xla":
        assert_same(found, expected)
        return
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-8)


def build(optimizer, variables):
    """Makes the state of an optimizer of any kind."""
    if hasattr(optimizer, "build"):
        optimizer.build(variables)
    else:
        optimizer._create_all_weights(variables)


def some_bad(dtype="float32", at=(0, 2, 3)):
    """Six steps, some of them bad, and the good ones alone."""
    steps = [gradients(number, dtype) for number in range(6)]
    mixed = [spoiled(grads) if number in at else grads for number, grads in enumerate(steps)]
    return mixed, [grads for number, grads in enumerate(steps) if number not in at]


def check(wrapped, plain, mode, dtype="float32"):
    """Trains both, and compares all that there is."""
    mixed, good = some_bad(dtype)
    assert_alike(run(wrapped, mixed, mode, dtype), run(plain, good, mode, dtype), mode)
    assert_alike(state(wrapped), state(plain), mode)
    return wrapped


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", BAD)
def test_a_single_element(value, mode):
    """In the first and the last place of the first and the last weight, each by itself."""
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


INNER = {
    "SGD": lambda: make("SGD", momentum=0.9, nesterov=True),
    "Adam": lambda: make("Adam", amsgrad=True),
    "RMSprop, centered": lambda: make("RMSprop", centered=True),
    "Lion": lambda: make("Lion"),
    "clipped": lambda: make("Adam", global_clipnorm=0.5),
    "averaged": lambda: make("Adam", use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
}
if not IS_KERAS_2:
    INNER["accumulated"] = lambda: make("Adam", gradient_accumulation_steps=2)
if HAS_MULTI:
    INNER["several"] = lambda: make("Multi")


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
    """The sum of all elements overflows, of either sign or to NaN; none of them is infinite."""
    huge = float(np.finfo("float32").max)
    for row in ([huge, huge], [-huge, -huge], [huge, -huge]):
        steps = [[tf.constant([row] * 3), tf.constant(row)]]
        optimizer = ApplyIfFinite(make("SGD", 1e-30))
        assert_same(run(optimizer, steps), run(make("SGD", 1e-30), steps))
        assert optimizer.skipped == 0


# Wrappers.

NESTINGS = {
    "decay around": (
        lambda: DecoupledWeightDecay(ApplyIfFinite(make("Adam")), 0.03),
        lambda: DecoupledWeightDecay(make("Adam"), 0.03),
    ),
    "decay inside": (
        lambda: ApplyIfFinite(DecoupledWeightDecay(make("Adam"), 0.03)),
        lambda: DecoupledWeightDecay(make("Adam"), 0.03),
    ),
    "average around": (
        lambda: NonMonotonicASGD(ApplyIfFinite(make("SGD")), 1),
        lambda: NonMonotonicASGD(make("SGD"), 1),
    ),
    "average inside": (
        lambda: ApplyIfFinite(NonMonotonicASGD(make("SGD"), 1)),
        lambda: NonMonotonicASGD(make("SGD"), 1),
    ),
    "all": (
        lambda: NonMonotonicASGD(
            DecoupledWeightDecay(ApplyIfFinite(make("Adam")), 0.03, exclude="bias"), 1
        ),
        lambda: NonMonotonicASGD(DecoupledWeightDecay(make("Adam"), 0.03, exclude="bias"), 1),
    ),
}


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
    """It lowers its scale as it would by itself, and counts no more steps."""

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
    """A step is averaged if neither has left it out."""
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
    """The one inside is turned off, so that gradients are looked at again."""
    inner = ApplyIfFinite(LossScale(make("Adam")))
    LossScale(inner)
    weights = variables("float32")
    inner.build(weights)
    inner.apply_gradients(zip(spoiled(gradients(0, "float32")), weights, strict=True))
    assert inner.skipped == 1


# The learning rate.


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
    """0.1, but for one step."""

    def __init__(self, value, at):
        self.value, self.at = value, at

    def __call__(self, step):
        return tf.where(tf.cast(step, tf.int64) == self.at, self.value, 0.1)

    def get_config(self):
        return {"value": self.value, "at": self.at}


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("value", [math.nan, -0.5])
def test_a_schedule_that_breaks_is_left_out_until_that_is_too_often(value, mode):
    """The counter stands still, and with it the schedule: the same step is tried again."""
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


# How many in a row.


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


# Gradients of other kinds.


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


# fit.


def data(bad):
    """Six batches, two of them bad where `bad`, and left out otherwise."""
    x, y = np.concatenate([X, X]), np.concatenate([Y, Y])
    x = x.copy()
    x[5, 1] = np.nan
    x[13, 3] = np.inf
    x[13, 2] = -np.inf
    kept = np.repeat([bad or n not in (1, 3) for n in range(6)], 4)
    return x[kept], y[kept]


def assert_close(found, expected):
    """Equal but for roundings, which a few steps have made larger."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", with_slow_rest(["Adam", "averaged", "decay"], {"decay"}))
def test_fit(name, compiled):
    """As on the good batches alone."""

    def train(optimizer, bad):
        net = model()
        net.compile(optimizer, "mse", jit_compile=compiled)
        x, y = data(bad)
        net.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return net.get_weights(), net.optimizer

    def made():
        if name == "decay":
            return DecoupledWeightDecay(make("Adam"), 0.03)
        return INNER[name]()

    found, optimizer = train(ApplyIfFinite(made()), True)
    expected, plain = train(made(), False)
    check = assert_close if compiled else assert_same
    check([*found, *state(optimizer)], [*expected, *state(plain)])
    assert (optimizer.skipped, optimizer.consecutive) == (4, 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_finite_steps_are_as_without(compiled):
    def train(wrap):
        net = model()
        net.compile(wrap(make("Adam", global_clipnorm=0.1)), "mse", jit_compile=compiled)
        net.fit(X, Y, batch_size=5, epochs=3, shuffle=False, verbose=0)
        return [*net.get_weights(), *state(net.optimizer)]

    check = assert_close if compiled else assert_same
    check(train(ApplyIfFinite), train(lambda optimizer: optimizer))


def test_fit_in_half_precision():
    """Keras puts a loss scale around, which leaves the step out."""
    keras.config.set_dtype_policy("mixed_float16")
    net = model()
    net.compile(ApplyIfFinite(make("Adam")), "mse", jit_compile=False)
    x, y = data(True)
    net.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert all(np.isfinite(weight).all() for weight in net.get_weights())
    assert net.optimizer.inner_optimizer.skipped == 0


# Replicas.


@pytest.fixture(scope="module")
def strategy():
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


ON_REPLICAS = {
    "Adam": (lambda: ApplyIfFinite(make("Adam")), lambda: make("Adam")),
    "decay around": NESTINGS["decay around"],
    "decay inside": NESTINGS["decay inside"],
    "average around": NESTINGS["average around"],
    "average inside": NESTINGS["average inside"],
    # (Keras itself accumulates no gradients on several replicas, nor puts averages into weights.)
    "averaged": (
        lambda: ApplyIfFinite(make("Adam", use_ema=True)),
        lambda: make("Adam", use_ema=True),
    ),
    "loss scale around": (
        lambda: LossScale(ApplyIfFinite(make("Adam"))),
        lambda: LossScale(make("Adam")),
    ),
    "loss scale inside": (
        lambda: ApplyIfFinite(LossScale(make("Adam"))),
        lambda: LossScale(make("Adam")),
    ),
}
if LEGACY:
    for _name in ("Adam", "LAMB"):
        ON_REPLICAS[f"legacy {_name}"] = (
            lambda _name=_name: ApplyIfFinite(LEGACY[_name]()),
            LEGACY[_name],
        )


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", with_slow_rest(ON_REPLICAS, {"Adam", "decay inside"}))
def test_a_bad_gradient_on_one_replica_is_left_out_by_all(strategy, name, eager):
    if eager and name not in ("Adam", "decay inside"):
        pytest.skip("few are enough")
    results = []
    for wrapped in (True, False):
        with strategy.scope():
            weights = variables("float32")
            optimizer = ON_REPLICAS[name][not wrapped]()
            build(optimizer, weights)
            if isinstance(optimizer, NonMonotonicASGD):
                trigger(optimizer)
            elif isinstance(getattr(optimizer, "optimizer", None), NonMonotonicASGD):
                trigger(optimizer.optimizer)

        def replica(bad_on, a, b, optimizer=optimizer, weights=weights):
            here = tf.distribute.get_replica_context().replica_id_in_sync_group
            bad = tf.where(here == bad_on, math.nan, 0.0)
            grads = [a + tf.cast(here, tf.float32), b + bad]
            optimizer.apply_gradients(zip(grads, weights, strict=True))

        def step(bad_on, a, b, replica=replica):
            strategy.run(replica, args=(bad_on, a, b))

        step = step if eager else tf.function(step, autograph=False)
        # (Keras's loss scale asks the first replica alone.)
        for number, bad_on in enumerate((-1, 0 if "scale" in name else 1, -1, 0, -1)):
            if wrapped or bad_on < 0 or "scale" in name:
                grads = gradients(number, "float32")
                if "scale" in name:
                    grads = [gradient * 2.0**15 for gradient in grads]
                step(tf.constant(bad_on), *grads)
        copies = [strategy.experimental_local_results(tf_variable(v)) for v in weights]
        for one, two in copies:
            np.testing.assert_array_equal(one.numpy(), two.numpy())
        results.append((values(weights), sorted(map(str, state(optimizer)))))
        if wrapped and "scale" not in name:
            gate = optimizer if isinstance(optimizer, ApplyIfFinite) else optimizer.optimizer
            assert (gate.skipped, gate.consecutive) == (2, 0)
    assert_same(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_fit_on_two_replicas(strategy):
    def train(optimizer, bad):
        with strategy.scope():
            net = model()
            net.compile(optimizer(), "mse", jit_compile=False)
        x, y = data(bad)
        net.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return [*net.get_weights(), *state(net.optimizer)]

    found = train(lambda: ApplyIfFinite(make("Adam")), True)
    assert_same(found, train(lambda: make("Adam"), False))


# Saved and restored.


def trained():
    net = model()
    net.compile(ApplyIfFinite(make("Adam"), max_consecutive=2, name="gate"), "mse")
    x, y = data(True)
    net.fit(x[:8], y[:8], batch_size=4, shuffle=False, verbose=0)
    return net


def goes_on(net):
    net.fit(*data(True), batch_size=4, shuffle=False, verbose=0)
    return [*net.get_weights(), net.optimizer.skipped, net.optimizer.consecutive]


def test_saved_by_keras(tmp_path):
    net = trained()
    net.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    assert isinstance(loaded.optimizer, ApplyIfFinite)
    assert loaded.optimizer.max_consecutive == 2 and loaded.optimizer.name == "gate"
    assert (loaded.optimizer.skipped, loaded.optimizer.consecutive) == (1, 1)
    assert_same(goes_on(loaded), goes_on(net))


def test_saved_by_tensorflow(tmp_path):
    net = trained()
    path = tf.train.Checkpoint(model=net, optimizer=net.optimizer).write(str(tmp_path / "state"))
    fresh = model()
    fresh.compile(ApplyIfFinite(make("Adam"), max_consecutive=2), "mse")
    fresh.optimizer.build(fresh.trainable_variables)
    found = tf.train.Checkpoint(model=fresh, optimizer=fresh.optimizer)
    found.read(path).assert_existing_objects_matched()
    assert (fresh.optimizer.skipped, fresh.optimizer.consecutive) == (1, 1)
    assert_same(goes_on(fresh), goes_on(net))


def test_config():
    optimizer = ApplyIfFinite(DecoupledWeightDecay(make("Adam"), 0.03), 7, name="gate")
    again = ApplyIfFinite.from_config(optimizer.get_config())
    assert (again.max_consecutive, again.name) == (7, "gate")
    assert again.optimizer.weight_decay == 0.03
    assert (again.skipped, again.consecutive) == (0, 0)


# What is refused.


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "3"])
def test_how_many_must_be_a_whole_number(value):
    with pytest.raises(ValueError, match="ApplyIfFinite: max_consecutive=.*: give a whole number"):
        ApplyIfFinite("sgd", max_consecutive=value)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match="ApplyIfFinite needs an optimizer of keras.optimizers"):
        ApplyIfFinite(3)


@needs_keras3("update_step with a rate")
def test_an_update_by_operations_of_ones_own_under_xla():
    """It writes past the methods of variables, and is left out all the same."""

    class Own(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            tf.raw_ops.AssignSubVariableOp(
                resource=tf_variable(variable).handle,
                value=tf.cast(learning_rate, gradient.dtype) * gradient,
            )

    mixed, good = some_bad()
    found = run(ApplyIfFinite(Own(0.1)), mixed, "xla")
    assert_same(found, run(Own(0.1), good, "xla"))


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 compiles no update by itself")
def test_an_update_that_keras_compiles_by_itself():
    """It is traced once and kept; what one step decided must not be kept with it."""
    inner = make("SGD")
    inner.jit_compile = True  # as on a GPU
    optimizer, weights = ApplyIfFinite(inner), variables("float32")
    optimizer.build(weights)
    steps = [gradients(0, "float32"), spoiled(gradients(1, "float32")), gradients(2, "float32")]
    for grads in steps:  # a function each
        stepping(optimizer, weights, "xla")(*grads)
    assert_alike(values(weights), run(make("SGD"), [steps[0], steps[2]], "xla"), "xla")
    assert optimizer.skipped == 1
