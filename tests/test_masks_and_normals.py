"""Masks and noise: the rate, the exact expectation, independence, and purity."""

import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from stack_marks import quick_rows

from tfwd._random import dropout_and_noise, masks_and_normals, normals, philox_op, seeds, xxh32

SHAPE = (200, 500)


@pytest.fixture(params=["XXH32", "Philox"], autouse=True)
def generator(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes draws of every size in one way and then in the other."""
    monkeypatch.setattr(masks_and_normals, "SMALL", {"XXH32": 0, "Philox": 1 << 40}[request.param])
    return request.param


DTYPES = ["float16", "bfloat16", "float32", "float64"]


def drawn(rate: float, call: int = 0, position: int = 0, root: int = 3, replica: int = 0):
    seed = seeds.seed(root, position, call, replica)
    return masks_and_normals.mask(SHAPE, rate, seed).numpy().astype(np.float64)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
def test_the_mask_rate_is_right(rate: float) -> None:
    dropped = np.mean([1 - drawn(rate, call).mean() for call in range(5)])
    assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / (5 * 200 * 500))


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_drop_rate_is_right_in_every_type(dtype: str, rate: float) -> None:
    """Checks small rates: 0.001 is not 0 in bfloat16, which has three digits."""
    kept = masks_and_normals.mask(SHAPE, rate, seeds.seed(1, 0, 0))
    dropped = dropout_and_noise.drop(tf.ones(SHAPE, dtype), kept, rate)
    assert dropped.dtype == dtype
    zeros = np.mean(tf.cast(dropped, tf.float64) == 0.0)
    assert abs(zeros - rate) < 5 * math.sqrt(rate * (1 - rate) / (200 * 500))
    keep = round((1 - rate) * 65536) / 65536
    expected = tf.cast(tf.constant(1 / keep, tf.float64), dtype)
    np.testing.assert_array_equal(
        np.unique(tf.cast(dropped, tf.float64)), [0.0, float(tf.cast(expected, tf.float64))]
    )


@given(st.floats(0.0, 1.0, exclude_max=True))
@settings(max_examples=100, deadline=None)
def test_keep_is_the_nearest_multiple_of_two_to_the_minus_16(rate: float) -> None:
    keep = masks_and_normals.keep_probability(rate)
    assert keep * 65536 == int(keep * 65536)
    assert 1 / 65536 <= keep <= 1.0
    assert abs(keep - (1 - rate)) <= (0.5 if rate < 1 - 0.5 / 65536 else 1) / 65536


@pytest.mark.parametrize("rate", [0.0, 1e-6, 0.001, 0.25, 0.3, 0.999, 1 - 1e-9])
def test_keep_of_a_tensor_is_keep_of_the_float(rate: float) -> None:
    rate = float(np.float32(rate)) if rate < 1 - 1e-8 else rate
    found = float(masks_and_normals.keep_probability(tf.constant(rate, tf.float32)))
    assert abs(found - masks_and_normals.keep_probability(rate)) <= 2**-16 * (
        rate not in (0.0, 0.25)
    )


def test_the_expectation_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that exactly `keep * 2^16` of the 2^16 words of 16 bits are kept."""
    words = tf.constant(np.arange(65536, dtype=np.uint32) << 16)
    monkeypatch.setattr(xxh32, "words", lambda *_: words)
    signed = tf.bitcast(words, tf.int32) - (1 << 31)
    monkeypatch.setattr(philox_op, "random_words", lambda *_: signed)
    for rate in (0.001, 0.3, 0.5, 0.999):
        kept = masks_and_normals.mask((65536,), rate, tf.constant([0, 0]))
        as_tensor = masks_and_normals.mask((65536,), tf.constant(rate), tf.constant([0, 0]))
        keep = masks_and_normals.keep_probability(rate)
        assert np.sum(kept) == keep * 65536
        assert np.sum(as_tensor) == keep * 65536
        mean = np.mean(dropout_and_noise.drop(tf.ones([65536], tf.float64), kept, rate))
        assert abs(mean - 1.0) < 1e-12


def test_a_tensor_rate_draws_as_the_float() -> None:
    seed = seeds.seed(1, 0, 0)
    kept = masks_and_normals.mask(SHAPE, tf.constant(0.25), seed)
    np.testing.assert_array_equal(kept, masks_and_normals.mask(SHAPE, 0.25, seed))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 3), (2, 3, 5), (0, 4)])
