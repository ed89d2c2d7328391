"""Models that contain an adapted lookup layer. Keras 2 lists its table among the weights.

The oracle is plain Keras: the same training without tfwd, and a table of rows in NumPy.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved

import tfwd
from tfwd import numerics
from tfwd import parametrizations as P
from tfwd.callbacks import FiniteCheck
from tfwd.pretrained import load

RNG = np.random.default_rng(1)
layers = keras.layers
WORDS = tf.constant([["b"], ["a"], ["z"], ["b"]])
NUMBERS = tf.constant([[7], [4], [99], [7]], "int64")
ROWS = np.array([2, 1, 0, 2])  # 0 stands for words that are not in the table
TARGETS = RNG.normal(size=(4, 1)).astype("float32")


def words():
    return layers.StringLookup(name="lookup"), WORDS, ROWS


def numbers():
    return layers.IntegerLookup(name="lookup"), NUMBERS, ROWS


def text():
    layer = layers.TextVectorization(name="lookup", output_sequence_length=1)
    return layer, WORDS, ROWS + 1  # 0 is the padding


@pytest.fixture(params=[words, numbers, text])
def built(request):
    """Returns a compiled model, its inputs, and the rows of the embedding that they select."""
    lookup, x, rows = request.param()
    lookup.adapt(["a", "b", "a"] if x.dtype == tf.string else [4, 7, 4])
    inputs = keras.Input((1,), dtype=x.dtype.name)
    hidden = layers.Flatten()(layers.Embedding(5, 3, name="e")(lookup(inputs)))
    model = keras.Model(inputs, layers.Dense(1, name="f")(hidden))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, x, rows


def parts(model):
    """Returns copies of the embedding, the kernel and the bias."""
    return [np.array(v) for name in ("e", "f") for v in model.get_layer(name).trainable_weights]


def expected(model, rows):
    table, kernel, bias = parts(model)
    return table[rows] @ kernel + bias


@pytest.mark.parametrize("action", ["skip", "restore"])
def test_training_with_a_check(built, action):
    """Checks that the weights after a checked step equal gradient descent in NumPy."""
    model, x, rows = built
    table, kernel, bias = parts(model)
    error = 2 / 4 * (table[rows] @ kernel + bias - TARGETS)
    model.fit(x, TARGETS, batch_size=4, verbose=0, callbacks=[FiniteCheck(action)])
    np.add.at(table_gradient := np.zeros_like(table), rows, error @ kernel.T)
    found = parts(model)
    np.testing.assert_allclose(found[0], table - 0.1 * table_gradient, atol=1e-6)
    np.testing.assert_allclose(found[1], kernel - 0.1 * table[rows].T @ error, atol=1e-6)
    np.testing.assert_allclose(found[2], bias - 0.1 * error.sum(0), atol=1e-6)


def test_probes_and_unused_weights(built):
    """Checks that a NaN in the table of rows is found, and that each weight has a gradient."""
    model, x, _ = built
    assert numerics.unused(model, x, TARGETS) == {}
    model.get_layer("e").set_weights([np.full((5, 3), np.nan)])
    with numerics.Probes(model) as probes:
        model(x)
    assert "e/embeddings" in str(probes.report())


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in place"])
def test_dropped_weights(built, in_place):
    """Checks evaluation with a dropped kernel, a training step of rate 0.5, and folding."""
    model, x, rows = built
    plain = expected(model, rows)
    dropped = tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, in_place=in_place)
    np.testing.assert_allclose(dropped(x), plain, atol=1e-6)
    dropped.compile(keras.optimizers.SGD(0.1), "mse")
    dropped.fit(x, TARGETS, batch_size=4, verbose=0)
    folded = tfwd.unwrap(dropped, fold=True)
    np.testing.assert_allclose(folded(x), expected(model, rows), atol=1e-6)
    assert np.abs(folded(x) - plain).max() > 1e-3


def test_loading(built, tmp_path):
    """Checks the outputs after loading against rows of the loaded table."""
    model, x, rows = built
    table, kernel = RNG.normal(size=(5, 3)), RNG.normal(size=(1, 3))
    folder = saved(tmp_path, {"e.weight": table, "f.weight": kernel, "f.bias": np.zeros(1)})
    load(model, folder, mapping={"e": "e", "f": "f"})
    np.testing.assert_allclose(model(x), table[rows] @ kernel.T, rtol=1e-5, atol=1e-5)
