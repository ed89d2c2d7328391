"""`CheckFinite` changes nothing, and finds each single element, forward and backward."""

import math

import numpy as np
import pytest
import tensorflow as tf
from check_finite_passes import COLUMNS, ROWS, SIZE, both_ways, function, line, planted, said
from tables_by_make_target import with_slow_rest

from tfwd import current_watch
from tfwd.layers import CheckFinite

BAD = {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}


MODES = ("eager", "graph", "xla")


DTYPES = ("float16", "bfloat16", "float32", "float64")


def bits(tensor):
    return np.asarray(tensor).tobytes()


KEYS = {"NaN": "nan", "+Inf": "positive", "-Inf": "negative"}


@pytest.mark.parametrize("action", ["raise", "count"])
@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_identity_bit_for_bit(dtype, mode, action):
    if mode == "xla" and action == "raise":
        pytest.skip("refused: see below")
    layer = CheckFinite(action)
    x, upstream = planted(-0.0, (3, 50), dtype), planted(-0.0, (7,), dtype)
    y, gradient = function(both_ways(layer), mode)(x, upstream)
    assert y.dtype == gradient.dtype == x.dtype
    assert bits(y) == bits(x) and bits(gradient) == bits(upstream)
    assert layer.report() == ""


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("place", [0, 63, -1])
@pytest.mark.parametrize("kind", BAD)
def test_single_elements_are_counted(kind, place, mode):
    layer = CheckFinite("count", name="scores")
    call = function(both_ways(layer), mode)
    good, bad = planted(1.0), planted(BAD[kind], (place,))
    y, _ = call(bad, good)
    assert bits(y) == bits(bad)
    one = {KEYS[kind]: 1}
    assert layer.report() == line("forward", **one)
    _, gradient = call(good, bad)
    assert bits(gradient) == bits(bad)
    lines = [line(way, **one, size=2 * SIZE) for way in ("forward", "backward")]
    assert layer.report() == "\n".join(lines)
    layer.reset()
    assert layer.report() == ""
    call(good, bad)
    assert layer.report() == line("backward", **one)
    expected = [int(kind == other) for other in BAD]
    np.testing.assert_array_equal(layer.backward_counts, [*expected, SIZE])
    np.testing.assert_array_equal(layer.forward_counts, [0, 0, 0, SIZE])


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_kinds_in_every_dtype(dtype, mode):
    layer = CheckFinite("count", name="scores")
    x = planted(math.nan, range(16), "float32").numpy().ravel()
    x[16:18], x[18] = math.inf, -math.inf
    x = tf.cast(x, dtype)
    function(both_ways(layer), mode)(x, x)
    expected = {"nan": 16, "positive": 2, "negative": 1}
    lines = [line(way, **expected) for way in ("forward", "backward")]
    assert layer.report() == "\n".join(lines)


@pytest.mark.parametrize("mode", with_slow_rest(["eager", "graph"], {"graph"}))
@pytest.mark.parametrize("place", [0, 63, -1])
@pytest.mark.parametrize("kind", BAD)
def test_single_elements_stop_the_program(kind, place, mode):
    layer = CheckFinite(name="scores")
    call = function(both_ways(layer), mode)
    good, bad = planted(1.0), planted(BAD[kind], (place,))
    call(good, good)
    for way, given in (("forward", (bad, good)), ("backward", (good, bad))):
        with pytest.raises(tf.errors.InvalidArgumentError) as caught:
            call(*given)
        assert line(way, **{KEYS[kind]: 1}) in said(caught)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_small_share_is_not_shown_as_zero(mode):
    x = np.ones(70_001, "float32")
    x[-1] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"has 0.0014 % non-finite elements"):
        function(CheckFinite(name="scores"), mode)(tf.constant(x))


@pytest.mark.parametrize("action", ["raise", "count"])
def test_large_numbers_are_finite(action):
    layer = CheckFinite(action)
    huge = tf.fill([3, 4], tf.float32.max)
    layer(huge)
    layer(-huge)
    layer(tf.zeros([0, 4]))
    assert layer.report() == ""


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_nothing_behind_it_happens_before_the_error(mode):
    """Checks that a weight assigned behind the layer does not change before the error."""
    layer, weight = CheckFinite(), tf.Variable(tf.zeros([ROWS, COLUMNS]))

    def step(x, upstream):
        y, gradient = both_ways(layer)(x, upstream)
        weight.assign_add(y)
        weight.assign_add(gradient)

    step = function(step, mode)
    with pytest.raises(tf.errors.InvalidArgumentError, match="forward pass"):
        step(planted(math.nan), planted(1.0))
    np.testing.assert_array_equal(weight, 0)


def test_xla_is_refused_where_it_would_drop_the_error():
    with pytest.raises(ValueError) as caught:
        tf.function(CheckFinite(name="scores"), jit_compile=True)(planted(1.0))
    words = "CheckFinite 'scores' cannot stop a program that XLA compiles"
    assert words in str(caught.value)
    assert "action='count'" in str(caught.value)
    assert "tfwd.callbacks.FiniteCheck" in str(caught.value)


def test_it_does_nothing_where_every_layer_is_looked_at():
    current_watch.here.watch = object()
    try:
        for mode in MODES:
            bad = planted(math.nan)
            assert bits(function(CheckFinite(), mode)(bad)) == bits(bad)
    finally:
        del current_watch.here.watch
    with pytest.raises(tf.errors.InvalidArgumentError):
        CheckFinite()(bad)


def test_other_dtypes_pass():
    layer = CheckFinite("count", name="scores")
    given = {
        "ids": tf.constant([1, 2]),
        "text": tf.constant(["a"]),
        "flag": tf.constant(True),
        "pair": (tf.constant([1.0, math.nan], tf.float64), tf.constant([1.0], tf.float16)),
    }
    found = layer(given)
    tf.nest.assert_same_structure(found, given)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(given), strict=True):
        assert one.dtype == other.dtype and bits(one) == bits(other)
    assert layer.report() == line("forward", nan=1, size=3)


def test_a_nest_says_which():
    layer = CheckFinite(name="scores")
    with pytest.raises(tf.errors.InvalidArgumentError, match="layer 'scores', input 1: forward"):
        layer([tf.ones([2]), tf.constant([1.0, math.inf])])


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_complex_numbers(mode):
    layer = CheckFinite("count", name="scores")
    x = tf.constant([1 + 2j, complex(math.nan, math.inf), complex(0, -math.inf)])
    assert bits(function(layer, mode)(x)) == bits(x)
    assert layer.report() == line("forward", nan=1, positive=1, size=3)


@pytest.mark.parametrize("mode", with_slow_rest(MODES, {"graph"}))
def test_a_gradient_of_rows(mode):
    """Checks the gradient of a lookup behind the layer."""
    layer = CheckFinite("count", name="scores")

    def call(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = tf.gather(layer(x), [1, 3, 1])
        return tf.convert_to_tensor(tape.gradient(rows, x, upstream))

    upstream = np.ones((3, COLUMNS), "float32")
    upstream[0, 0] = np.inf
    found = function(call, mode)(planted(1.0), tf.constant(upstream))
    assert np.isinf(found[1, 0]) and np.isfinite(found).sum() == SIZE - 1
    assert "backward pass" in layer.report() and "(0 NaN, 1 +Inf, 0 -Inf" in layer.report()


@pytest.mark.parametrize("action", ["Raise", None, 1, "skip"])
def test_other_actions_are_refused(action):
    with pytest.raises(
        ValueError, match="CheckFinite 'scores': action=.*: expected one of raise, co"
    ):
        CheckFinite(action, name="scores")