def test_masks_of_every_shape(shape: tuple[int, ...], generator: str) -> None:
    kept = masks_and_normals.mask(shape, 0.5, seeds.seed(1, 0, 0))
    assert kept.dtype == tf.bool
    assert kept.shape == shape
    if generator == "Philox":  # which is for static shapes
        return
    dynamic = tf.function(lambda s: masks_and_normals.mask(s, 0.5, seeds.seed(1, 0, 0)))
    np.testing.assert_array_equal(dynamic(tf.constant(shape, tf.int32)), kept)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the correlation in standard errors."""
    a, b = a.ravel() - a.mean(), b.ravel() - b.mean()
    return abs((a * b).mean() / (a.std() * b.std())) * math.sqrt(a.size)


MASK_PAIRS = {
    "neighbouring entries": lambda m: (m()[:, :-1], m()[:, 1:]),
    "even and odd entries": lambda m: (m()[:, 0::2], m()[:, 1::2]),
    "entries two apart": lambda m: (m()[:, :-2], m()[:, 2:]),
    "rows": lambda m: (m()[:-1], m()[1:]),
    "calls": lambda m: (m(call=0), m(call=1)),
    "weights of a layer": lambda m: (m(position=0), m(position=1)),
    "layers": lambda m: (m(root=3), m(root=4)),
    "replicas": lambda m: (m(replica=0), m(replica=1)),
    "a call and the next weight": lambda m: (m(call=1), m(position=1)),
    "halves of the period": lambda m: (m()[:100], m()[100:]),
}


@pytest.mark.parametrize("rate", [0.1, 0.5])
@pytest.mark.parametrize("pair", MASK_PAIRS)
def test_masks_are_independent(pair: str, rate: float) -> None:
    assert _correlation(*MASK_PAIRS[pair](lambda **which: drawn(rate, **which))) < 5


@pytest.mark.parametrize("pair", MASK_PAIRS)
def test_noise_is_independent(pair: str) -> None:
    def noise(root: int = 3, position: int = 0, call: int = 0, replica: int = 0) -> np.ndarray:
        return masks_and_normals.normal(
            SHAPE, tf.float32, seeds.seed(root, position, call, replica)
        ).numpy()

    one, other = MASK_PAIRS[pair](noise)
    assert _correlation(one, other) < 5
    assert _correlation(one**2, other**2) < 5


def test_patterns_of_eight_entries_are_equally_frequent() -> None:
    patterns = drawn(0.5).reshape(-1, 8) @ (2 ** np.arange(8))
    counts = np.bincount(patterns.astype(int), minlength=256)
    expected = counts.sum() / 256
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def test_columns_are_equally_often_dropped() -> None:
    rates = drawn(0.3).mean(axis=0)
    chi_square = np.sum((rates - 0.7) ** 2 / (0.21 / SHAPE[0]))
    assert abs(chi_square - SHAPE[1]) < 5 * math.sqrt(2 * SHAPE[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_normal_moments(dtype: str) -> None:
    noise = masks_and_normals.normal(SHAPE, tf.as_dtype(dtype), seeds.seed(1, 0, 0))
    assert noise.dtype == dtype
    x = tf.cast(noise, tf.float64).numpy()
    n = x.size
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs((x**2).mean() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    for quantile, expected in ((-1.0, 0.158655), (0.0, 0.5), (2.0, 0.977250)):
        # Half of a tie belongs to either side: the narrow types have many.
        below = np.mean(x < quantile) + 0.5 * np.mean(x == quantile)
        assert abs(below - expected) < 5 * 0.5 / math.sqrt(n) + (2e-3 if "64" not in dtype else 0)


def test_a_draw_does_not_depend_on_the_program_around_it() -> None:
    seed = seeds.seed(1, 0, 0)
    expected = masks_and_normals.mask((6, 7), 0.5, seed)
    outputs = []

    @tf.function
    def draw(x: tf.Tensor) -> tf.Tensor:
        tf.random.uniform([3])
        loop = tf.while_loop(lambda i, _: i < 2, lambda i, _: (i + 1, again()), (0, again()))
        return loop[1]

    def again() -> tf.Tensor:
        return masks_and_normals.mask((6, 7), 0.5, seed)

    for n in (1, 2):  # traced twice
        outputs.append(draw(tf.ones([n])))
    for output in outputs:
        np.testing.assert_array_equal(output, expected)


def test_a_dropped_entry_is_exactly_zero_whatever_it_was() -> None:
    weight = tf.constant([np.inf, np.nan, -np.inf, 1e38])
    dropped = dropout_and_noise.drop(weight, tf.zeros([4], tf.bool), 0.5)
    np.testing.assert_array_equal(dropped, np.zeros(4))
    assert not np.signbit(dropped).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_division_is_made_in_float32_at_least(dtype: str) -> None:
    """Checks a rate that bfloat16 rounds: keep = 0.7 is 0.69921875 there."""
    weight = tf.cast(tf.linspace(1.0, 2.0, 128), dtype)
    found = dropout_and_noise.drop(weight, tf.ones([128], tf.bool), 0.3)
    keep = masks_and_normals.keep_probability(0.3)
    exact = tf.cast(tf.cast(weight, tf.float64) / keep, dtype)
    np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(exact, tf.float64))


SEED = seeds.seed(1, 0, 0)


LARGE = (300, 230)  # more entries than a small draw has


@pytest.mark.parametrize("noise_shape", [None, (300, 1), (1, 230)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_is_a_mask_and_its_application(dtype: str, noise_shape: tuple | None) -> None:
    tensor = tf.cast(tf.random.stateless_normal(LARGE, [1, 2]), dtype)
    found = dropout_and_noise.dropout(tensor, 0.3, SEED, noise_shape)
    kept = tf.broadcast_to(masks_and_normals.mask(noise_shape or LARGE, 0.3, SEED), LARGE)
    expected = dropout_and_noise.drop(tensor, kept, 0.3)
    np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(expected, tf.float64))


@quick_rows("*-float32-*", "XXH32-bfloat16-*", "Philox-float64-*")
@pytest.mark.parametrize("draw", [dropout_and_noise.dropout, dropout_and_noise.noise])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_draws_are_the_same(draw, dtype: str, generator: str) -> None:
    """Checks compiled loops: XXH32's against single operations, Philox's against XLA."""
    tensor = tf.cast(tf.random.stateless_normal(LARGE, [1, 2]), dtype)
    one, other = draw(tensor, 0.3, SEED), draw
    if generator == "XXH32":  # of which only tensors of static shape are compiled
        signature = [tf.TensorSpec(None, dtype), tf.TensorSpec([2], tf.int32)]
        other = tf.function(lambda t, seed: draw(t, 0.3, seed), input_signature=signature)
        other = other(tensor, SEED)
    else:
        other = tf.function(lambda t: draw(t, 0.3, SEED), jit_compile=True)(tensor)
    # The logarithm in noise may differ in its last bit; masks never do.
    tolerance = (
        0.0
        if draw is dropout_and_noise.dropout
        else {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
    )
    np.testing.assert_allclose(
        tf.cast(one, tf.float64), tf.cast(other, tf.float64), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("rate", [2**-16, 0.3, 0.5, 1 - 2**-16])
def test_small_masks_are_words_below_the_keep_probability(rate: float, generator: str) -> None:
    if generator != "Philox":
        pytest.skip("of Philox")
    words = (
        philox_op.random_words([64, 64], philox_op.key_of(SEED), tf.zeros([2], tf.uint64))
        .numpy()
        .astype(np.int64)
    )
    kept = words + 2**31 < round((1 - rate) * 2**16) * 2**16
    for form in (rate, tf.constant(rate)):
        np.testing.assert_array_equal(masks_and_normals.mask((64, 64), form, SEED), kept)
    assert masks_and_normals.mask((64, 64), tf.constant(0.0), SEED).numpy().all()


def test_small_is_decided_by_the_static_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks_and_normals, "SMALL", 12)
    assert masks_and_normals.is_small((11,)) and masks_and_normals.is_small(tf.TensorShape([]))
    assert masks_and_normals.is_small([3, 1]) and not masks_and_normals.is_small((3, 4))
    assert not masks_and_normals.is_small(tf.constant([2])) and not masks_and_normals.is_small(
        (None, 1)
    )


@pytest.mark.parametrize("noise_shape", [(11, 4), (11, 1), (1, 4)])
@pytest.mark.parametrize("ids", [[3, 3, 10], [[0, 5], [7, 2]], 4])
def test_rows_get_the_draws_of_the_table(ids: object, noise_shape: tuple[int, int]) -> None:
    table, ids = tf.random.stateless_normal((11, 4), [1, 2]), tf.constant(ids)
    taken = tf.gather(table, ids)
    found = dropout_and_noise.dropout(taken, 0.5, SEED, noise_shape, ids)
    whole = dropout_and_noise.dropout(table, 0.5, SEED, noise_shape)
    np.testing.assert_array_equal(found, tf.gather(whole, ids))
    found = dropout_and_noise.noise(taken, 0.5, SEED, ids, table.shape)
    expected = tf.gather(dropout_and_noise.noise(table, 0.5, SEED), ids)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_noise_of_deviation_zero_is_the_tensor_bit_for_bit(generator: str) -> None:
    least = 1e-45 if generator == "Philox" else 2e-38  # XLA may take 1e-45 for 0
    tensor = tf.constant([0.0, -0.0, np.inf, np.nan, least])
    for stddev in (0.0, tf.constant(0.0)):
        found = dropout_and_noise.noise(tensor, stddev, SEED)
        np.testing.assert_array_equal(tf.bitcast(found, tf.int32), tf.bitcast(tensor, tf.int32))


def test_normal_follows_its_distribution_into_the_tails() -> None:
    """Checks the distribution function of the draws against the exact one, wherever it can."""
    n = 2_000_000
    x = np.sort(masks_and_normals.normal((n,), tf.float32, SEED).numpy().astype(np.float64))
    for bound in (-4.5, -4.0, -3.0, -1.0, -0.1, 0.0, 0.5, 2.0, 3.5, 4.2):
        p = 0.5 * math.erfc(-bound / math.sqrt(2))
        found = np.searchsorted(x, bound) / n
        assert abs(found - p) < 5 * math.sqrt(p * (1 - p) / n)


def test_the_half_normal_is_the_inverse_of_the_tail() -> None:
    sizes = np.linspace(0.0, 6.2, 200)
    tails = np.array([math.erfc(size / math.sqrt(2)) for size in sizes])
    found = normals.half_normal(tf.constant(tails, tf.float32))
    # The polynomials were made for single precision, which ends near 5.4.
    np.testing.assert_allclose(found[sizes < 5.4], sizes[sizes < 5.4], rtol=2e-6, atol=2e-7)
    np.testing.assert_allclose(found, sizes, rtol=3e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rate_that_is_nan_gives_nan(compiled: bool) -> None:
    """Everywhere; zeros or the tensor itself would hide it."""
    shape, seed = (7, 9), tf.constant([1, 2])

    def draw(rate: tf.Tensor) -> list[tf.Tensor]:
        x = tf.ones(shape)
        with tf.GradientTape() as tape:
            tape.watch(x)
            dropped = dropout_and_noise.dropout(x, rate, seed)
            total = tf.reduce_sum(tf.ones(shape) * dropped)
        mixed = dropout_and_noise.mix(x, 2 * x, rate, seed)
        return [dropped, tape.gradient(total, x), mixed, dropout_and_noise.noise(x, rate, seed)]

    run = tf.function(draw, jit_compile=True) if compiled else draw
    for found in run(tf.constant(np.nan)):
        assert np.isnan(found.numpy()).all()
    for found in run(tf.constant(0.25)):
        assert np.isfinite(found.numpy()).all()
