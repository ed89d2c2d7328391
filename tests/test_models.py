"""`parametrize`: the same variables, for every kind of model."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from model_kinds import (
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

import tfwd
from tfwd import _keras
from tfwd import parametrizations as P


@each
def test_parametrize_shares_the_variables_in_their_order(kind: str) -> None:
    model = ALL[kind]()
    dropped = tfwd.parametrize(model, DROPPED, seed=1)
    assert [id(w) for w in dropped.weights] == [id(w) for w in model.weights]
    assert _keras.paths(dropped) == _keras.paths(model)
    trainable = [id(w) for w in model.trainable_weights]
    assert [id(w) for w in dropped.trainable_weights] == trainable


@each
def test_evaluation_is_that_of_the_model_and_training_is_not(kind: str) -> None:
    model = ALL[kind]()
    expected = tf.nest.flatten(model(X))[0]
    raw = tf.nest.flatten(model(X, training=True))[0]
    dropped = tfwd.parametrize(model, DROPPED, seed=1)
    if kind in ("sequential", "nested"):
        for w in model.weights:
            if "moving" in _keras.name(w):
                w.assign(tf.zeros_like(w) + 0.5)
        expected = tf.nest.flatten(model(X))[0]
    np.testing.assert_array_equal(tf.nest.flatten(dropped(X))[0], expected)
    found = tf.nest.flatten(dropped(X, training=True))[0]
    assert not np.allclose(found, raw)
    # The given model goes on with the raw weights.
    if kind not in ("sequential", "nested", "subclassed"):
        again = tf.nest.flatten(model(X, training=True))[0]
        np.testing.assert_array_equal(again, raw)


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
    if kind != "subclassed":  # whose inner Dropout has a seed that Keras does not save
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


def test_a_pattern_that_matches_nothing_lists_the_weights() -> None:
    for make in (sequential, subclassed):
        with pytest.raises(ValueError, match="'kernle' matches no weight of.*kernel"):
            tfwd.parametrize(make(), {"kernel": P.Dropout(0.5), "kernle": P.Dropout(0.5)})


@each
def test_a_rate_out_of_range_names_layer_and_weight(kind: str) -> None:
    with pytest.raises(ValueError, match="kernel'.*rate must be in"):
        tfwd.parametrize(ALL[kind](), {"kernel": P.Dropout(1.0)})


def test_what_is_no_model_is_an_error() -> None:
    with pytest.raises(ValueError, match="takes a Keras model, got .*Dense.*tfwd.layers.Param"):
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
