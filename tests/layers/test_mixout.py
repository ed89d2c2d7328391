"""`Mixout`: the paper's formula, the origin of the reference, and its copies."""

import math
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stacks import extended, quick_rows

import tfwd
from tfwd import _keras, layers, pretrained
from tfwd import parametrizations as P

X = tf.random.stateless_normal([3, 5], [1, 2])
RATE = 0.25


def dense(units: int = 4, **options: Any) -> layers.Mixout:
    """Returns a layer after its first call, whose kernel has changed since."""
    layer = layers.Mixout(keras.layers.Dense(units), RATE, seed=7, **options)
    layer(X, training=True)
    move(layer)
    return layer


def move(layer: Any, seed: int = 3) -> None:
    for weight in layer.weights:
        shift = tf.random.stateless_normal(weight.shape, [seed, 4])
        weight.assign_add(tf.cast(shift, _keras.variables.dtype_name(weight)))


def kernel(layer: Any) -> np.ndarray:
    return np.array(_keras.variables.value(layer.weights[0]))


def bias(layer: Any) -> np.ndarray:
    return np.array(_keras.variables.value(layer.weights[1]))


def reference(layer: Any) -> np.ndarray:
    (found,) = layer.references.all()
    return np.array(tf.cast(tf.convert_to_tensor(found), tf.float32))


def kept(layer: Any, call: int, noise_shape: tuple | None = None) -> np.ndarray:
    """Returns the mask of a training call, drawn as for weight dropout."""
    seed = layer.draws.seed_at(call, 0)
    return (
        P.Dropout(RATE, noise_shape=noise_shape)(tf.ones(layer.weights[0].shape), seed).numpy() != 0
    )


def published(layer: Any, start: np.ndarray, call: int, **options: Any) -> np.ndarray:
    """Returns the effective weight by the paper's formula."""
    m, now = kept(layer, call, **options), kernel(layer).astype(np.float64)
    return ((1 - m) * start + m * now - RATE * start) / (1 - RATE)


# The formula.


@quick_rows("small-None", "large-noise_shape1")
@pytest.mark.parametrize("noise_shape", [None, (None, 1), (1, None)])
def test_the_formula_of_the_paper_and_its_gradient(noise_shape, size: str) -> None:
    layer = dense(noise_shape=noise_shape)
    start, call = reference(layer), layer.calls
    mixed = published(layer, start, call, noise_shape=noise_shape)
    assert 0 < kept(layer, call, noise_shape).mean() < 1
    np.testing.assert_allclose(layer.effective_weights(call)["kernel"], mixed, rtol=1e-5)

    @tf.function(autograph=False)
    def gradient() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(X, training=True)))
        (source,) = (_keras.variables.tf_variable(w) for w in layer.weights[:1])
        return [loss, tape.gradient(loss, source)]

    loss, found = gradient()
    y = X.numpy() @ mixed + bias(layer)
    np.testing.assert_allclose(loss, np.sum(y**2), rtol=1e-5)
    by_hand = X.numpy().T @ (2 * y) * kept(layer, call, noise_shape) / (1 - RATE)
    np.testing.assert_allclose(found, by_hand, rtol=1e-4, atol=1e-5)
    assert np.all(found.numpy()[~kept(layer, call, noise_shape)] == 0.0)


