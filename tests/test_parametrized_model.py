"""`parametrize`: the same variables, for every kind of model."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import (
    ALL,
    DROPPED,
    Subclassed,
    X,
    each,
    functional,
    nested,
    sequential,
    subclassed,
)
from stack_marks import needs_keras3, quick_rows

import tfwd
from tfwd import _keras
from tfwd import parametrizations as P


@each
def test_parametrize_shares_the_variables_in_their_order(kind: str) -> None:
    model = ALL[kind]()
    dropped = tfwd.parametrize(model, DROPPED, seed=1)
    assert [id(w) for w in dropped.weights] == [id(w) for w in model.weights]
    assert _keras.variables.paths(dropped) == _keras.variables.paths(model)
    trainable = [id(w) for w in model.trainable_weights]
    assert [id(w) for w in dropped.trainable_weights] == trainable


@each
def test_evaluation_equals_the_models_and_training_does_not(kind: str) -> None:
    model = ALL[kind]()
    expected = tf.nest.flatten(model(X))[0]
    raw = tf.nest.flatten(model(X, training=True))[0]
    dropped = tfwd.parametrize(model, DROPPED, seed=1)
    if kind in ("sequential", "nested"):
        for w in model.weights:
            if "moving" in _keras.variables.name(w):
                w.assign(tf.zeros_like(w) + 0.5)
        expected = tf.nest.flatten(model(X))[0]
    np.testing.assert_array_equal(tf.nest.flatten(dropped(X))[0], expected)
    found = tf.nest.flatten(dropped(X, training=True))[0]
    assert not np.allclose(found, raw)
    # The given model keeps the raw weights.
    if kind not in ("sequential", "nested", "subclassed"):
        again = tf.nest.flatten(model(X, training=True))[0]
        np.testing.assert_array_equal(again, raw)


@quick_rows("functional-True", "subclassed-True")
@pytest.mark.parametrize(
    ("kind", "recompute"), [*((kind, True) for kind in ALL), ("functional", False)]
)
def test_fit_trains_the_models_own_variables(kind: str, recompute: bool) -> None:
    model = ALL[kind]()
    dropped = tfwd.parametrize(model, DROPPED, seed=1, recompute=recompute)
    outputs = tf.nest.flatten(model(X))
    target = [tf.ones_like(x) for x in outputs]
    target = target[0] if len(target) == 1 else target
    dropped.compile("sgd", "mse" if len(outputs) == 1 else ["mse", "mse"])
    before = [w.numpy() for w in model.trainable_weights]
    history = dropped.fit(X, target, epochs=2, batch_size=4, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    after = [w.numpy() for w in model.trainable_weights]
    assert all(not np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    np.testing.assert_allclose(
        dropped.evaluate(X, target, verbose=0, return_dict=True)["loss"],
        _evaluated(model, dropped, target),
        rtol=1e-5,
    )


def _evaluated(model: keras.Model, dropped: keras.Model, target) -> float:
    model.compile(loss=dropped.loss)
    return model.evaluate(X, target, verbose=0, return_dict=True)["loss"]


@each
def test_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    dropped = tfwd.parametrize(ALL[kind](), DROPPED, seed=1)
    dropped(X, training=True)
    dropped.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    for found, expected in zip(tf.nest.flatten(other(X)), tf.nest.flatten(dropped(X)), strict=True):
        np.testing.assert_array_equal(found, expected)
    if kind != "subclassed":  # its inner Dropout has a seed that Keras does not save
        found, expected = (tf.nest.flatten(m(X, training=True))[0] for m in (other, dropped))
        np.testing.assert_array_equal(found, expected)


def test_parametrize_wraps_only_the_layers_that_match() -> None:
    model = sequential()
    dropped = tfwd.parametrize(model, {"second/kernel": P.Dropout(0.5)})
    kinds = [type(layer).__name__ for layer in dropped.layers]
    assert kinds == ["Dense", "BatchNormalization", "Parametrized"]
    assert [layer.name for layer in dropped.layers] == [layer.name for layer in model.layers]
    assert dropped.layers[0] is model.layers[0]


def test_parametrize_reaches_into_nested_models() -> None:
    dropped = tfwd.parametrize(nested(), {"second/kernel": P.Dropout(0.5)})
    inner = next(layer for layer in dropped.layers if isinstance(layer, keras.Sequential))
    assert [type(layer).__name__ for layer in inner.layers][-1] == "Parametrized"
    assert [type(layer).__name__ for layer in dropped.layers][-1] == "Dense"


def test_layers_of_one_shape_differ_with_one_seed_and_alike_again() -> None:
    def kernels() -> list[np.ndarray]:
        model = keras.Sequential(
            [keras.Input((30,)), *(keras.layers.Dense(30, use_bias=False) for _ in range(2))]
        )
        for weight in model.weights:
            weight.assign(tf.ones([30, 30]))
        dropped = tfwd.parametrize(model, DROPPED, seed=7)
        return [layer.effective_weights(0)["kernel"].numpy() for layer in dropped.layers]

    one, two = kernels()
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / 30
    for a, b in zip((one, two), kernels(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_layer_in_two_places_stays_one_layer() -> None:
    dropped = tfwd.parametrize(functional(), {"shared/kernel": P.Dropout(0.5)}, seed=1)
    dropped(X, training=True)
    shared = dropped.get_layer("shared")
    assert shared.calls == 2
    assert len({id(w) for w in dropped.weights}) == len(dropped.weights)


def test_a_compiled_model_is_compiled_alike() -> None:
    model = sequential()
    model.compile(keras.optimizers.Adam(0.25), "mae", metrics=["mse"])
    model.fit(X, tf.ones([8, 2]), verbose=0)
    for other in (
        tfwd.parametrize(model, DROPPED),
        tfwd.unwrap(tfwd.parametrize(model, DROPPED)),
    ):
        assert isinstance(other.optimizer, keras.optimizers.Adam)
        np.testing.assert_allclose(float(other.optimizer.learning_rate), 0.25)
        assert other.optimizer is not model.optimizer
        assert other.loss == "mae"
        other.fit(X, tf.ones([8, 2]), verbose=0)


def test_a_wildcard_trains_a_model_with_normalization() -> None:
    model = sequential()
    dropped = tfwd.parametrize(model, {".*": P.GaussianNoise(0.1)}, seed=1)
    dropped.compile(keras.optimizers.SGD(0.0), "mse")
    loss = dropped.fit(X, tf.ones([8, 2]), batch_size=8, shuffle=False, verbose=0).history["loss"]
    first, norm, second = ([np.asarray(w) for w in layer.effective_weights(0).values()]
                           for layer in dropped.layers)  # fmt: skip
    hidden = np.maximum(X.numpy() @ first[0] + first[1], 0)
    normal = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-3)
    outputs = (normal * norm[0] + norm[1]) @ second[0] + second[1]
    np.testing.assert_allclose(loss, [np.mean((outputs - 1) ** 2)], rtol=1e-4)
    # The statistics are Keras's own: without noise, from the batch.
    np.testing.assert_allclose(
        model.layers[1].moving_mean, 0.01 * hidden.mean(0), rtol=1e-4, atol=1e-7
    )


def _of_inputs(model: keras.Model) -> list[dict]:
    layers = model._flatten_layers(include_self=False)
    return [x.get_config() for x in layers if isinstance(x, keras.layers.InputLayer)]


def test_inputs_keep_all_that_they_say() -> None:
    Input, Dense = keras.Input, keras.layers.Dense
    inner = keras.Sequential(
        [Input((3,), batch_size=4, dtype="float64", name="own"), Dense(2, name="inner")]
    )
    inputs = [
        Input((3,), batch_size=4, name="sized", dtype="float64"),
        Input((3,), sparse=True, name="sparse"),
        Input((None,), dtype="int32", ragged=True),
        Input((5,)),
    ]
    outputs = [
        inner(inputs[0]),
        Dense(2, name="shared")(inputs[1]),
        keras.layers.Activation("relu")(inputs[2]),
        keras.layers.Activation("relu")(inputs[3]),
    ]
    model = keras.Model(inputs, outputs)
    dropped = tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1)
    assert len(_of_inputs(model)) >= 5
    assert _of_inputs(dropped) == _of_inputs(model)
    assert _of_inputs(tfwd.unwrap(dropped)) == _of_inputs(model)
    alone = tfwd.parametrize(
        keras.Sequential([Input((3,), sparse=True, name="sparse"), Dense(2)]), DROPPED
    )
    (config,) = _of_inputs(alone)
    assert config["sparse"] and config["name"] == "sparse"


@needs_keras3("optional inputs")
def test_an_input_that_may_be_left_out_still_may() -> None:
    class Added(keras.layers.Layer):
        def call(self, x, more=None):
            return x if more is None else x + more

    inputs = [keras.Input((6,), name="x"), keras.Input((6,), name="more", optional=True)]
    hidden = keras.layers.Dense(6, name="dense")(Added()(*inputs))
    model = keras.Model(inputs, hidden)
    if "optional" not in keras.layers.InputLayer((6,)).get_config():
        pytest.skip("clones and files of this release of Keras forget that an input is optional")
    expected = model([X, None])
    dropped = tfwd.parametrize(model, {"dense/kernel": P.Dropout(0.5)}, seed=1)
    np.testing.assert_array_equal(dropped([X, None]), expected)
    kernel = dropped.get_layer("dense").effective_weights(0)["kernel"]
    np.testing.assert_allclose(dropped([X, None], training=True), X @ kernel, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("given", [P.Dropout(0.5), [P.Dropout(0.5)], "kernel", None])
def test_parametrizations_that_are_no_dict(given) -> None:
    for make in (sequential, subclassed):
        with pytest.raises(ValueError, match=r"must be a dict from .*\{'kernel': Dropout"):
            tfwd.parametrize(make(), given)


@each
def test_a_plain_weight_file_names_unwrap(kind: str, tmp_path: Path) -> None:
    model = ALL[kind]()
    model.save_weights(tmp_path / "plain.weights.h5")
    dropped = tfwd.parametrize(model, DROPPED)
    for file, other in (("plain", dropped), ("dropped", dropped), ("plain", tfwd.unwrap(dropped))):
        path = tmp_path / f"{file}.weights.h5"
        if file == "plain" and other is dropped:
            with pytest.raises(ValueError, match=r"tfwd\.unwrap\(model\)\.load_weights\(file\)"):
                other.load_weights(path)
            dropped.save_weights(tmp_path / "dropped.weights.h5")
        else:
            other.load_weights(path)


def test_a_pattern_that_matches_nothing_lists_the_weights() -> None:
    for make in (sequential, subclassed):
        with pytest.raises(ValueError, match="'kernle' matches no weight of.*kernel"):
            tfwd.parametrize(make(), {"kernel": P.Dropout(0.5), "kernle": P.Dropout(0.5)})


def _effective(model: keras.Model) -> dict[str, tuple[float, ...]]:
    """Returns the ratios of the effective weights to the raw ones, which are 1, by the layer."""
    layers = [x for x in model._flatten_layers() if hasattr(x, "effective_weights")]
    return {
        f"{layer.name}/{name}": tuple(np.unique(value))
        for layer in layers
        for name, value in layer.effective_weights(0).items()
    }


@each
def test_exclude_leaves_weights_as_they_are(kind: str) -> None:
    model = ALL[kind]()
    out = {"functional": "shared/.*"}.get(kind, "first/.*")
    if kind == "subclassed":
        out = f"{model.blocks[0].name}/.*"
    given = {"kernel": P.Dropout(0.5), "bias": P.GaussianNoise(0.1)}
    dropped = tfwd.parametrize(model, given, seed=1, exclude=out)
    whole = tfwd.parametrize(model, given, seed=1)
    left = set(_effective(whole)) - set(_effective(dropped))
    assert len(left) == 2
    # What remains draws as without `exclude`.
    if kind == "subclassed":
        assert dropped.parametrized.exclude == dropped.get_config()["exclude"] == [out]
    common = set(_effective(dropped))
    assert common and {k: _effective(whole)[k] for k in common} == _effective(dropped)
    for wrong, message in (("kernle", "matches no weight"), ("gamma|moving.*", "no")):
        with pytest.raises(ValueError, match=rf"exclude=.{wrong[:5]}.*{message}"):
            tfwd.parametrize(model, given, exclude=wrong)


@each
def test_a_pattern_that_is_shadowed_names_both(kind: str) -> None:
    for given in ([".*", "kernel"], ["all", "bias"]):
        with pytest.raises(ValueError, match=rf"'{given[1]}' selects no .* patterns .'{given[0]}'"):
            tfwd.parametrize(ALL[kind](), dict.fromkeys(given, P.Dropout(0.5)))


def test_all_weights_in_one_line() -> None:
    dropped = tfwd.parametrize(nested(), {"all": P.GaussianNoise(0.1)}, seed=1)
    plain = nested()
    trained = len(plain.trainable_weights)
    assert len(_effective(dropped)) == trained < len(plain.weights)


@each
def test_a_rate_out_of_range_names_layer_and_weight(kind: str) -> None:
    with pytest.raises(ValueError, match="kernel'.*rate must be in"):
        tfwd.parametrize(ALL[kind](), {"kernel": P.Dropout(1.0)})


def test_a_wrong_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="expects a Keras model, got .*Dense.*tfwd.layers.Param"):
        tfwd.parametrize(keras.layers.Dense(3), DROPPED)


def test_a_sequential_model_that_is_not_built_is_an_error() -> None:
    model = keras.Sequential([keras.layers.Dense(3)], name="unbuilt")
    with pytest.raises(ValueError, match="'unbuilt' has no weights yet"):
        tfwd.parametrize(model, DROPPED)


def test_a_subclassed_model_that_is_not_built_yet() -> None:
    model = Subclassed()
    dropped = tfwd.parametrize(model, DROPPED, seed=1)
    dropped.compile("sgd", "mse")
    dropped.fit(X, tf.ones([8, 2]), verbose=0)
    assert dropped.calls == 1
    assert len(dropped.effective_weights(0)) == 3
    assert [id(w) for w in dropped.weights] == [id(w) for w in model.weights]


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def test_a_train_step_that_is_not_used_is_a_warning() -> None:
    inputs = keras.Input((5,))
    model = OwnStep(inputs, keras.layers.Dense(1, name="score")(inputs))
    with pytest.warns(UserWarning, match="OwnStep has its own train_step, which"):
        tfwd.parametrize(model, {"score/kernel": P.Dropout(0.5)})


class MadeByCall(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def test_a_wrong_pattern_shows_in_the_first_call_of_any_kind() -> None:
    model = tfwd.parametrize(MadeByCall(), {"kernle": P.Dropout(0.5)})
    with pytest.raises(ValueError, match="'kernle' matches no weight"):
        model(np.ones((2, 4), "float32"))
