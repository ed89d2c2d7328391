"""Copies, files and exports of a model with parametrizations in place are plain."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import DENSE, EXAMPLES, LABELS, X, added, assert_equals_plain, made, stack
from stack_marks import IS_KERAS_2
from watched_processes import Processes, finish

import tfwd
from tfwd import parametrizations as P


def test_a_loaded_model(tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    made(stack, X).save(path)
    assert_equals_plain(lambda: keras.models.load_model(path), X, ".*kernel", "graph")


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "clone"])
def test_copies_are_plain(kind: str) -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4), DENSE(1)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    copies = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "clone": keras.models.clone_model,
    }
    other = copies[kind](model)
    assert not tfwd.added_parametrizations(other)
    np.testing.assert_array_equal(other(EXAMPLES, training=True), other(EXAMPLES))
    assert added(model).calls == 0


def test_a_copied_layer_calls_itself() -> None:
    dense = made(lambda: DENSE(3))
    tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, in_place=True)
    other = copy.deepcopy(dense)
    other.set_weights([w * 0 for w in other.get_weights()])
    assert not np.asarray(other(EXAMPLES)).any()
    assert np.asarray(dense(EXAMPLES)).any()


# A functional model with a preprocessor outside its graph. It compiles itself, and its `fit` takes
# texts, as in keras-hub. A second process defines the same class.
OF_TEXTS = """
import keras
import numpy as np


class Letters(keras.layers.Layer):
    def build(self, shape):
        self.built = True

    def call(self, texts):
        return np.array([[text.count(c) for c in "abcdefgh"] for text in texts], "float32")


class OfTexts(keras.Model):
    def __init__(self, **kwargs):
        counts = keras.Input((8,))
        hidden = keras.layers.Dense(16, "tanh", name="hidden")(counts)
        super().__init__(counts, keras.layers.Dense(1, name="answer")(hidden), **kwargs)
        self.preprocessor = Letters()
        self.compile(keras.optimizers.Adam(0.01), "mse")

    def fit(self, texts, labels, **kwargs):
        return super().fit(self.preprocessor.call(texts), labels, **kwargs)

    def predict(self, texts, **kwargs):
        return super().predict(self.preprocessor.call(texts), **kwargs)

    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls()
"""


LOAD = """
import sys
sys.modules["tfwd"] = None
model = keras.models.load_model(sys.argv[1], custom_objects={"OfTexts": OfTexts}, compile=False)
np.save(sys.argv[2], model.predict(sys.argv[3:], verbose=0))
"""


def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    """`test_keras_hub` does the same with a classifier of keras-hub."""
    names: dict[str, Any] = {"__name__": "of_texts"}
    exec(OF_TEXTS, names)
    keras.utils.set_random_seed(1)
    texts, labels = ["abba", "head", "cabbage", "face"], LABELS[:4]
    before = names["OfTexts"]().predict(texts, verbose=0)
    keras.utils.set_random_seed(1)
    model = names["OfTexts"]()  # nothing has called it yet
    tfwd.parametrize(model, {"hidden/kernel": P.Dropout(0.1)}, in_place=True)
    np.testing.assert_array_equal(model.predict(texts, verbose=0), before)
    model.fit(texts, labels, epochs=3, verbose=0)
    assert added(model).calls == 3
    assert tfwd.unwrap(model) is model
    model.save(tmp_path / "plain.keras")
    with Processes() as started:
        arguments = [str(tmp_path / "plain.keras"), str(tmp_path / "found.npy"), *texts]
        status, output = finish(started.python(OF_TEXTS + LOAD, arguments))
    assert status == 0, output
    expected = model.predict(texts, verbose=0)
    assert abs(expected - before).max() > 1e-3
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, rtol=1e-6, atol=1e-6)


def test_exports_are_plain(tmp_path: Path) -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4), DENSE(1)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model(EXAMPLES, training=True)
    model.export(str(tmp_path / "export"))
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(loaded.serve(EXAMPLES), model(EXAMPLES), rtol=1e-5, atol=1e-6)
    graph = loaded.signatures["serving_default"].graph.as_graph_def()
    assert not any("tateless" in node.op and "Random" in node.op for node in graph.node)
    if IS_KERAS_2:
        model.save(tmp_path / "saved")
        loaded = keras.models.load_model(tmp_path / "saved")
        np.testing.assert_allclose(
            loaded.predict(EXAMPLES, verbose=0), model(EXAMPLES), rtol=1e-5, atol=1e-6
        )