@quick_rows("small-*", "large-None-float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("noise_shape", [None, (None, 1)])
def test_towards_zero_it_is_dropout_bit_for_bit(dtype: str, noise_shape, size: str) -> None:
    weight = tf.cast(tf.random.stateless_normal([30, 40], [1, 2]), dtype)
    p, seed = P.Mixout(0.3, noise_shape=noise_shape), tf.constant([5, 6])
    found = p.towards_tensor(tf.zeros([30, 40], dtype))(weight, seed)
    expected = P.Dropout(0.3, noise_shape=noise_shape)(weight, seed)
    np.testing.assert_array_equal(tf.cast(found, tf.float64), tf.cast(expected, tf.float64))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_rate_of_zero_is_the_identity_bit_for_bit(scheduled: bool, size: str) -> None:
    weight = tf.random.stateless_normal([300], [1, 2]) * 1e-3
    p = P.Mixout((lambda call: 0.0 * tf.cast(call, tf.float32)) if scheduled else 0.0)
    p = p.at(tf.constant(4, tf.int64)).towards_tensor(tf.fill([300], math.pi))
    np.testing.assert_array_equal(p(weight, tf.constant([1, 2])), weight)


def test_the_expectation_is_the_weight_and_the_loss_grows_as_the_paper_says() -> None:
    """Checks that the mean is the weight, and that the loss grows by rate/keep * |w - w0|^2 / 2.

    The paper's bound is an equation for a quadratic loss.
    """
    now, start, draws = np.linspace(-1, 2, 7), np.linspace(1, -0.5, 7), 20000
    p = P.Mixout(RATE).towards_tensor(tf.constant(np.tile(start, (draws, 1))))
    found = p(tf.constant(np.tile(now, (draws, 1))), tf.constant([1, 2]))
    off = found.numpy() - now
    spread = np.sqrt(RATE / (1 - RATE)) * np.abs(now - start)
    assert np.all(np.abs(off.mean(axis=0)) < 5 * spread / np.sqrt(draws))
    loss = 0.5 * np.sum((found.numpy() - 0.3) ** 2, axis=1)
    expected = 0.5 * np.sum((now - 0.3) ** 2) + 0.5 * np.sum(spread**2)
    assert abs(loss.mean() - expected) < 5 * loss.std() / np.sqrt(draws)
    assert expected - 0.5 * np.sum((now - 0.3) ** 2) > 20 * loss.std() / np.sqrt(draws)


def test_half_precision_is_rounded_once(size: str) -> None:
    now, start = (tf.cast(tf.random.stateless_normal([300], [i, 2]), "bfloat16") for i in (1, 2))
    found = P.Mixout(0.5).towards_tensor(start)(now, tf.constant([1, 2]))
    wide = P.Mixout(0.5).towards_tensor(tf.cast(start, tf.float32))
    exact = wide(tf.cast(now, tf.float32), tf.constant([1, 2]))
    np.testing.assert_array_equal(
        tf.cast(found, tf.float32), tf.cast(tf.cast(exact, "bfloat16"), tf.float32)
    )


def test_three_steps_of_training_equal_numpy() -> None:
    layer = layers.Mixout(keras.layers.Dense(4, use_bias=False), RATE, seed=7)
    layer.build((None, 5))
    start = kernel(layer)
    weight, x = start.astype(np.float64), X.numpy().astype(np.float64)
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function(autograph=False)
    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(layer(X, training=True) - 1.0))
        sources = [_keras.variables.tf_variable(w) for w in layer.trainable_weights]
        optimizer.apply_gradients(zip(tape.gradient(loss, sources), layer.weights, strict=True))

    for call in range(3):
        m = kept(layer, call)
        mixed = ((1 - m) * start + m * weight - RATE * start) / (1 - RATE)
        weight = weight - 0.1 * (x.T @ (2 * (x @ mixed - 1.0))) * m / (1 - RATE)
        step()
        np.testing.assert_allclose(kernel(layer), weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(reference(layer), start)


# The reference.


@pytest.mark.parametrize("traced", [False, True])
def test_the_start_is_the_weight_at_the_first_training_call(traced: bool) -> None:
    layer = layers.Mixout(keras.layers.Dense(4), RATE, seed=7)
    call = tf.function(layer, autograph=False) if traced else layer
    call(X, training=False)
    loaded = np.arange(20, dtype="float32").reshape(5, 4)
    layer.set_weights([loaded, np.zeros(4, "float32")])
    # Before the first training call the reference is the current weight.
    np.testing.assert_allclose(layer.effective_weights(0)["kernel"], loaded, rtol=1e-6)
    np.testing.assert_allclose(call(X, training=True), X.numpy() @ loaded, rtol=1e-5, atol=1e-5)
    move(layer)
    call(X, training=True)
    np.testing.assert_array_equal(reference(layer), loaded)
    assert [tuple(w.shape) for w in layer.weights] == [(5, 4), (4,)]


STALE = "'d' has new weights, but its Mixout still mixes with the weights of its first"


def test_weights_that_come_after_the_references_were_taken(tmp_path) -> None:
    """Checks that Mixout keeps old references, warns, and takes new ones on request."""
    layer = layers.Mixout(keras.layers.Dense(4, name="d"), RATE, seed=7, name="d")
    layer(X, training=False)
    values = {"kernel": np.arange(20, dtype="float32").reshape(5, 4), "bias": np.ones(4, "float32")}
    np.savez(tmp_path / "weights.npz", **values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.set_weights([value / 2 for value in values.values()])  # before: nothing to report
        pretrained.load(layer, tmp_path / "weights.npz")
    layer(X, training=True)
    start = reference(layer)
    np.testing.assert_array_equal(start, values["kernel"])
    with pytest.warns(UserWarning, match=f"{STALE} training call: call tfwd.reset_references"):
        layer.set_weights([2 * value for value in values.values()])
    np.savez(tmp_path / "weights.npz", kernel=3 * values["kernel"], bias=values["bias"])
    for target in (layer, layer.layer):  # and of the plain layer that has the same variables
        with pytest.warns(UserWarning, match=STALE):
            pretrained.load(target, tmp_path / "weights.npz")
    layer(X, training=True)
    np.testing.assert_array_equal(reference(layer), start)
    tfwd.reset_references(layer)
    # Nothing is mixed until references are taken. Then they are the current weights.
    expected = X.numpy() @ (3 * values["kernel"]) + 1
    np.testing.assert_allclose(layer(X, training=True), expected, rtol=1e-5)
    np.testing.assert_array_equal(reference(layer), 3 * values["kernel"])
    with pytest.raises(ValueError, match="'plain' has no references: pass a model or a layer"):
        tfwd.reset_references(keras.layers.Dense(1, name="plain"))


def test_references_of_a_model_are_reset() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, name="d")])
    mixed = tfwd.parametrize(model, {"kernel": P.Mixout(RATE)}, seed=1)
    step = tf.function(lambda x: mixed(x, training=True))
    step(X)
    model.set_weights([np.ones((5, 4)), np.zeros(4)])
    tfwd.reset_references(mixed)
    np.testing.assert_allclose(step(X), X.numpy() @ np.ones((5, 4)), rtol=1e-5)
    np.testing.assert_array_equal(reference(mixed.layers[-1]), np.ones((5, 4)))


