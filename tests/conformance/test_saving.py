"""Copies and files: every way in which Keras and TensorFlow copy or save a layer."""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, quick_rows, soak

import tfwd
from conformance import harness
from conformance.table import CASES, DROPOUT, NOT_NOISE, ROW, Case
from tfwd import _keras

# A config holds no tie to another layer, and TiedDense says so.
pytestmark = pytest.mark.filterwarnings("ignore:TiedDense .* is made from a config:UserWarning")

# Draws and their position in the sequence are the same for noise.
SAVED = NOT_NOISE


@quick_rows(
    "Dense, dropout",
    "LSTM, dropout",
    "user's layer, *",
    "Bert, *",
    "Embedding, noise",
    "LSTM, patterns",
    "Bidirectional of *",
    "WeightDropout of *",
)
@harness.each_or_half([case for case in CASES if case.config_is_all])
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


_WAYS = ("clone", "deepcopy", "keras file", "weight file", "checkpoint")
# Every way for a layer of each nature, and for the others two by turns; the rest soaks. Keras
# pickles a model as it copies one.
_EVERY_WAY = {
    "Dense, dropout": ("pickle",),
    "Embedding, dropout": (),
    "LSTM, dropout": (),
    "user's layer, dropout": ("pickle",),
    "subclassed model, dropout": ("pickle",),
    "DropoutEmbedding": (),
    "parametrize": (),
}


def _kept() -> Iterator[Any]:
    for number, case in enumerate(SAVED):
        if case.name in _EVERY_WAY:
            yield pytest.param(case, (*_WAYS, *_EVERY_WAY[case.name]), id=case.name)
            continue
        ways = tuple(way for way in _WAYS if case.config_is_all or way != "clone")
        some = {ways[number % len(ways)]}
        rest = tuple(way for way in (*ways, "pickle") if way not in some)
        slow = [pytest.mark.slow] * (IS_KERAS_2 and number % 2 == 1)
        yield pytest.param(case, tuple(sorted(some)), id=case.name, marks=slow)
        yield pytest.param(case, rest, id=f"{case.name}, the rest", marks=soak)


@quick_rows(
    "LSTM, dropout",
    "Bert, dropout",
    "parametrize",
    "user's layer, dropout",
    "WeightDropLSTM",
    "Dense, dropout",
    "Embedding, dropout",
    "DropoutEmbedding",
    "functional model, dropout",
    "Dense, mixout",
    "CheckFinite, dropout",
    "WeightDropout of VariationalNoise",
)
@pytest.mark.parametrize(("case", "ways"), [*_kept()])
def test_copies_and_files_go_on_with_the_draws(
    case: Case, ways: tuple[str, ...], tmp_path: Path
) -> None:
    """Checks that copies and files continue the draws.

    One layer is copied and saved in several ways after its first training call. Then it continues
    itself.
    """
    wrapped = harness.built(case)
    states, outputs = [_values(wrapped)], [harness.run(wrapped, case, training=True)]
    _check_copy(case, wrapped, copy.deepcopy(wrapped), calls=1)
    checkpoint = tf.train.Checkpoint(layer=wrapped).save(tmp_path / "checkpoint")

    model = harness.model_of(wrapped, case)
    make = {
        "clone": lambda: _clone(model),
        "deepcopy": lambda: copy.deepcopy(model),
        "keras file": lambda: _through_keras_file(model, tmp_path / "model.keras"),
        "weight file": lambda: _through_weight_file(model, case, tmp_path / "model.weights.h5"),
        "checkpoint": lambda: _restored(checkpoint, case),
        "pickle": lambda: pickle.loads(pickle.dumps(model)),
    }
    others = {way: make[way]() for way in ways}

    harness.reset(model)
    evaluated = model(harness.feed(case))
    for _ in range(2):
        states.append(_values(wrapped))
        outputs.append(model(harness.feed(case), training=True))
    assert all(harness.differ(output, evaluated) for output in outputs)
    for way, other in others.items():
        assert not {id(w) for w in other.weights} & {id(w) for w in model.weights}, way
        harness.reset(other)
        harness.assert_same(other(harness.feed(case)), evaluated, way)
        # A clone is made from the config, and begins with the first draw.
        for call in (0, 1) if way == "clone" else (1, 2):
            # Keras saves neither the seed of its own Dropout nor recurrent states.
            for state, value in zip(harness.states(other), states[call], strict=True):
                state.assign(value)
            found = other(harness.feed(case), training=True)
            harness.assert_same(found, outputs[call], f"{way}, call {call}")
        assert np.all([len(p.effective_weights(0)) > 0 for p in harness.perturbing(other)])


def _values(layer: keras.Layer) -> list[np.ndarray]:
    return [np.array(_keras.variables.value(state)) for state in harness.states(layer)]


def _clone(model: keras.Model) -> keras.Model:
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    return clone


def _through_keras_file(model: keras.Model, file: Path) -> keras.Model:
    model.save(file)
    return keras.saving.load_model(file)


def _through_weight_file(model: keras.Model, case: Case, file: Path) -> keras.Model:
    model.save_weights(file)
    other = harness.model_of(case.make(seed=harness.SEED + 1, recompute=True), case)
    other.load_weights(file)
    return other


def _restored(checkpoint: str, case: Case) -> keras.Model:
    other = harness.built(case, seed=harness.SEED + 1)
    status = tf.train.Checkpoint(layer=other).restore(checkpoint)
    status.assert_existing_objects_matched()
    status.assert_consumed()
    return harness.model_of(other, case)


@quick_rows(
    "Dense, dropout",
    "LSTM, dropout",
    "RNN of stacked cells, *",
    "Sequential, *",
    "Bert, *",
    "LSTM, mixout",
    "WeightDropLSTM",
    "DropoutEmbedding",
    "parametrize",
)
@harness.each_or_half(SAVED)
def test_unwrapped_model_reads_and_writes_the_plain_models_weight_file(
    case: Case, tmp_path: Path
) -> None:
    plain = harness.model_of(harness.plain(case), case)
    plain.save_weights(tmp_path / "plain.weights.h5")
    model = harness.model_of(case.make(seed=1, recompute=True), case)
    model(harness.feed(case), training=True)
    if case.row.name == "TiedDense":
        # Its plain layer has another class, but its own file must load.
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
    """Returns a config without the marks by which Keras recognizes a shared object.

    On Keras 2 the shapes of cells are left out too, since its copies of cells are not built.
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
