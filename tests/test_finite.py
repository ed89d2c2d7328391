"""Finite values in a tensor, against NumPy in float64."""

import math

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import SLOW_ON_KERAS_2, quick_rows
from tables_by_make_target import with_slow_rest

from tfwd import current_watch
from tfwd.finite import (
    Summary,
    all_finite,
    can_be_non_finite,
    exact_extent,
    extent,
    summarize,
)

pytestmark = SLOW_ON_KERAS_2

MODES = ("eager", "graph", "xla")
DTYPES = ("float16", "bfloat16", "float32", "float64")
BAD = (math.nan, math.inf, -math.inf)
SHAPES = ((1,), (2,), (7,), (8,), (3, 5), (64, 16), (9, 7, 8), (70_001,), (1, 1))


def functions(mode):
    """Returns the tested functions in one function, so that each shape is compiled once."""

    def found(x):
        return summarize(x), extent(x), all_finite([x])

    return found if mode == "eager" else tf.function(found, jit_compile=mode == "xla")


def numbers(dtype, shape):
    """Returns numbers of either sign, with zeros."""
    x = np.random.default_rng(len(shape)).normal(size=shape)
    x.ravel()[::5] = 0.0
    return tf.cast(tf.constant(x), dtype)


def expected(x):
    """Returns NumPy's counts, and the smallest and largest absolute values."""
    wide = tf.cast(x, tf.float64).numpy().ravel()
    finite_ones = np.abs(wide[np.isfinite(wide)])
    others = finite_ones[finite_ones > 0]
    return (
        wide.size,
        int(np.isnan(wide).sum()),
        int(np.isposinf(wide).sum()),
        int(np.isneginf(wide).sum()),
        int((wide == 0).sum()),
        float(others.min()) if others.size else 0.0,
        float(finite_ones.max()) if finite_ones.size else 0.0,
    )


@quick_rows("*-eager", "*-graph")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", with_slow_rest(DTYPES, {"float32"}))
def test_single_elements_in_every_place(dtype, mode):
    look = functions(mode)
    for shape in SHAPES:
        clean = numbers(dtype, shape)
        size = int(tf.size(clean))
        summary, large, good = look(clean)
        assert tuple(summary.numbers()) == expected(clean)
        assert bool(good) and math.isfinite(float(large))
        for value in BAD:
            for place in sorted({0, size // 2, size - 1}):
                flat = tf.cast(clean, tf.float64).numpy().ravel()
                flat[place] = value
                x = tf.cast(tf.constant(flat.reshape(shape)), dtype)
                summary, large, good = look(x)
                assert tuple(summary.numbers()) == expected(x)
                assert not bool(good), (shape, value, place)
                assert not math.isfinite(float(large)), (shape, value, place)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_several_at_once(mode):
    look = functions(mode)
    rows = [
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0, -5.0, 1e-3],
        [math.nan] * 8,
        [math.inf, -math.inf] * 4,
        [0.0] * 8,
        [-1.0] * 8,
    ]
    for row in rows:
        x = tf.constant(row)
        summary, large, good = look(x)
        assert tuple(summary.numbers()) == expected(x)
        assert bool(good) == math.isfinite(float(large)) == bool(np.isfinite(row).all())


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (3, 0, 9)])
def test_nothing(shape, mode):
    summary, large, good = functions(mode)(tf.zeros(shape))
    assert tuple(summary.numbers()) == (0, 0, 0, 0, 0, 0.0, 0.0)
    assert float(large) == 0.0 and bool(good)
    assert summary.numbers().percent == 0.0


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars(dtype, mode):
    look = functions(mode)
    for value in (*BAD, 0.0, -2.5):
        x = tf.constant(value, dtype)
        summary, large, good = look(x)
        assert tuple(summary.numbers()) == expected(x)
        assert bool(good) == math.isfinite(value)
        assert math.isfinite(float(large)) == math.isfinite(value)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_that_overflow(dtype, mode):
    """Checks finite elements whose sum overflows."""
    look = functions(mode)
    largest = float(tf.as_dtype(dtype).max)
    for row in (
        [largest] * 9,
        [-largest] * 9,
        [largest, -largest] * 5,
        [largest, largest, -largest],
    ):
        x = tf.constant(row, dtype)
        summary, _, good = look(x)
        assert bool(good)
        assert summary.numbers().non_finite == 0
        assert float(summary.abs_max) == largest
    assert not bool(look(tf.constant([largest, largest, math.inf], dtype))[2])


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_an_extent_is_as_large_as_it_is_said(mode):
    x = np.random.default_rng(1).normal(size=(6, 9))
    found = float(functions(mode)(tf.constant(x))[1])
    right = np.abs(x.sum(-1)).max() if mode == "xla" else np.sqrt((x * x).sum())
    np.testing.assert_allclose(found, right, rtol=1e-12)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e25, 1e37])