WAYS = {  # how weights come into a trained model, and whether Mixout warns or gets references
    "the wrapper's set_weights": "warns",
    "tfwd.pretrained.load": "warns",
    "load_weights of a file with references": "has references",
    "a checkpoint of TensorFlow's": "has references",
    "the model's set_weights": "says nothing",
    "load_weights of the plain model": "says nothing",
    "assign": "says nothing",
}


@pytest.mark.parametrize("subclassed", [False, True])
def test_ways_in_which_weights_come_after_the_first_training_call(subclassed, tmp_path) -> None:
    """As docs/fine_tuning.md has them."""

    class Model(keras.Model):
        def __init__(self, layer) -> None:
            super().__init__()
            self.layer = layer

        def call(self, inputs, training=None):
            return self.layer(inputs, training=training)

    def made(value: float) -> tuple[keras.Model, layers.Mixout]:
        layer = layers.Mixout(keras.layers.Dense(4, name="d"), RATE, seed=7, name="d")
        model = Model(layer) if subclassed else keras.Sequential([keras.Input((5,)), layer])
        model(X)
        layer.layer.set_weights([np.full((5, 4), value), np.zeros(4)])
        model(X, training=True)
        return model, layer

    (ours, layer), (theirs, other) = made(1.0), made(2.0)
    values = other.layer.get_weights()
    np.savez(tmp_path / "w.npz", kernel=values[0], bias=values[1])
    theirs.save_weights(tmp_path / "m.weights.h5")
    path = tf.train.Checkpoint(model=theirs).write(str(tmp_path / "checkpoint"))
    plain = tfwd.unwrap(ours)
    tfwd.unwrap(theirs).save_weights(tmp_path / "p.weights.h5")
    take = {
        "the wrapper's set_weights": lambda: layer.set_weights(values),
        "tfwd.pretrained.load": lambda: pretrained.load(layer, tmp_path / "w.npz"),
        "load_weights of a file with references": lambda: ours.load_weights(
            tmp_path / "m.weights.h5"
        ),
        "a checkpoint of TensorFlow's": lambda: tf.train.Checkpoint(model=ours).read(path),
        "the model's set_weights": lambda: ours.set_weights(theirs.get_weights()),
        "load_weights of the plain model": lambda: plain.load_weights(tmp_path / "p.weights.h5"),
        "assign": lambda: layer.layer.kernel.assign(values[0]),
    }
    own = reference(layer)
    for way, what in WAYS.items():
        layer.layer.kernel.assign(own)
        layer.references.all()[0].assign(own)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            take[way]()
        told = [one for one in caught if STALE in str(one.message)]
        assert len(told) == (what == "warns"), way
        np.testing.assert_array_equal(layer.layer.kernel, values[0], err_msg=way)
        expected = values[0] if what == "has references" else own
        np.testing.assert_array_equal(reference(layer), expected, err_msg=way)


