"""CheckFinite changes nothing, and finds each single element, forward and backward."""

import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from stacks import IS_KERAS_2, needs_keras3
from tables import with_slow_rest

import tfwd
from tfwd import _keras, finite
from tfwd.layers import CheckFinite

ROWS, COLUMNS = 16, 8
SIZE = ROWS * COLUMNS
BAD = {"NaN": math.nan, "+Inf": math.inf, "-Inf": -math.inf}
MODES = ("eager", "graph", "xla")
DTYPES = ("float16", "bfloat16", "float32", "float64")


def planted(value, places=(0,), dtype="float32"):
    flat = np.arange(1.0, SIZE + 1, dtype="float32") / 64
    flat[list(places)] = value
    return tf.cast(tf.constant(flat.reshape(ROWS, COLUMNS)), dtype)


def function(call, mode):
    return call if mode == "eager" else tf.function(call, jit_compile=mode == "xla")


def both_ways(layer):
    """The output of a layer and the gradient of its input, for an input and an upstream one."""

    def call(x, upstream):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return y, tape.gradient(y, x, upstream)

    return call


def bits(tensor):
    return np.asarray(tensor).tobytes()


def line(way, *, nan=0, positive=0, negative=0, size=SIZE, name="scores"):
    share = 100 * (nan + positive + negative) / size
    return (
        f"layer '{name}': {way} pass has {share:.2f} % non-finite elements "
        f"({nan} NaN, {positive} +Inf, {negative} -Inf of {size})"
    )


def said(caught):
    """What an error says; TensorFlow's operation puts a backslash before a quote."""
    return str(caught.value).replace("\\'", "'")


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


@pytest.mark.parametrize("mode", MODES)
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


@pytest.mark.parametrize("mode", ["eager", "graph"])
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
def test_a_small_share_is_not_said_to_be_none(mode):
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
    """A weight is as it was."""
    layer, weight = CheckFinite(), tf.Variable(tf.zeros([ROWS, COLUMNS]))

    def step(x, upstream):
        y, gradient = both_ways(layer)(x, upstream)
        weight.assign_add(y)
        weight.assign_add(gradient)

    step = function(step, mode)
    with pytest.raises(tf.errors.InvalidArgumentError, match="forward pass"):
        step(planted(math.nan), planted(1.0))
    np.testing.assert_array_equal(weight, 0)


# XLA.


def test_xla_is_refused_where_it_would_drop_the_error():
    with pytest.raises(ValueError) as caught:
        tf.function(CheckFinite(name="scores"), jit_compile=True)(planted(1.0))
    words = "CheckFinite 'scores' cannot stop a program that XLA compiles"
    assert words in str(caught.value)
    assert "action='count'" in str(caught.value)
    assert "tfwd.callbacks.FiniteCheck" in str(caught.value)


def test_it_does_nothing_where_every_layer_is_looked_at():
    finite.here.watch = object()
    try:
        for mode in MODES:
            bad = planted(math.nan)
            assert bits(function(CheckFinite(), mode)(bad)) == bits(bad)
    finally:
        del finite.here.watch
    with pytest.raises(tf.errors.InvalidArgumentError):
        CheckFinite()(bad)


@needs_keras3("question of a layer whether it can be compiled")
def test_keras_does_not_compile_a_model_that_may_raise():
    """Nor where it is told to; by itself it asks the same question, on a GPU."""
    net = model(CheckFinite())
    with pytest.warns(UserWarning, match="Model doesn't support `jit_compile=True`"):
        net.compile("sgd", "mse", jit_compile=True)
    assert net.jit_compile is False
    with pytest.raises(tf.errors.InvalidArgumentError, match="forward pass has"):
        net.fit(planted(math.nan).numpy(), DATA[1], verbose=0)
    net = model(CheckFinite("count"))
    net.compile("sgd", "mse", jit_compile=True)
    assert net.jit_compile is True


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 does not compile it")
def test_keras_2_is_told():
    net = model(CheckFinite())
    net.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ValueError, match="cannot stop a program that XLA compiles"):
        net.fit(*DATA, verbose=0)


# In models.


def model(*checks):
    keras.utils.set_random_seed(3)
    first, second = keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)
    return keras.Sequential([keras.Input((COLUMNS,)), first, *checks, second])


