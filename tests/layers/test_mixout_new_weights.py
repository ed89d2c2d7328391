"""Ways to change the weights after `Mixout` has copied its references, as in docs/fine_tuning.md.

Each way gives the weights of a second model to a first model. The expected values are NumPy's.
"""

import copy
import gc
import warnings
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from mixout_tools import RATE, X, reference
from stack_marks import IS_KERAS_2, quick_rows

import tfwd
from tfwd import layers, pretrained
from tfwd import parametrizations as P

STALE = "'{}' has new weights, but its Mixout still mixes with the weights of its first"


class Subclassed(keras.Model):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def call(self, inputs, training=None):
        return self.layer(inputs, training=training)


class Case:
    """A model with Mixout on the kernel of a Dense layer, after its first training call.

    Attributes:
        model: The model that is called.
        outer: A model that contains it.
        dense: The plain layer.
    """

    def __init__(self, kind: str, value: float) -> None:
        self.is_in_place = kind == "in place"
        self.dense = keras.layers.Dense(4, name="d")
        self.wrapper: Any = None
        if kind in ("sequential", "subclassed"):
            self.wrapper = layers.Mixout(self.dense, RATE, seed=7, name="d")
            if kind == "subclassed":
                self.model = Subclassed(self.wrapper)
            else:
                self.model = keras.Sequential([keras.Input((5,)), self.wrapper])
        else:
            plain = keras.Sequential([keras.Input((5,)), self.dense], name="d")
            mixout = {".*kernel": P.Mixout(RATE)}
            self.model = tfwd.parametrize(plain, mixout, seed=7, in_place=self.is_in_place)
        inputs = keras.Input((5,))
        self.outer = keras.Model(inputs, self.model(inputs))
        self.model(X)
        self.values = [np.full((5, 4), value, "float32"), np.full(4, value, "float32")]
        self.dense.set_weights(self.values)
        self.outer(X, training=True)

    def reference(self) -> np.ndarray:
        """Returns the copied reference."""
        if self.wrapper is not None:
            return reference(self.wrapper)
        (found,) = tfwd.layers._substitution.reference_weights.variables(self.model)
        return np.array(found)


KINDS = ["sequential", "subclassed", "wrapped as a whole", "in place"]
WAYS = {  # and whether Mixout warns, gets references, or says nothing
    "set_weights of the model": "warns",
    "set_weights of a model around it": "warns",
    "set_weights of the plain layer": "warns",
    "set_weights of the plain model": "warns",
    "load_weights of the plain model": "warns",
    "load_weights of the plain model, HDF5": "warns",
    "tfwd.pretrained.load": "warns",
    "load_weights of a file with references": "has references",
    "a checkpoint with references": "has references",
    "a checkpoint of the plain layer": "says nothing",
    "assign": "says nothing",
    "EarlyStopping": "says nothing",
}
# A file of a model in place equals the plain model's file.
IN_PLACE = WAYS | {"load_weights of a file with references": "warns"}


def saved_weights(model: keras.Model, path: Any) -> Any:
    model.save_weights(path)
    return path


def saved_as_hdf5(model: keras.Model, path: Any) -> Any:
    (model.save_weights if IS_KERAS_2 else model.save)(path)
    return path


class Sets(keras.callbacks.Callback):
    """A callback that sets weights, as `EarlyStopping(restore_best_weights=True)` does."""

    def __init__(self, values) -> None:
        super().__init__()
        self.values = values

    def on_train_end(self, logs=None) -> None:
        self.model.set_weights(self.values)


def fit(model: keras.Model, values: list[np.ndarray]) -> None:
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, np.zeros((3, 4)), verbose=0, callbacks=[Sets(values)])


def change(way: str, ours: Case, theirs: Case, folder: Any) -> Any:
    """Returns a function that gives the weights of one model to another."""
    plain, other = ours.model, theirs.model
    if "plain model" in way and not ours.is_in_place:
        plain, other = tfwd.unwrap(plain), tfwd.unwrap(other)
    if way == "load_weights of the plain model":
        path = saved_weights(other, folder / "plain.weights.h5")
    elif way == "load_weights of the plain model, HDF5":
        path = saved_as_hdf5(other, folder / "plain.h5")
    elif way == "load_weights of a file with references":
        path = saved_weights(theirs.model, folder / "model.weights.h5")
    elif way == "a checkpoint with references":
        path = tf.train.Checkpoint(model=theirs.model).write(str(folder / "model"))
    elif way == "a checkpoint of the plain layer":
        path = tf.train.Checkpoint(layer=theirs.dense).write(str(folder / "layer"))
    else:
        path = folder / "weights.npz"
        np.savez(path, kernel=theirs.values[0], bias=theirs.values[1])
    return {
        "set_weights of the model": lambda: ours.model.set_weights(theirs.values),
        "set_weights of a model around it": lambda: ours.outer.set_weights(theirs.values),
        "set_weights of the plain layer": lambda: ours.dense.set_weights(theirs.values),
        "set_weights of the plain model": lambda: plain.set_weights(theirs.values),
        "load_weights of the plain model": lambda: plain.load_weights(path),
        "load_weights of the plain model, HDF5": lambda: plain.load_weights(path),
        "tfwd.pretrained.load": lambda: pretrained.load(ours.dense, path),
        "load_weights of a file with references": lambda: ours.model.load_weights(path),
        "a checkpoint with references": lambda: tf.train.Checkpoint(model=ours.model).read(path),
        "a checkpoint of the plain layer": lambda: tf.train.Checkpoint(layer=ours.dense).read(path),
        "assign": lambda: [
            variable.assign(value)
            for variable, value in zip(ours.dense.weights, theirs.values, strict=True)
        ],
        "EarlyStopping": lambda: fit(ours.model, theirs.values),
    }[way]


