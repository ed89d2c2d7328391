"""References of `Mixout`: their origin and its errors, and how they are saved, loaded and reset."""

import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from mixout_tools import RATE, X, bias, kernel, move, published, reference, trained
from stack_marks import extended, quick_rows

import tfwd
from tfwd import layers, pretrained
from tfwd import parametrizations as P


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
    with pytest.warns(UserWarning, match="has new weights, but its Mixout"):
        model.set_weights([np.ones((5, 4)), np.zeros(4)])
    tfwd.reset_references(mixed)
    np.testing.assert_allclose(step(X), X.numpy() @ np.ones((5, 4)), rtol=1e-5)
    np.testing.assert_array_equal(reference(mixed.layers[-1]), np.ones((5, 4)))


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


@pytest.mark.parametrize("traced", [False, True])
def test_a_reference_that_overflows_is_an_error(traced: bool) -> None:
    large = np.full((5, 4), 2.0**16, "float32")  # float16 ends at 65504
    inner = keras.layers.Dense(4, name="d")
    source = {"d/kernel": large, "d/bias": np.zeros(4, "float32")}
    with pytest.raises(ValueError, match="'kernel'.*overflows in float16.* reaches 6.554e\\+04"):
        layers.Mixout(inner, RATE, towards=source, reference_dtype="float16", name="d")(X)
    # A weight that the first training call copies. Later values of the weight do not matter.
    layer = layers.Mixout(keras.layers.Dense(4), RATE, seed=7, reference_dtype="float16")
    call = tf.function(layer, autograph=False) if traced else layer
    layer(X, training=False)
    layer.set_weights([large, np.zeros(4, "float32")])
    call(X, training=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="kernel'.*overflows in float16"):
        call(X, training=True)
    layer.set_weights([large / 2, np.zeros(4, "float32")])
    call(X, training=True)
    np.testing.assert_array_equal(reference(layer), large / 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer.layer.set_weights([large, np.zeros(4, "float32")])
        assert np.isfinite(call(X, training=True)).all()


def test_errors_of_a_reference_come_before_anything_is_made(tmp_path) -> None:
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
    with pytest.raises(ValueError, match=r"shape \(5, 4\), but 'kernel' in its source has .*\(4,"):
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
    with pytest.raises(ValueError, match="reference_dtype='int8': expected .*weight's dtype"):
        build("start", reference_dtype="int8")
    # The source lacks the second of two weights, so the first has no reference either.
    inner = keras.layers.LSTM(2)
    inner.build((None, 3, 4))
    start = {"recurrent_kernel": np.ones((2, 8))}
    layer = layers.Mixout(inner, RATE, weights="recurrent_kernel", towards=start)
    assert len(layer.references.all()) == 1
    with pytest.raises(ValueError, match="finds no key for"):
        layers.Mixout(inner, RATE, weights=".*kernel", towards=start)


# Where the references go.


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
