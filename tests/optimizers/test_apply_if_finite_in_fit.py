"""`ApplyIfFinite` in `fit`, on replicas and in files, and its errors."""

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
    build,
    run,
    some_bad,
    spoiled,
    state,
    stepping,
)
from optimizer_tools import (
    X,
    Y,
    assert_same,
    gradients,
    model,
    tf_variable,
    trigger,
    values,
    variables,
)
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended, needs_keras3, quick_rows
from tables_by_make_target import with_slow_rest

from tfwd.optimizers import ApplyIfFinite, DecoupledWeightDecay, NonMonotonicASGD


def data(bad):
    """Returns six batches. Two are bad if `bad`, and are left out otherwise."""
    x, y = np.concatenate([X, X]), np.concatenate([Y, Y])
    x = x.copy()
    x[5, 1] = np.nan
    x[13, 3] = np.inf
    x[13, 2] = -np.inf
    kept = np.repeat([bad or n not in (1, 3) for n in range(6)], 4)
    return x[kept], y[kept]


def assert_close(found, expected):
    """Asserts that values are equal except for rounding, which grows over a few steps."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("decay", False),
        pytest.param("averaged", False, marks=pytest.mark.slow),
        pytest.param("Adam", True, marks=pytest.mark.slow),
        pytest.param("decay", True, marks=pytest.mark.slow),
    ],
)
def test_fit(name, compiled):
    """Checks that training equals training on the good batches alone."""

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


@extended
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_finite_steps_are_as_without(compiled):
    def train(wrap):
        net = model()
        net.compile(wrap(make("Adam", global_clipnorm=0.1)), "mse", jit_compile=compiled)
        net.fit(X, Y, batch_size=5, epochs=3, shuffle=False, verbose=0)
        return [*net.get_weights(), *state(net.optimizer)]

    check = assert_close if compiled else assert_same
    check(train(ApplyIfFinite), train(lambda optimizer: optimizer))


@pytest.mark.float16
def test_fit_in_half_precision():
    """Checks half precision, where Keras adds a loss scale that skips the step."""
    keras.config.set_dtype_policy("mixed_float16")
    net = model()
    net.compile(ApplyIfFinite(make("Adam")), "mse", jit_compile=False)
    x, y = data(True)
    net.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    assert all(np.isfinite(weight).all() for weight in net.get_weights())
    assert net.optimizer.inner_optimizer.skipped == 0


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


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


@quick_rows("Adam-True", "decay inside-False")
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


@extended
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


@extended
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


@pytest.mark.parametrize("value", [-1, 1.5, True, None, "3"])
def test_how_many_must_be_a_whole_number(value):
    with pytest.raises(ValueError, match="ApplyIfFinite: max_consecutive=.*: expected an integer"):
        ApplyIfFinite("sgd", max_consecutive=value)


def test_a_wrong_optimizer_is_refused():
    with pytest.raises(TypeError, match="ApplyIfFinite needs an optimizer of keras.optimizers"):
        ApplyIfFinite(3)


@extended
@needs_keras3("update_step with a rate")
def test_an_update_by_custom_operations_under_xla():
    """Checks that an update that bypasses the methods of variables is skipped too."""

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
    """Checks an update that is traced once: one step's decision must not stay in it."""
    inner = make("SGD")
    inner.jit_compile = True  # as on a GPU
    optimizer, weights = ApplyIfFinite(inner), variables("float32")
    optimizer.build(weights)
    steps = [gradients(0, "float32"), spoiled(gradients(1, "float32")), gradients(2, "float32")]
    for grads in steps:  # a function each
        stepping(optimizer, weights, "xla")(*grads)
    assert_alike(values(weights), run(make("SGD"), [steps[0], steps[2]], "xla"), "xla")
    assert optimizer.skipped == 1
