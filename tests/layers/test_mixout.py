"""`Mixout` against its published formula, dropout, NumPy; and where its references are kept."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P

SEED = tf.constant([3, 4])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype("float32")
Y = RNG.normal(size=(6, 3)).astype("float32")


def value(variable):
    return np.asarray(tf.convert_to_tensor(_keras.variables.value(variable)), np.float64)


def mask_of(rate, shape, seed=SEED, **options):
    """What dropout keeps of ones."""
    return (P.Dropout(rate, **options)(tf.ones(shape), seed) != 0).numpy()


@pytest.mark.parametrize("noise_shape", [None, (None, 1)])
@pytest.mark.parametrize("rate", [0.25, 0.75])
def test_the_published_formula(rate, noise_shape):
    w, start = RNG.normal(size=(2, 40, 30))
    mixed = P.Mixout(rate, noise_shape=noise_shape).towards_tensor(tf.constant(start))
    m = mask_of(rate, w.shape, noise_shape=noise_shape)
    expected = ((1 - m) * start + m * w - rate * start) / (1 - rate)
    np.testing.assert_allclose(mixed(tf.constant(w), SEED), expected, rtol=1e-9, atol=1e-12)
    weight = tf.constant(w)
    with tf.GradientTape() as tape:
        tape.watch(weight)
        total = tf.reduce_sum(tf.constant(start) * mixed(weight, SEED))
    np.testing.assert_allclose(tape.gradient(total, weight), start * m / (1 - rate), atol=1e-12)


def test_towards_zero_it_is_dropout_to_the_bit():
    w = tf.constant(RNG.normal(size=(300, 300)), tf.float32)
    found = P.Mixout(0.3).towards_tensor(tf.zeros_like(w))(w, SEED)
    np.testing.assert_array_equal(found, P.Dropout(0.3)(w, SEED))


def test_expectation_and_variance():
    """E[w'] = w, and E[(w' - w)^2] = rate / keep (w - w0)^2, within five deviations."""
    rate, n = 0.7, 4000
    w, start = np.array([[0.5, -2.0]]), np.array([[1.5, 1.0]])
    mixed = P.Mixout(rate).towards_tensor(tf.constant(np.repeat(start, n, 0)))
    drawn = mixed(tf.constant(np.repeat(w, n, 0)), SEED).numpy()
    variance = rate / (1 - rate) * (w - start) ** 2
    np.testing.assert_array_less(abs(drawn.mean(0) - w), 5 * np.sqrt(variance / n))
    np.testing.assert_allclose(((drawn - w) ** 2).mean(0), variance[0], rtol=0.1)


def test_rate_zero_is_the_layer_itself():
    layer = layers.Mixout(keras.layers.Dense(3), 0.0)
    layer(X, training=True)
    layer.layer.kernel.assign(2.0 * layer.layer.kernel)
    np.testing.assert_array_equal(layer(X, training=True), layer.layer(X))


@pytest.mark.parametrize("compiled", [False, True, "xla"])
def test_training_is_that_of_numpy(compiled):
    """Three steps of gradient descent; the weights at the first step are those that were loaded."""
    layer = layers.Mixout(keras.layers.Dense(3), 0.5, seed=1)
    layer(X)
    loaded = RNG.normal(size=(5, 3)).astype("float32")
    layer.set_weights([loaded, np.zeros(3)])

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((layer(X, training=True) - Y) ** 2)
        variables = [_keras.variables.tf_variable(w) for w in layer.trainable_weights]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.3 * gradient)

    run = tf.function(step, jit_compile=compiled == "xla") if compiled else step
    kernel, bias = loaded.astype(np.float64), np.zeros(3)
    if compiled == "xla":
        layer(X, training=True)  # the copies are taken outside
    for _ in range(3):
        # The masks are those that the layer announces: 0 where a weight is what it was.
        seed = layer.draws.seed_at(tf.convert_to_tensor(layer.calls), 0)
        m = mask_of(0.5, kernel.shape, seed)
        mixed = loaded + m * (kernel - loaded) / 0.5
        error = 2 * (X @ mixed + bias - Y) / Y.size
        run()
        kernel -= 0.3 * (X.T @ error) * m / 0.5
        bias -= 0.3 * error.sum(0)
        if compiled == "xla":  # whose masks may be others
            assert np.isfinite(value(layer.layer.kernel)).all()
            continue
        np.testing.assert_allclose(value(layer.layer.kernel), kernel, atol=1e-5)
        np.testing.assert_allclose(value(layer.layer.bias), bias, atol=1e-5)


def moved(layer):
    """The layer after a training call, with other weights since."""
    layer(X, training=True)
    layer.set_weights([w + 1 for w in layer.get_weights()])
    return layer


def test_training_goes_on_towards_the_same(tmp_path):
    layer = moved(layers.Mixout(keras.layers.Dense(3), 0.5, seed=1))
    model = keras.Sequential([keras.Input((5,)), layer])
    path = tf.train.Checkpoint(layer=layer).write(str(tmp_path / "checkpoint"))
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    expected = layer(X, training=True)
    assert not np.allclose(expected, layer(X))

    found = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(found(X, training=True), expected)

    again = layers.Mixout(keras.layers.Dense(3), 0.5, seed=1)
    keras.Sequential([keras.Input((5,)), again]).load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(again(X, training=True), expected)

    again = layers.Mixout(keras.layers.Dense(3), 0.5, seed=1)
    again(X)
    tf.train.Checkpoint(layer=again).read(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(again(X, training=True), expected)


def test_unwrapped_it_is_the_plain_layer(tmp_path):
    layer = moved(layers.Mixout(keras.layers.Dense(3, name="dense"), 0.5))
    model = tfwd.unwrap(keras.Sequential([keras.Input((5,)), layer]))
    assert type(model.layers[-1]) is keras.layers.Dense
    model.save_weights(tmp_path / "model.weights.h5")
    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, name="dense")])
    plain.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(plain(X), layer(X))


def test_weights_are_the_plain_layers():
    layer = moved(layers.Mixout(keras.layers.Dense(3), 0.5))
    assert [tuple(w.shape) for w in layer.weights] == [(5, 3), (3,)]
    assert len(layer.trainable_weights) == 2


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_one_copy_is_held(dtype):
    layer = moved(layers.Mixout(keras.layers.Dense(3), 0.5, reference_dtype=dtype))
    held = {name: v.dtype for name, v in layer.references._held.items() if name != "started"}
    assert list(held.values()) == [tf.as_dtype(dtype or "float32")]


def test_towards_a_dict_a_file_and_a_plan(tmp_path):
    start = RNG.normal(size=(5, 3)).astype("float32")
    arrays = {"dense/kernel": start, "dense/bias": np.zeros(3, "float32")}
    np.savez(tmp_path / "start.npz", **arrays)
    plain = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, name="dense")])
    plan = tfwd.pretrained.plan(plain, tmp_path / "start.npz")
    for towards in ({"dense/kernel": start}, str(tmp_path / "start.npz"), plan):
        dense = plain.layers[-1] if towards is plan else keras.layers.Dense(3, name="dense")
        layer = layers.Mixout(dense, 0.5, towards=towards, seed=1)
        layer(X)
        drawn = layer.effective_weights(0)["kernel"].numpy()
        m = mask_of(0.5, start.shape, layer.draws.seed_at(tf.constant(0, tf.int64), 0))
        np.testing.assert_allclose(
            drawn, start + m * (value(dense.kernel) - start) / 0.5, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("towards", "message"),
    [
        ({"other": np.zeros(3)}, "dense/kernel' is that of none in its source, which has other"),
        (
            {"dense/kernel": np.zeros((3, 5))},
            r"'dense/kernel' is \(3, 5\), and the weight \(5, 3\)",
        ),
        ("no_such_file.npz", "no_such_file.npz is not there"),
        (7, "towards=7: give 'start', a plan"),
    ],
)
def test_sources_that_do_not_fit(towards, message):
    with pytest.raises(ValueError, match=message):
        layers.Mixout(keras.layers.Dense(3, name="dense"), 0.5, towards=towards)(X)


def test_rows_of_a_table():
    table = layers.Mixout(keras.layers.Embedding(7, 4), 0.5, seed=2)
    ids = np.array([[1, 5, 5], [0, 2, 1]])
    table(ids, training=True)
    start = value(table.layer.embeddings)
    table.layer.embeddings.assign(start + 1)
    number = tf.convert_to_tensor(table.calls)
    m = mask_of(0.5, start.shape, table.draws.seed_at(number, 0))
    np.testing.assert_allclose(table(ids, training=True), (start + m / 0.5)[ids], rtol=1e-5)


@pytest.mark.slow
def test_two_replicas_hold_to_the_same():
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        layer = layers.Mixout(keras.layers.Dense(3), 0.5, seed=1)
        model = keras.Sequential([keras.Input((5,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    start = value(layer.layer.kernel)
    model.fit(X, Y, batch_size=6, epochs=3, verbose=0)
    name = next(name for name in layer.references._held if name != "started")
    for copy in strategy.experimental_local_results(layer.references._held[name]):
        np.testing.assert_allclose(copy, start, rtol=1e-6)