DATA = (planted(1.0).numpy(), np.ones((ROWS, 1), "float32"))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("action", ["raise", "count"])
def test_training_is_as_without(action, compiled):
    if compiled and action == "raise":
        pytest.skip("refused")
    found = []
    for checks in ([CheckFinite(action)], []):
        net = model(*checks)
        net.compile("adam", "mse", jit_compile=compiled)
        history = net.fit(*DATA, batch_size=4, epochs=3, shuffle=False, verbose=0).history
        found.append((history["loss"], [w.numpy() for w in net.trainable_weights]))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(one, other)


def test_fit_stops_with_the_weights_of_before():
    net = model(CheckFinite(name="scores"))
    net.compile("sgd", "mse", jit_compile=False)
    before = net.get_weights()
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        net.fit(planted(math.nan).numpy(), DATA[1], verbose=0)
    assert "layer 'scores': forward pass has 6.25 % non-finite elements (6 NaN" in said(caught)
    for one, other in zip(net.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_loss_that_has_no_gradient_is_found_backward():
    inputs = keras.Input((COLUMNS,))
    hidden = CheckFinite(name="scores")(keras.layers.Dense(1, kernel_initializer="zeros")(inputs))
    net = keras.Model(inputs, keras.layers.Lambda(tf.sqrt)(hidden))
    net.compile("sgd", "mae", jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="backward pass has 100.00 %"):
        net.fit(*DATA, verbose=0)


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
    """That of a lookup behind the layer."""
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


@pytest.mark.parametrize("action", ["raise", "count"])
def test_masks_go_through(action):
    def outputs(*checks):
        keras.utils.set_random_seed(3)
        ids = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(5, 3, mask_zero=True)(ids)
        for check in checks:
            x = check(x)
        net = keras.Model(ids, keras.layers.LSTM(2)(x))
        return net(np.array([[1, 2, 0, 0], [3, 0, 0, 0]]))

    np.testing.assert_array_equal(outputs(CheckFinite(action)), outputs())


def test_a_layer_in_a_loop():
    """A cell of a recurrent layer: each step is counted, both ways."""

    @keras.saving.register_keras_serializable("test_check_finite")
    class Cell(keras.layers.Layer):
        state_size = output_size = 3

        def __init__(self):
            super().__init__()
            self.check = CheckFinite("count", name="scores")

        def build(self, input_shape):
            self.built = True

        def call(self, inputs, states):
            state = self.check(inputs + states[0])
            return state, [state]

    cell = Cell()
    layer = keras.layers.RNN(cell)
    x = np.ones((2, 4, 3), "float32")
    layer(x)
    cell.check.reset()

    @tf.function
    def call(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return tape.gradient(y, x)

    call(tf.constant(x))
    # Keras calls the cell once more, to see what comes out.
    np.testing.assert_array_equal(cell.check.forward_counts, [0, 0, 0, x.size + 2 * 3])
    np.testing.assert_array_equal(cell.check.backward_counts, [0, 0, 0, x.size])
    call(tf.constant(x) * math.nan)
    assert np.asarray(cell.check.forward_counts)[0] == x.size + 2 * 3


# Replicas.


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    return tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_counts_of_all_replicas(strategy, compiled, tmp_path):
    with strategy.scope():
        layer = CheckFinite("count", name="scores")
        layer(planted(1.0))
    layer.reset()

    def replica():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        x = planted(1.0) * tf.where(number == 1, math.nan, 1.0)
        call = both_ways(layer)
        call = tf.function(call, jit_compile=True) if compiled else call
        return call(x, planted(math.inf))

    step = tf.function(lambda: strategy.run(replica))
    for _ in range(3):
        step()
    expected = [
        line("forward", nan=3 * SIZE, size=6 * SIZE),
        line("backward", positive=6, size=6 * SIZE),
    ]
    assert layer.report() == "\n".join(expected)
    with strategy.scope():
        net = keras.Sequential([keras.Input((COLUMNS,)), layer])
    net.save_weights(tmp_path / "net.weights.h5")
    layer.reset()
    assert layer.report() == ""
    net.load_weights(tmp_path / "net.weights.h5")
    assert layer.report() == "\n".join(expected)
    other = keras.Sequential([keras.Input((COLUMNS,)), CheckFinite("count", name="scores")])
    other.load_weights(tmp_path / "net.weights.h5")
    assert other.layers[0].report() == "\n".join(expected)


@pytest.mark.parametrize("action", ["raise", "count"])
def test_fit_on_two_replicas(strategy, action):
    with strategy.scope():
        net = model(CheckFinite(action, name="scores"))
        net.compile("sgd", "mse", jit_compile=False)
    net.fit(*DATA, batch_size=8, verbose=0)
    bad = planted(math.nan, (SIZE - 1,)).numpy()  # on the second replica alone
    if action == "raise":
        with pytest.raises(tf.errors.InvalidArgumentError, match="forward pass has"):
            net.fit(bad, DATA[1], verbose=0)
        return
    layer = next(layer for layer in net.layers if isinstance(layer, CheckFinite))
    assert layer.report() == ""
    layer.reset()
    net.fit(bad, DATA[1], batch_size=16, shuffle=False, verbose=0)
    forward = layer.report().splitlines()[0]
    assert forward == line("forward", nan=6, size=ROWS * 6)


# Saved, unwrapped, refused.


def test_saved_and_loaded(tmp_path: Path) -> None:
    net = model(CheckFinite("count", name="scores"))
    net(planted(math.nan))
    net.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    layer = loaded.layers[1]
    assert isinstance(layer, CheckFinite) and layer.action == "count"
    assert layer.report() == net.layers[1].report() != ""
    path = tf.train.Checkpoint(net).write(str(tmp_path / "state"))
    layer.reset()
    tf.train.Checkpoint(loaded).read(path).assert_existing_objects_matched()
    assert layer.report() == net.layers[1].report()
    raising = model(CheckFinite(name="scores"))
    raising.save(tmp_path / "raising.keras")
    loaded = keras.saving.load_model(tmp_path / "raising.keras")
    with pytest.raises(tf.errors.InvalidArgumentError, match="layer 'scores'"):
        loaded(planted(math.nan))


def test_a_model_has_the_same_weights_and_files_as_without():
    net, plain = model(CheckFinite("count")), model()
    assert net.layers[1].weights == [] and len(net.weights) == len(plain.weights)
    net.layers[1](planted(math.nan))
    plain.set_weights([np.ones(w.shape) for w in plain.weights])
    net.set_weights(plain.get_weights())
    assert net.layers[1].report() != ""
    for variable in (net.layers[1].forward_counts, net.layers[1].backward_counts):
        assert _keras.variables.dtype_name(variable) == "int64"


def test_config_and_float_types():
    layer = CheckFinite("count", name="scores")
    again = CheckFinite.from_config(layer.get_config())
    assert (again.action, again.name) == ("count", "scores")
    keras.config.set_dtype_policy("mixed_float16")
    assert CheckFinite()(planted(1.0)).dtype == tf.float32
    assert CheckFinite(dtype="float64")(planted(1.0, dtype="float16")).dtype == tf.float16


@pytest.mark.parametrize("action", ["raise", "count"])
def test_unwrapped(action):
    net = model(CheckFinite(action, name="scores"))
    plain = tfwd.unwrap(net)
    assert [type(layer).__name__ for layer in plain.layers] == ["Dense", "Identity", "Dense"]
    assert plain.layers[1].name == "scores"
    np.testing.assert_array_equal(plain(planted(1.0)), net(planted(1.0)))
    assert [id(w) for w in plain.weights] == [id(w) for w in net.trainable_weights]


@pytest.mark.parametrize("action", ["Raise", None, 1, "skip"])
def test_other_actions_are_refused(action):
    with pytest.raises(ValueError, match="CheckFinite 'scores': action=.*: give one of raise, co"):
        CheckFinite(action, name="scores")


def test_a_call_of_keras_before_there_are_values():
    """The shapes and dtypes of symbolic inputs."""
    for action in ("raise", "count"):
        for dtype in ("float16", "int32"):
            given = keras.Input((3,), dtype=dtype)
            found = CheckFinite(action)(given)
            assert tuple(found.shape) == (None, 3)
            assert tf.as_dtype(found.dtype).name == dtype
            assert IS_KERAS_2 or isinstance(found, keras.KerasTensor)