SOURCES = ["dict", "file", "plan"]


def source(kind: str, layer: keras.layers.Dense, values: np.ndarray, folder: Any) -> Any:
    if kind == "dict":
        return {"kernel": values}
    file = folder / "weights.npz"
    np.savez(file, **{"there.kernel": values, "bias": np.ones(4, "float32"), "kernel": values})
    if kind == "file":
        return file
    names = {"kernel": "there.kernel", "bias": "bias"}
    return pretrained.plan(layer, file, mapping=names, ignore="kernel")


@quick_rows("dict", "plan")
@pytest.mark.parametrize("kind", SOURCES)
def test_other_references_are_read_at_once_and_saved(kind: str, tmp_path) -> None:
    values = np.random.default_rng(1).normal(size=(5, 4)).astype("float32")
    inner = keras.layers.Dense(4, name="inner")
    inner.build((None, 5))
    layer = layers.Mixout(inner, RATE, towards=source(kind, inner, values, tmp_path), seed=7)
    np.testing.assert_array_equal(reference(layer), values)
    expected = published(layer, values, 0)
    np.testing.assert_allclose(layer.effective_weights(0)["kernel"], expected, rtol=1e-4, atol=1e-5)
    assert layer.get_config()["towards"] == "start"
    model = keras.Sequential([keras.Input((5,)), layer])
    model.save(tmp_path / "model.keras")
    (again,) = keras.saving.load_model(tmp_path / "model.keras").layers
    # It had no training call, and yet it keeps its references.
    found = again(X, training=True)
    np.testing.assert_array_equal(reference(again), values)
    np.testing.assert_allclose(found, layer(X, training=True), rtol=1e-6)


