"""Parametrizations: their results, gradients, errors and configs."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from parametrizations_table import ALL, SURROGATE, in_call

from tfwd import parametrizations as P
from tfwd._random import masks_and_normals, seeds
from tfwd.parametrizations import chain

SEED = tf.constant([1, 2])
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def weight(dtype: str = "float32", shape: tuple[int, ...] = (30, 40)) -> tf.Tensor:
    size = math.prod(shape)
    return tf.constant(1.1 + np.sin(np.arange(size)).reshape(shape), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", ALL, ids=repr)
def test_shape_type_and_purity(p: P.Parametrization, dtype: str) -> None:
    w = weight(dtype)
    p = in_call(p, w)
    found = p(w, SEED)
    assert (found.shape, found.dtype) == (w.shape, w.dtype)
    again = tf.function(lambda: p(w, SEED))()
    np.testing.assert_allclose(
        tf.cast(found, tf.float64),
        tf.cast(again, tf.float64),
        rtol=1e-6 if "16" not in dtype else 0.02,
        atol=1e-6,
    )
    changed = not np.array_equal(found, p(w, SEED + 1))
    assert changed == p.stochastic


@pytest.mark.parametrize("p", ALL, ids=repr)
def test_xla_compiles_the_formula_and_its_gradient(p: P.Parametrization) -> None:
    w = weight()

    def value_and_gradient() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(w)
            value = in_call(p, w)(w, SEED)
            total = tf.reduce_sum(value * value)
        return value, tape.gradient(total, w)

    expected = value_and_gradient()
    found = tf.function(value_and_gradient, jit_compile=True)()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", ALL, ids=repr)
def test_config_round_trip(p: P.Parametrization) -> None:
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(p))
    assert again.get_config() == p.get_config()
    w = weight()
    np.testing.assert_array_equal(in_call(again, w)(w, SEED), in_call(p, w)(w, SEED))


@pytest.mark.parametrize("p", [p for p in ALL if p.by_rows], ids=repr)
def test_rows_equal_the_whole_weights_rows(p: P.Parametrization) -> None:
    w, places = weight(), tf.constant([[3, 29], [3, 0]])
    found = in_call(p, w, places).of_rows(tf.gather(w, places), SEED, places, tuple(w.shape))
    whole = in_call(p, w)(w, SEED)
    np.testing.assert_allclose(found, tf.gather(whole, places), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("p", [p for p in ALL if p not in SURROGATE], ids=repr)
def test_the_gradient_equals_finite_differences(p: P.Parametrization) -> None:
    w = weight("float64", (4, 5))
    p = in_call(p, w)
    scale = tf.constant(np.cos(np.arange(20.0)).reshape(4, 5))

    def loss(w: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(p(w, SEED) * scale)

    theory, numeric = tf.test.compute_gradient(loss, [w], delta=1e-6)
    np.testing.assert_allclose(theory[0], numeric[0], rtol=1e-6, atol=1e-7)


def test_dropout_zeroes_and_divides() -> None:
    w = weight()
    found = P.Dropout(0.3)(w, SEED).numpy()
    keep = round(0.7 * 65536) / 65536
    kept = masks_and_normals.mask((30, 40), 0.3, SEED).numpy()
    assert (found[~kept] == 0.0).all()
    np.testing.assert_allclose(found[kept], w.numpy()[kept] / keep, rtol=2e-7)
    assert abs(np.mean(kept) - 0.7) < 5 * math.sqrt(0.21 / 1200)


def test_the_mean_over_many_draws_is_the_weight() -> None:
    w, rate, n = weight(shape=(4, 5)), 0.4, 2000

    @tf.function
    def draw() -> tf.Tensor:
        numbers = tf.range(n)
        return tf.map_fn(
            lambda i: P.Dropout(rate)(w, seeds.seed(1, 0, i)),
            numbers,
            fn_output_signature=tf.float32,
        )

    mean = tf.reduce_mean(draw(), 0)
    sigma = w.numpy() * math.sqrt(rate / (1 - rate) / n)
    assert (np.abs(mean - w) < 5 * sigma).all()


@pytest.mark.parametrize(
    ("noise_shape", "axis"), [((None, 1), 1), ((1, None), 0), ((30, 1), 1), ((1, 40), 0)]
)
def test_noise_shape_shares_the_mask_along_an_axis(noise_shape, axis: int) -> None:
    found = P.Dropout(0.5, noise_shape=noise_shape)(weight(), SEED).numpy() == 0.0
    assert (found.all(axis) | ~found.any(axis)).all()
    assert 0 < found.mean() < 1


@pytest.mark.parametrize("noise_shape", [(None,), (2, 1), (None, None, 1), ()])
def test_a_noise_shape_that_does_not_fit_is_an_error(noise_shape) -> None:
    with pytest.raises(ValueError, match="noise_shape .* does not fit a weight of shape"):
        P.Dropout(0.5, noise_shape=noise_shape)(weight(), SEED)


@pytest.mark.parametrize("rate", [1.0, -0.1, 1.5, float("nan"), float("inf"), "x", None, True])
def test_a_rate_out_of_range_is_an_error(rate) -> None:
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\).*got"):
        P.Dropout(rate)(weight(), SEED)


@pytest.mark.parametrize("stddev", [-0.1, float("nan"), float("inf"), "x", None])
def test_a_deviation_out_of_range_is_an_error(stddev) -> None:
    with pytest.raises(ValueError, match=r"stddev must be a finite number of at least 0.*got"):
        P.GaussianNoise(stddev)(weight(), SEED)


@pytest.mark.parametrize("start", [-1, 1.5, "x"])
def test_a_start_that_is_no_step_is_an_error(start) -> None:
    with pytest.raises(ValueError, match="start_call must be an integer of at least 0, got"):
        P.GaussianNoise(0.1, start_call=start)(weight(), SEED)


def test_an_element_after_a_mask_per_example_is_an_error() -> None:
    last = chain.BoundParametrization(P.Dropout(0.5, per_example=True), SEED)
    for training in (True, False):
        noise = chain.BoundParametrization(P.Chain([P.GaussianNoise(0.1)]), SEED, training)
        shared, found = chain.per_example([noise, last])
        assert shared[0] == noise and shared[1].parametrization.elements() == []
        assert found[0] is last.parametrization and not np.array_equal(found[1], SEED)
    with pytest.raises(ValueError, match="per_example=True.* must be the last .* GaussianNoise"):
        chain.per_example([last, noise._replace(training=True)])
    assert chain.per_example([last, noise])[1][0] is last.parametrization  # noise does not act


IDENTITIES = [
    P.Dropout(0.0),
    P.Dropout(0),
    P.GaussianNoise(0.0),
    P.GaussianNoise(0.0, start_call=3),
    P.Chain([]),
    P.Chain([P.Dropout(0.0), P.GaussianNoise(0.0)]),
]


@pytest.mark.parametrize("p", IDENTITIES, ids=repr)
def test_zero_is_the_identity_without_a_random_operation(p: P.Parametrization) -> None:
    assert p.is_identity
    w = tf.constant([0.0, -0.0, np.nan, 1e-45, 3.0])
    found = p.at(tf.constant(9, tf.int64))(w, SEED)
    np.testing.assert_array_equal(found.numpy().view(np.int32), w.numpy().view(np.int32))
    traced = tf.function(lambda w, seed: p(w, seed)).get_concrete_function(w, SEED)
    assert not [op.type for op in traced.graph.get_operations() if "andom" in op.type]


def test_noise_before_its_start_adds_exactly_nothing() -> None:
    p, w = P.GaussianNoise(0.1, start_call=3), tf.constant([0.0, -0.0, 1e-45, 3.0])
    for call in range(5):
        found = p.at(tf.constant(call, tf.int64))(w, SEED)
        same = np.array_equal(found.numpy().view(np.int32), w.numpy().view(np.int32))
        assert same == (call < 3)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_noise_in_multiples_of_the_weights_own_deviation(dtype: str) -> None:
    raw = (5.0 + 0.25 * np.sin(np.arange(40000.0))).reshape(200, 200)
    w, p = tf.constant(raw, dtype), P.GaussianNoise(0.1, scale="deviation")
    held = np.array(w).astype(np.float64)
    deviation = np.sqrt(np.mean((held - held.mean()) ** 2))
    with tf.GradientTape() as tape:
        tape.watch(w)
        noisy = p(w, SEED)
    # The very noise of the absolute deviation, which has the same seed; half precision is coarse.
    expected = P.GaussianNoise(0.1 * deviation)(w, SEED)
    exact = {"float16": 2e-2, "float32": 1e-6, "float64": 1e-12}[dtype]
    np.testing.assert_allclose(
        tf.cast(noisy, tf.float64), tf.cast(expected, tf.float64), rtol=0, atol=exact
    )
    found = np.std(np.array(noisy).astype(np.float64) - held)
    assert abs(found / (0.1 * deviation) - 1) < (
        5 / math.sqrt(80000) if dtype != "float16" else 0.1
    )
    # The deviation is a constant to the gradient.
    np.testing.assert_array_equal(tape.gradient(noisy, w), np.ones([200, 200], dtype))


def test_the_deviation_is_the_whole_raw_weights() -> None:
    w, seed = weight(), SEED
    deviation = float(np.std(w.numpy()))
    # In a chain the deviation of the raw weight, not of the dropped weight.
    found = P.Chain([P.Dropout(0.5), P.GaussianNoise(0.1, scale="deviation")])(w, seed)
    expected = P.Chain([P.Dropout(0.5), P.GaussianNoise(0.1 * deviation)])(w, seed)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    constant = tf.fill([30], 2.0)
    np.testing.assert_array_equal(P.GaussianNoise(0.1, scale="deviation")(constant, seed), constant)
    schedule = P.GaussianNoise(lambda call: 0.02 * tf.cast(call, tf.float32), scale="deviation")
    found = schedule.at(tf.constant(5, tf.int64))(w, seed)
    np.testing.assert_allclose(found, P.GaussianNoise(0.1 * deviation)(w, seed), rtol=1e-5)
    with pytest.raises(ValueError, match="scale='relative': expected one of absolute, deviation"):
        P.GaussianNoise(0.1, scale="relative")


def test_noise_is_normal_of_the_deviation() -> None:
    noise = (P.GaussianNoise(0.3)(tf.zeros([100, 100]), SEED) / 0.3).numpy()
    assert abs(noise.mean()) < 5 / 100
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / 10000)


def test_a_chain_applies_in_the_order_given() -> None:
    noise_first = P.Chain([P.GaussianNoise(0.3), P.Dropout(0.5)])(weight(), SEED).numpy()
    dropout_first = P.Chain([P.Dropout(0.5), P.GaussianNoise(0.3)])(weight(), SEED).numpy()
    assert abs((noise_first == 0.0).mean() - 0.5) < 5 * 0.5 / math.sqrt(1200)
    assert (dropout_first == 0.0).sum() == 0


def test_alike_elements_of_a_chain_are_independent() -> None:
    found = P.Chain([P.Dropout(0.5), P.Dropout(0.5)])(weight(), SEED).numpy()
    assert abs((found == 0.0).mean() - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 1200)
    np.testing.assert_allclose(found[found != 0], 4 * weight().numpy()[found != 0], rtol=1e-6)


def test_a_chain_of_one_draws_as_its_element() -> None:
    p = P.Dropout(0.5)
    np.testing.assert_array_equal(P.Chain([p])(weight(), SEED), p(weight(), SEED))


def test_chain_takes_parametrizations_only() -> None:
    with pytest.raises(TypeError, match=r"expects .* such as Dropout\(0.5\), got 0.5"):
        P.Chain([0.5])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_weight_norm_makes_unit_lengths(axis: int) -> None:
    found = P.WeightNorm(axis)(weight()).numpy()
    np.testing.assert_allclose((found**2).sum(axis=1 - axis % 2), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(P.WeightNorm(axis)(tf.zeros([3, 4])), np.zeros([3, 4]))


def test_weight_norm_of_a_missing_axis_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"axis 2 does not exist in a weight of shape \(30, 40\)"):
        P.WeightNorm(2)(weight())


def test_a_schedule_is_read_at_every_call() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.0, 0.5, 0.75])
    p = P.Dropout(schedule)
    zeros = [np.mean(p.at(tf.constant(c, tf.int64))(weight(), SEED) == 0.0) for c in range(6)]
    expected = [0.0, 0.0, 0.5, 0.5, 0.75, 0.75]
    np.testing.assert_allclose(zeros, expected, atol=5 * 0.5 / math.sqrt(1200))
    assert zeros[:2] == [0.0, 0.0]


@pytest.mark.parametrize("kind", [tf.Variable, keras.Variable])
def test_a_variable_is_read_at_every_call_of_one_traced_function(kind) -> None:
    rate = kind(0.5)
    p = P.Dropout(rate)
    draw = tf.function(lambda call: p.at(call)(weight(), SEED))
    half = draw(tf.constant(0, tf.int64)).numpy()
    rate.assign(0.0)
    none = draw(tf.constant(0, tf.int64)).numpy()
    assert draw.experimental_get_tracing_count() == 1
    assert abs((half == 0).mean() - 0.5) < 0.1
    np.testing.assert_array_equal(none, weight())


def test_a_schedule_gets_no_gradient() -> None:
    rate = tf.Variable(0.5)
    with tf.GradientTape() as tape:
        y = P.Dropout(rate).at(tf.constant(0, tf.int64))(weight(), SEED)
    assert tape.gradient(y, rate) is None


@pytest.mark.parametrize("value", [1.0, -0.5, float("nan")])
def test_a_schedule_that_leaves_the_range_is_an_error(value: float) -> None:
    call = tf.constant(0, tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least 0 and below 1"):
        P.Dropout(lambda _: value).at(call)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least 0 and below"):
        P.GaussianNoise(tf.Variable(-1.0)).at(call)


def test_a_parametrization_written_by_a_user() -> None:
    class Sign(P.Parametrization):
        stochastic = False

        def __call__(self, weight, seed):
            return tf.sign(weight)

    found = P.Chain([Sign(), P.Dropout(0.5)])(-weight(), SEED).numpy()
    assert set(np.unique(found)) == {-2.0, 0.0} or set(np.unique(found)) <= {-2.0, 0.0, 2.0}
    with pytest.raises(NotImplementedError, match="Parametrization does not define __call__"):
        P.Parametrization()(weight(), SEED)


def test_apply_skips_parametrizations_that_are_off_in_training() -> None:
    links = [
        chain.BoundParametrization(P.WeightNorm(), None, False),
        chain.BoundParametrization(P.Dropout(0.5), SEED, False),
    ]
    np.testing.assert_array_equal(chain.apply(weight(), links), P.WeightNorm()(weight()))
    links[1] = chain.BoundParametrization(P.Dropout(0.5), SEED, True)
    assert np.mean(chain.apply(weight(), links) == 0.0) > 0.4


def test_a_constructor_with_arguments_needs_a_config() -> None:
    class Shift(P.Parametrization):
        def __init__(self, by):
            self.by = by

        def __call__(self, weight, seed):
            return weight + self.by

    with pytest.raises(NotImplementedError, match="Shift has the arguments by: define get_config"):
        Shift(1.0).get_config()


def test_what_a_parametrization_returns_is_checked() -> None:
    class Wrong(P.Parametrization):
        def __call__(self, weight, seed):
            return weight[:1]

    class NoTensor(P.Parametrization):
        def __call__(self, weight, seed):
            return None

    with pytest.raises(ValueError, match="must keep shape and dtype"):
        chain.apply(weight(), [chain.BoundParametrization(Wrong(), SEED)])
    with pytest.raises(ValueError, match="returned a NoneType"):
        chain.apply(weight(), [chain.BoundParametrization(NoTensor(), SEED)])
