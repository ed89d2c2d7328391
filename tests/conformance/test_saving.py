"""Copies and files: every way in which Keras and TensorFlow copy a layer or keep it in a file."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stacks import IS_KERAS_2

import tfwd
from conformance import harness
from conformance.table import CASES, DROPOUT, NOT_NOISE, ROW, Case

# A config holds no tie to another layer, and TiedDense says so.
pytestmark = pytest.mark.filterwarnings("ignore:TiedDense .* is made from a config:UserWarning")

# What the draws are, and where the sequence stands, is the same for noise.
SAVED = NOT_NOISE


@harness.each(CASES)
def test_config_round_trip(case: Case) -> None:
    wrapped = harness.built(case)
    config = wrapped.get_config()
    again = type(wrapped).from_config(copy.deepcopy(config))
    assert _without_identity(again.get_config()) == _without_identity(config)
    serialized = keras.saving.serialize_keras_object(wrapped)
    for other in (again, keras.saving.deserialize_keras_object(serialized)):
        assert other is not wrapped
        harness.run(other, case)
        assert not {id(w) for w in other.weights} & {id(w) for w in wrapped.weights}
        _check_copy(case, wrapped, other, calls=0)


@harness.each(SAVED)
def test_clone_model(case: Case) -> None:
    model = harness.model_of(harness.built(case), case)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert not {id(w) for w in clone.weights} & {id(w) for w in model.weights}
    harness.assert_same(clone(harness.feed(case)), model(harness.feed(case)))
    _assert_next_calls_alike(model, clone, case)


def _pickled(model: keras.Model) -> keras.Model:
    return pickle.loads(pickle.dumps(model))


# Keras pickles a model as it copies one.
_PICKLED = ("Dense", "Bidirectional", "subclassed model", "user's layer")
_COPIES = [
    pytest.param(case, copied, id=f"{case.name}, {name}")
    for case in SAVED
    for name, copied in (("deepcopy", copy.deepcopy), ("pickle", _pickled))
    if name == "deepcopy" or case.row.name in _PICKLED
]


@pytest.mark.parametrize(("case", "copied"), _COPIES)
def test_copy_of_a_model_goes_on_with_the_draws(case: Case, copied: Callable) -> None:
    model = harness.model_of(harness.built(case), case)
    model(harness.feed(case), training=True)
    other = copied(model)
    assert not {id(w) for w in other.weights} & {id(w) for w in model.weights}
    _assert_next_calls_alike(model, other, case)


@harness.each(SAVED)
def test_deepcopy_of_a_layer(case: Case) -> None:
    wrapped = harness.built(case)
    harness.run(wrapped, case, training=True)
    other = copy.deepcopy(wrapped)
    _check_copy(case, wrapped, other, calls=1)


@harness.each(SAVED)
def test_keras_file_goes_on_with_the_draws(case: Case, tmp_path: Path) -> None:
    model = harness.model_of(harness.built(case), case)
    model(harness.feed(case), training=True)
    model.save(tmp_path / "model.keras")
    other = keras.saving.load_model(tmp_path / "model.keras")
    for layer in (model, other):
        harness.reset(layer)
    harness.assert_same(other(harness.feed(case)), model(harness.feed(case)))
    _assert_next_calls_alike(model, other, case)


@harness.each(SAVED)
def test_weight_file_goes_on_with_the_draws(case: Case, tmp_path: Path) -> None:
    model = harness.model_of(harness.built(case), case)
    model(harness.feed(case), training=True)
    model.save_weights(tmp_path / "model.weights.h5")
    other = harness.model_of(case.make(seed=harness.SEED + 1, recompute=True), case)
    other.load_weights(tmp_path / "model.weights.h5")
    _assert_next_calls_alike(model, other, case)


@harness.each(SAVED)
def test_checkpoint_goes_on_with_the_draws(case: Case, tmp_path: Path) -> None:
    wrapped = harness.built(case)
    harness.run(wrapped, case, training=True)
    path = tf.train.Checkpoint(layer=wrapped).save(tmp_path / "checkpoint")
    other = harness.built(case, seed=harness.SEED + 1)
    status = tf.train.Checkpoint(layer=other).restore(path)
    status.assert_existing_objects_matched()
    status.assert_consumed()
    harness.copy_states(wrapped, other)
    for _ in range(2):
        outputs = [harness.run(layer, case, training=True) for layer in (wrapped, other)]
        harness.assert_same(*outputs)


@harness.each(SAVED)
def test_unwrapped_model_reads_and_writes_the_plain_models_weight_file(
    case: Case, tmp_path: Path
) -> None:
    plain = harness.model_of(harness.plain(case), case)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = harness.model_of(case.make(seed=1, recompute=True), case)
    model(harness.feed(case), training=True)
    if case.row.name == "TiedDense":
        # Its plain layer is of another class; but its own file must come back.
        tfwd.unwrap(model).save_weights(tmp_path / "plain.weights.h5")
        plain.set_weights(model.get_weights())
    tfwd.unwrap(model).load_weights(tmp_path / "plain.weights.h5")
    harness.assert_same(model.get_weights(), plain.get_weights())


_EXPORTED = ["Dense", "Embedding", "LSTM", "Sequential", "subclassed model", "Conv2D"]


@pytest.mark.parametrize("name", _EXPORTED)
def test_exported_saved_model(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in DROPOUT if case.row is ROW[name])
    model = harness.model_of(harness.built(case), case)
    expected = model(harness.feed(case))
    model.export(str(tmp_path / "exported"), **({} if IS_KERAS_2 else {"verbose": False}))
    loaded = tf.saved_model.load(str(tmp_path / "exported"))
    served = loaded.serve(harness.feed(case))
    harness.assert_close(served, expected, 1e-6)


def _without_identity(config: Any) -> Any:
    """A config without the marks by which Keras knows a shared object again.

    And on Keras 2, whose copies of cells are not built, without the shapes that they are built for.
    """
    if isinstance(config, dict):
        marks = {"shared_object_id", *(["build_config"] if IS_KERAS_2 else [])}
        return {key: _without_identity(x) for key, x in config.items() if key not in marks}
    if isinstance(config, list):
        return [_without_identity(x) for x in config]
    return config


def _check_copy(case: Case, wrapped: keras.Layer, other: keras.Layer, calls: int) -> None:
    if not calls:
        other.set_weights(wrapped.get_weights())
    harness.assert_same(other.get_weights(), wrapped.get_weights())
    for call in range(3):
        expected, found = harness.effective(wrapped, call), harness.effective(other, call)
        harness.assert_same(list(found.values()), list(expected.values()))
    assert [p.calls for p in harness.perturbing(other)] == [calls] * len(harness.perturbing(other))


def _assert_next_calls_alike(model: keras.Model, other: keras.Model, case: Case) -> None:
    evaluated = model(harness.feed(case))
    # Keras saves neither the seed of its own Dropout nor recurrent states.
    harness.copy_states(model, other)
    for _ in range(2):
        outputs = [m(harness.feed(case), training=True) for m in (model, other)]
        harness.assert_same(*outputs)
    assert harness.differ(outputs[0], evaluated)
    assert np.all([len(p.effective_weights(0)) > 0 for p in harness.perturbing(other)])
