"""`CheckFinite` in models: training, masks, loops, replicas and files."""

import math
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from check_finite_passes import COLUMNS, ROWS, SIZE, both_ways, line, planted, said
from replicas import two_replicas
from stack_marks import IS_KERAS_2, extended, needs_keras3, quick_rows

import tfwd
from tfwd import _keras
from tfwd.layers import CheckFinite


@needs_keras3("question of a layer whether it can be compiled")
def test_keras_does_not_compile_a_model_that_may_raise():
    """Checks that Keras does not compile a model that may raise, even where it is told to.

    On a GPU Keras decides by the same function when it is not told.
    """
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


def model(*checks):
    keras.utils.set_random_seed(3)
    first, second = keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)
    return keras.Sequential([keras.Input((COLUMNS,)), first, *checks, second])


DATA = (planted(1.0).numpy(), np.ones((ROWS, 1), "float32"))


@quick_rows("raise-False")
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


@quick_rows("raise")
@pytest.mark.parametrize("action", ["raise", "count"])
def test_masks_go_through(action):
    def outputs(*checks):
        keras.utils.set_random_seed(3)
        ids = keras.Input((4,), dtype="int32")
        x = keras.layers.Embedding(5, 3, mask_zero=True)(ids)
        for check in checks:
            x = check(x)
        net = keras.Model(ids, keras.layers.GlobalAveragePooling1D()(x))
        return net(np.array([[1, 2, 0, 0], [3, 0, 0, 0]]))

    np.testing.assert_array_equal(outputs(CheckFinite(action)), outputs())


def test_a_layer_in_a_loop():
    """Checks a layer in the cell of a recurrent layer: each step is counted, both ways."""

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
    # Keras calls the cell once more, to get the shapes of its outputs.
    np.testing.assert_array_equal(cell.check.forward_counts, [0, 0, 0, x.size + 2 * 3])
    np.testing.assert_array_equal(cell.check.backward_counts, [0, 0, 0, x.size])
    call(tf.constant(x) * math.nan)
    assert np.asarray(cell.check.forward_counts)[0] == x.size + 2 * 3


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    return two_replicas()


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


@extended
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


def test_a_call_of_keras_before_there_are_values():
    """Checks the shapes and dtypes of symbolic inputs."""
    for action in ("raise", "count"):
        for dtype in ("float16", "int32"):
            given = keras.Input((3,), dtype=dtype)
            found = CheckFinite(action)(given)
            assert tuple(found.shape) == (None, 3)
            assert tf.as_dtype(found.dtype).name == dtype
            assert IS_KERAS_2 or isinstance(found, keras.KerasTensor)
