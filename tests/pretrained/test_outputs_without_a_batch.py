"""Outputs of layers that a model uses as a table or as the kernel of a convolution.

PyTorch has these axes in another order, so loading such a layer's weights is an error. With
`transposed=False`, the file has the weights in Keras's order of features.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from traced_images import ROWS, Model, X, head

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def table_of_a_constant(m, x):
    """Returns an image that a layer makes of a constant, scaled by rows of features."""
    table = tf.reshape(m.d(tf.ones((1, 5))), (1, 4, 3, 8))
    return table * m.g(x)[:, None, None, :]


def table_of_an_embedding(m, x):
    table = tf.reshape(m.e(tf.constant([0])), (1, 4, 3, 8))
    return table * m.g(x)[:, None, None, :]


def kernel_of_a_constant(m, x):
    kernel = tf.reshape(m.k(tf.ones((1, 5))), (3, 2, 3, 7))
    return tf.nn.conv2d(x, kernel, 1, "VALID")


def kernel_of_the_first_pixel(m, x):
    kernel = tf.reshape(m.k(tf.pad(x[:1, 0, 0, :], [[0, 0], [0, 2]])), (3, 2, 3, 7))
    return tf.nn.conv2d(x, kernel, 1, "VALID")


@pytest.mark.parametrize(
    ("function", "made", "x"),
    [
        (table_of_a_constant, {"d": (96, 5), "g": (8, 7)}, ROWS),
        (table_of_an_embedding, {"e": (1, 96), "g": (8, 7)}, ROWS),
        (kernel_of_a_constant, {"k": (126, 5)}, X),
        (kernel_of_the_first_pixel, {"k": (126, 5)}, X),
    ],
)
def test_the_order_is_unknown(function, made, x, tmp_path):
    parts = {name: head(shape[0], name) for name, shape in made.items()}
    if "e" in parts:
        parts["e"] = layers.Embedding(1, 96, name="e")
    model = Model(function, **parts)
    model(x)
    weights = {f"{name}.weight": RNG.normal(size=shape) for name, shape in made.items()}
    first = next(iter(made))
    with pytest.raises(PlanError, match=f"'{first}/.*PyTorch flattens channels first"):
        load(model, saved(tmp_path, weights), mapping={name: name for name in made})


def test_a_kernel_in_keras_order(tmp_path):
    model = Model(kernel_of_a_constant, k=head(126, "k"))
    model(X)
    weight = RNG.normal(size=(126, 5))  # of a PyTorch model: 7 outputs, 3 inputs, 3 rows, 2 columns
    in_keras = np.transpose(weight.reshape(7, 3, 3, 2, 5), (2, 3, 1, 0, 4)).reshape(126, 5).T
    saved(tmp_path, {"k.weight": in_keras})
    with pytest.raises(
        PlanError, match=r"also give flattened=\(\) if the file has the features in"
    ):
        load(model, tmp_path, mapping={"k": Key("k", transposed=False)})
    load(model, tmp_path, mapping={"k": Key("k", transposed=False, flattened=(), unflattened=())})
    kernel = weight.sum(1).reshape(7, 3, 3, 2)
    expected = np.zeros((2, 2, 5, 7))
    for i, j in np.ndindex(2, 5):
        part = X[:, i : i + 3, j : j + 2]
        expected[:, i, j] = np.einsum("nhwc,ochw->no", part, kernel)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_a_table_of_positions(tmp_path):
    """Checks that a reshape that keeps the features of a table keeps the order of its weights."""

    def function(m, x):
        return x + tf.reshape(m.e(tf.range(24)), (1, 4, 6, 3))

    model = Model(function, e=layers.Embedding(24, 3, name="e"))
    model(X)
    table = RNG.normal(size=(24, 3))
    load(model, saved(tmp_path, {"e.weight": table}), mapping={"e": "e"})
    np.testing.assert_allclose(model(X), X + table.reshape(1, 4, 6, 3), atol=1e-5)