def test_an_exact_extent_does_not_overflow(mode, scale):
    x = (scale * np.random.default_rng(1).normal(size=(6, 9))).astype("float32")
    look = exact_extent if mode == "eager" else tf.function(exact_extent, jit_compile=mode == "xla")
    exact = x.astype("float64")
    right = np.abs(exact.sum(-1)).max() if mode == "xla" else np.sqrt((exact**2).sum())
    largest = np.finfo("float32").max
    np.testing.assert_allclose(look(tf.constant(x)).numpy(), min(right, largest), rtol=1e-5)
    for bad in BAD:
        x[3, 4] = bad
        assert math.isnan(look(tf.constant(x)))
    assert math.isfinite(look(tf.fill([40, 40], float(largest)))) and look(tf.zeros([0, 3])) == 0


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_rows(mode):
    """Checks that only the existing rows of slices count."""

    def found(values):
        slices = tf.IndexedSlices(values, tf.constant([4, 1]), tf.constant([9, 3]))
        return summarize(slices), extent(slices), all_finite([slices])

    look = found if mode == "eager" else tf.function(found, jit_compile=mode == "xla")
    summary, large, good = look(tf.constant([[1.0, 2, 3], [4, 5, 6]]))
    assert summary.numbers()[:2] == (6, 0) and bool(good) and math.isfinite(float(large))
    summary, large, good = look(tf.constant([[1.0, 2, 3], [4, 5, -math.inf]]))
    assert summary.numbers()[:4] == (6, 0, 0, 1)
    assert not bool(good) and not math.isfinite(float(large))


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "bool"])
def test_whole_numbers_and_flags(dtype, mode):
    def look(x):
        return summarize(x), all_finite([x])

    look = look if mode == "eager" else tf.function(look, jit_compile=mode == "xla")
    x = tf.cast(tf.constant([0, 1, 5, 0, 100]), dtype)
    summary, good = look(x)
    assert tuple(summary.numbers()) == expected(x)
    assert bool(good)


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_eight_bits(dtype, mode):
    look = summarize if mode == "eager" else tf.function(summarize)
    values = [0.0, math.nan, 0.5, -3.0, *([math.inf, -math.inf] * (dtype == "float8_e5m2"))]
    assert tuple(look(tf.cast(tf.constant(values), dtype)).numbers()) == expected(values)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers(dtype, mode):
    look = functions(mode)
    x = tf.constant(
        [
            *(complex(math.nan, 0), complex(0, math.nan), complex(math.inf, math.nan)),
            *(complex(math.inf, 1), complex(1, -math.inf), 0j, 3 + 4j, -1j),
        ],
        dtype,
    )
    summary, large, good = look(x)
    assert tuple(summary.numbers()) == (8, 3, 2, 0, 1, 1.0, 5.0)
    assert not bool(good) and not math.isfinite(float(large))
    largest = x.dtype.real_dtype.max
    summary, _, good = look(tf.constant([complex(largest, largest)], dtype))
    assert bool(good) and summary.numbers().non_finite == 0
    for value in (complex(math.nan, 0), complex(0, math.inf), complex(-math.inf, 0)):
        _, large, good = look(tf.constant([1 + 1j] * 8 + [value], dtype))
        assert not bool(good) and not math.isfinite(float(large))


def test_what_has_no_numbers():
    with pytest.raises(TypeError, match="expects a numeric tensor, got dtype string"):
        summarize(tf.constant(["a"]))


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_several_tensors_of_several_dtypes(mode):
    """Checks a non-finite tensor at any position among the others."""

    def look(*tensors):
        return all_finite([*tensors, tf.constant(3), tf.constant(["a"]), None])

    look = look if mode == "eager" else tf.function(look, jit_compile=mode == "xla")
    clean = [numbers(dtype, (3, 5)) for dtype in (*DTYPES, "float16")]
    assert bool(look(*clean))
    for place in range(len(clean)):
        given = list(clean)
        given[place] = tf.concat(
            [given[place][:2], tf.cast([[1, 2, 3, 4, math.nan]], given[place].dtype)], 0
        )
        assert not bool(look(*given))
    assert bool(all_finite([])) and bool(all_finite([None, tf.constant(1)]))


@pytest.mark.parametrize(
    ("value", "watched"),
    [
        (tf.constant(1.0), True),
        (tf.constant(1.0, tf.bfloat16), True),
        (tf.constant(1j), True),
        (tf.IndexedSlices(tf.constant([1.0]), tf.constant([0])), True),
        (tf.constant(1), False),
        (tf.constant(True), False),
        (tf.constant("a"), False),
        (1.0, False),
        (None, False),
    ],
)
def test_what_can_be_other_than_finite(value, watched):
    assert can_be_non_finite(value) is watched


def test_words():
    x = np.ones(70_001, "float32")
    x[3] = np.nan
    assert str(summarize(x)) == "0.0014 % non-finite elements (1 NaN, 0 +Inf, 0 -Inf of 70001)"
    assert str(summarize(np.zeros(3))) == "0.00 % non-finite elements (0 NaN, 0 +Inf, 0 -Inf of 3)"
    x = np.zeros(128, "float32")
    x[:16] = np.nan
    assert str(summarize(x)) == "12.50 % non-finite elements (16 NaN, 0 +Inf, 0 -Inf of 128)"


def test_whether_something_is_watching():
    assert not current_watch.is_watching()
    current_watch.here.watch = object()
    try:
        assert current_watch.is_watching()
    finally:
        del current_watch.here.watch
    assert not current_watch.is_watching()


@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_subnormal_numbers(dtype, mode):
    """Counts and range agree in all modes. The subnormal numbers of float16 are not 0."""
    values = np.array([np.finfo(dtype).smallest_subnormal, 0.0, 1.0], dtype)

    def numbers(tensor):
        return tuple(summarize(tensor))

    function = numbers if mode == "eager" else tf.function(numbers, jit_compile=mode == "xla")
    found = Summary(*function(tf.constant(values))).numbers()
    expected = (1, float(values[0])) if dtype == "float16" else (2, 1.0)
    assert (found.zeros, found.abs_min) == expected