@quick_rows("sequential", "in place")
@pytest.mark.parametrize("kind", KINDS)
def test_each_way_to_change_weights(kind: str, tmp_path) -> None:
    ours, theirs = Case(kind, 1.0), Case(kind, 2.0)
    ways = IN_PLACE if kind == "in place" else WAYS
    for way, what in ways.items():
        if "HDF5" in way and kind == "subclassed" and not IS_KERAS_2:
            continue  # Keras 3 does not save it
        ours.dense.kernel.assign(np.ones((5, 4)))
        tfwd.reset_references(ours.model)
        ours.model(X, training=True)
        make = change(way, ours, theirs, tmp_path)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        told = [one for one in caught if STALE.format("d") in str(one.message)]
        assert len(told) == (what == "warns"), way
        assert all(one.filename == __file__ for one in told), [way, told[0].filename]
        np.testing.assert_array_equal(ours.dense.kernel, theirs.values[0], err_msg=way)
        expected = theirs.values[0] if what == "has references" else np.ones((5, 4))
        np.testing.assert_array_equal(ours.reference(), expected, err_msg=way)


def test_one_warning_for_each_layer_with_mixout() -> None:
    """Checks several layers and weights, and weights without references."""
    parts = [layers.Mixout(keras.layers.Dense(3), RATE, ".*", name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((5,)), *parts, keras.layers.Dense(1, name="c")])
    model(X, training=True)

    def messages(call: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        return [str(one.message) for one in caught]

    values = model.get_weights()
    found = messages(lambda: model.set_weights(values))
    assert [message.partition(" has")[0] for message in found] == ["layer 'a'", "layer 'b'"]
    found = messages(lambda: parts[1].layer.set_weights(values[2:4]))
    assert [message.partition(" has")[0] for message in found] == ["layer 'b'"]
    assert messages(lambda: model.layers[2].set_weights(values[4:])) == []
    tfwd.reset_references(model)
    assert messages(lambda: model.set_weights(values)) == []  # the next training call copies


@pytest.mark.filterwarnings("ignore:A total of", "ignore:Could not load weights")
def test_a_file_without_the_first_weight(tmp_path) -> None:
    """Checks a warning although the first weight with a reference keeps its value."""

    def make(size: int) -> keras.Model:
        parts = [keras.layers.Dense(4, name="a"), keras.layers.Dense(2, name="b")]
        return keras.Sequential([keras.Input((size,)), *parts])

    model = make(5)
    tfwd.parametrize(model, {".*kernel": P.Mixout(RATE)}, in_place=True)
    model(X, training=True)
    make(7).save_weights(tmp_path / "other.weights.h5")
    with pytest.warns(UserWarning, match="its Mixout still mixes"):
        model.load_weights(tmp_path / "other.weights.h5", skip_mismatch=True)


def test_copies_have_their_own_weights() -> None:
    """Checks that a copy of a weight or model assigns to itself only."""
    case = Case("sequential", 1.0)
    kernel = copy.deepcopy(case.dense.weights[0])
    kernel.assign(np.full((5, 4), 3.0))
    np.testing.assert_array_equal(kernel, np.full((5, 4), 3.0))
    model = copy.deepcopy(case.model)
    assert len(model.layers) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.set_weights([np.full((5, 4), 2.0), np.ones(4)])
    np.testing.assert_array_equal(model.get_weights()[0], np.full((5, 4), 2.0))
    np.testing.assert_array_equal(case.dense.kernel, np.ones((5, 4)))


def test_a_layer_is_freed_after_its_weights_were_set() -> None:
    """Checks that a weight does not keep the layer that it tells."""
    layer = layers.Mixout(keras.layers.Dense(3), RATE)
    layer(X, training=True)
    references = weakref.ref(layer.references)
    dense = layer.layer
    del layer
    gc.collect()
    assert references() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dense.set_weights([np.ones((5, 3)), np.ones(3)])
    np.testing.assert_array_equal(dense.kernel, np.ones((5, 3)))