def test_errors_come_before_anything_is_made(tmp_path) -> None:
    def build(towards: Any, layer: Any = None, **options: Any) -> None:
        layer = layer or keras.layers.Dense(4, name="inner")
        layers.Mixout(layer, RATE, towards=towards, name="outer", **options).build((None, 5))

    where = "weight 'kernel' of layer 'outer': Mixout "
    for towards, message in {
        "absent.npz": f"{where}cannot read its reference: .*absent.npz",
        "nothing": f"{where}cannot read its reference",
    }.items():
        with pytest.raises(ValueError, match=message):
            build(str(tmp_path / towards))
    with pytest.raises(
        ValueError, match=f"{where}finds no key for '(outer/)?inner/kernel' .* has a, b"
    ):
        build({"b": np.ones(3), "a": np.ones(3)})
    with pytest.raises(
        ValueError, match=f"{where}finds more than one key .* has inner/k.*, kernel"
    ):
        build({"kernel": np.ones((5, 4)), "inner/kernel": np.ones((5, 4))})
    with pytest.raises(
        ValueError, match=r"shape \(5, 4\), and 'kernel' in its source is of .*\(4,"
    ):
        build({"kernel": np.ones((4, 5))})
    np.savez(tmp_path / "w.npz", kernel=np.ones((5, 4)), bias=np.ones(4))
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, name="inner")])
    plan = pretrained.plan(other, tmp_path / "w.npz", mapping={"inner": ""}, prefix="")
    with pytest.raises(
        ValueError, match=f"{where}(cannot use its plan|finds no '(outer/)?inner/kernel')"
    ):
        build(plan)
    with pytest.raises(ValueError, match="Mixout: towards=0: expected 'start', a plan"):
        build(0)
    with pytest.raises(ValueError, match="reference_dtype='int8': expected one of bfloat16, .*own"):
        build("start", reference_dtype="int8")
    with pytest.raises(ValueError, match=r"weight 'kernel' of layer 'inner': rate must be in \[0"):
        layers.Mixout(keras.layers.Dense(4, name="inner"), 1.0)
    with pytest.raises(ValueError, match="has no reference tensor here"):
        P.Mixout(0.5)(tf.ones([3]), tf.constant([1, 2]))
    # The source lacks the second of two weights, so the first has no reference either.
    inner = keras.layers.LSTM(2)
    inner.build((None, 3, 4))
    start = {"recurrent_kernel": np.ones((2, 8))}
    layer = layers.Mixout(inner, RATE, weights="recurrent_kernel", towards=start)
    assert len(layer.references.all()) == 1
    with pytest.raises(ValueError, match="finds no key for"):
        layers.Mixout(inner, RATE, weights=".*kernel", towards=start)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_references_in_half_precision(policy: str) -> None:
    inner = keras.layers.Dense(4, dtype=policy)
    layer = layers.Mixout(inner, RATE, seed=7, reference_dtype="bfloat16")
    layer(X, training=True)
    start = kernel(layer)
    move(layer)
    (held,) = layer.references.all()
    assert held.dtype == tf.bfloat16
    rounded = tf.cast(tf.cast(start, tf.bfloat16), tf.float32).numpy()
    call, found = layer.calls, layer(X, training=True)
    assert found.dtype == inner.compute_dtype
    mixed = published(layer, rounded, call)
    np.testing.assert_allclose(
        found,
        X.numpy() @ mixed + bias(layer),
        rtol=1e-5 if policy == "float32" else 2e-2,
        atol=1e-5 if policy == "float32" else 2e-2,
    )


# Where the references go.


def trained(folder: Any = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Mixout(
                keras.layers.Dense(4, name="a"), RATE, seed=1, reference_dtype="bfloat16"
            ),
            layers.Mixout(keras.layers.Dense(1, name="b"), RATE, seed=2),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fit(model: keras.Model) -> None:
    model.fit(X, tf.ones([3, 1]), epochs=2, batch_size=3, verbose=0)


@extended
def test_training_resumes_from_every_kind_of_file(tmp_path) -> None:
    whole, half = trained(), trained()
    fit(whole)
    fit(half)
    half.save(tmp_path / "model.keras")
    half.save_weights(tmp_path / "model.weights.h5")
    path = tf.train.Checkpoint(model=half).write(str(tmp_path / "state"))
    fit(whole)
    of_weights, of_checkpoint = trained(), trained()
    of_weights.load_weights(tmp_path / "model.weights.h5")
    tf.train.Checkpoint(model=of_checkpoint).read(path).expect_partial()
    for again in (keras.saving.load_model(tmp_path / "model.keras"), of_weights, of_checkpoint):
        fit(again)
        for a, b in zip(again.get_weights(), whole.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(again.layers, whole.layers, strict=True):
            np.testing.assert_array_equal(reference(a), reference(b))


def test_unwrapping_leaves_the_references_behind(tmp_path) -> None:
    model = trained()
    fit(model)
    tfwd.unwrap(model).save_weights(tmp_path / "unwrapped.weights.h5")
    names = [keras.layers.Dense(n, name=name) for n, name in ((4, "a"), (1, "b"))]
    plain = keras.Sequential([keras.Input((5,)), *names])
    plain.load_weights(tmp_path / "unwrapped.weights.h5")
    for a, b in zip(plain.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model.save_weights(tmp_path / "mixed.weights.h5")
    has = ["plain", "unwrapped", "mixed"]
    has = [b"references" in (tmp_path / f"{n}.weights.h5").read_bytes() for n in has]
    assert has == [False, False, True]
    # The reverse: a file of another wrapper has no references, and an error says so.
    mixed = keras.Sequential([keras.Input((5,)), layers.Mixout(keras.layers.Dense(4), 0.5)])
    with pytest.raises(ValueError, match="has no references of layer 'mixout.*unwrap"):
        mixed.layers[0].references.load_own_variables({})


def test_replicas_have_one_reference() -> None:
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    with strategy.scope():
        layer = layers.Mixout(keras.layers.Dense(4), RATE, seed=7)
        layer.build((None, 5))
    start = kernel(layer)
    step = tf.function(lambda: layer(X, training=True), autograph=False)
    first = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_allclose(first[0], first[1], rtol=1e-6)  # no weight has changed yet
    with strategy.scope():
        layer.weights[0].assign_add(tf.ones([5, 4]))
    call, mixed = layer.calls, layer.effective_weights(layer.calls)["kernel"]
    for copy in strategy.experimental_local_results(layer.references.all()[0]):
        np.testing.assert_array_equal(copy, start)
    one, other = strategy.experimental_local_results(strategy.run(step))
    np.testing.assert_allclose(one, X.numpy() @ mixed.numpy(), rtol=1e-5, atol=1e-5)
    assert not np.allclose(one, other)  # they draw by themselves
    np.testing.assert_allclose(mixed, published(layer, start, call), rtol=1e-5, atol=1e-6)


# In and around other layers.


@extended
def test_in_a_wrapper_and_around_one(size: str) -> None:
    """Checks that there is no warning, and that references do not prevent recomputation."""
    inner = layers.Mixout(keras.layers.Dense(4, name="inner"), RATE, seed=1)
    model = keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(2, name="out")])
    outer = layers.WeightDropout(model, 0.5, weights="out/kernel", seed=2)
    outer(X, training=True)
    start = kernel(inner)
    np.testing.assert_array_equal(reference(inner), start)
    move(inner)
    for function in (outer, tf.function(outer, autograph=False)):
        call = outer.calls
        (of_out,) = outer.effective_weights(call).values()
        hidden = X.numpy() @ published(inner, start, call) + bias(inner)
        found = function(X, training=True)
        np.testing.assert_allclose(found, hidden @ of_out.numpy(), rtol=1e-4, atol=1e-5)
    # The same weight in both: the inner first, and the reference is what is raw.
    both = layers.Mixout(layers.WeightDropout(keras.layers.Dense(4), 0.5, seed=3), RATE, seed=4)
    both(X, training=True)
    start = kernel(both)
    np.testing.assert_array_equal(reference(both), start)
    move(both)
    dropped = both.layer.effective_weights(1)["kernel"].numpy()
    found = both.effective_weights(1)["kernel"].numpy()
    to_start, moved = (
        np.isclose(found, start),
        np.isclose(found, start + (dropped - start) / (1 - RATE), rtol=1e-4, atol=1e-5),
    )
    assert np.all(to_start | moved) and 0 < to_start.mean() < 0.6
    np.testing.assert_allclose(
        both(X, training=True), X.numpy() @ found + bias(both), rtol=1e-4, atol=1e-5
    )


def test_a_layer_that_is_called_twice_has_one_reference_and_two_masks() -> None:
    layer = layers.Mixout(keras.layers.Dense(5, use_bias=False), RATE, seed=7)
    twice = tf.function(lambda: layer(layer(X, training=True), training=True), autograph=False)
    start_product = twice()
    start = kernel(layer)
    np.testing.assert_allclose(start_product, X.numpy() @ start @ start, rtol=1e-4, atol=1e-5)
    move(layer)
    first, second = (published(layer, start, call) for call in (2, 3))
    assert not np.allclose(first, second)
    np.testing.assert_allclose(twice(), X.numpy() @ first @ second, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(reference(layer), start)


@pytest.mark.parametrize("noise_shape", [None, (None, 1)])
def test_an_embedding_mixes_the_rows_that_it_looks_up(noise_shape) -> None:
    layer = layers.Mixout(keras.layers.Embedding(9, 4), RATE, noise_shape=noise_shape, seed=7)
    ids = tf.constant([[1, 7, 1], [0, 8, 8]])
    layer(ids, training=True)
    start = kernel(layer)
    move(layer)
    mixed = published(layer, start, 1, noise_shape=noise_shape)
    variable = _keras.variables.tf_variable(layer.weights[0])
    with tf.GradientTape() as tape:
        found = layer(ids, training=True)
    np.testing.assert_allclose(found, mixed[ids.numpy()], rtol=1e-4, atol=1e-5)
    assert isinstance(tape.gradient(found, variable), tf.IndexedSlices)


@quick_rows("small")
def test_compiled_by_xla(size: str) -> None:
    layer = layers.Mixout(keras.layers.Dense(4, use_bias=False), RATE, seed=7)
    layer.build((None, 5))
    start = kernel(layer)
    variable = _keras.variables.tf_variable(layer.weights[0])

    @tf.function(jit_compile=True, autograph=False)
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = layer(X, training=True)
        variable.assign_sub(0.1 * tape.gradient(y, variable))
        return y

    np.testing.assert_allclose(step(), X.numpy() @ start, rtol=1e-4, atol=1e-5)
    assert not np.allclose(kernel(layer), start)
    mixed = published(layer, start, 1)
    np.testing.assert_allclose(step(), X.numpy() @ mixed, rtol=1e-4, atol=1e-5)


@extended
def test_a_training_flag_that_is_a_tensor_and_a_loop() -> None:
    layer = layers.Mixout(keras.layers.Dense(5, use_bias=False), RATE, seed=7)
    call = tf.function(lambda x, flag: layer(x, training=flag), autograph=False)
    call(X, tf.constant(False))
    loaded = np.eye(5, dtype="float32")
    layer.set_weights([loaded])
    call(X, tf.constant(True))
    np.testing.assert_array_equal(reference(layer), loaded)
    move(layer)
    np.testing.assert_allclose(call(X, tf.constant(False)), layer.layer(X), rtol=1e-6)
    found = call(X, tf.constant(True))
    np.testing.assert_allclose(found, X.numpy() @ published(layer, loaded, 1), rtol=1e-4, atol=1e-5)

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        return tf.while_loop(
            lambda i, x: i < 2, lambda i, x: (i + 1, layer(x, training=True)), [0, X]
        )[1]

    first, second = (published(layer, loaded, call) for call in (2, 3))
    np.testing.assert_allclose(loop(), X.numpy() @ first @ second, rtol=1e-4, atol=1e-4)


def test_moments_of_gradients_begin_too() -> None:
    model = trained()
    start = kernel(model.layers[0])
    tfwd.gradients.moments(model, X, tf.ones([3, 1]), "mse", training=True)
    assert reference(model.layers[1]).shape == (4, 1)
    rounded = tf.cast(tf.cast(start, tf.bfloat16), tf.float32)
    np.testing.assert_array_equal(reference(model.layers[0]), rounded)


def test_parametrize_takes_it() -> None:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, name="a")])
    start = kernel(model)
    mixed = tfwd.parametrize(model, {"kernel": P.Mixout(RATE)}, seed=1)
    mixed(X, training=True)
    move(model)
    (layer,) = (x for x in _keras.layers.all_layers(mixed) if hasattr(x, "effective_weights"))
    expected = X.numpy() @ published(layer, start, 1) + bias(model)
    np.testing.assert_allclose(mixed(X, training=True), expected, rtol=1e-4, atol=1e-5)


def test_arguments_are_attributes_and_in_the_config() -> None:
    layer = layers.Mixout(
        keras.layers.Dense(4), RATE, "kernel", noise_shape=(None, 1), reference_dtype="bfloat16"
    )
    config = layer.get_config()
    assert config["rate"] == layer.rate == RATE and config["weights"] == ["kernel"]
    assert (config["towards"], config["reference_dtype"]) == ("start", "bfloat16")
    assert tuple(config["noise_shape"]) == (None, 1) and "parametrizations" not in config
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
    assert again.get_config()["rate"] == RATE and isinstance(again, layers.Mixout)
    p = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(P.Mixout(RATE)))
    assert isinstance(p, P.Mixout) and p.rate == RATE
