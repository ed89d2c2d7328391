"""Images that a model moves into PyTorch's order of axes, uses, and moves back before it flattens.

PyTorch's model has no reason to move them. So the Keras code does not prove the order of features.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import needs_keras3
from traced_images import C, F, Model, X, check, flat, head, image

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


X1 = X.reshape(2, 24, 3)  # a sequence of 24 steps
C1 = {"c.weight": C["c.weight"][..., 0], "c.bias": C["c.bias"]}


def sequence():
    """Returns PyTorch's convolution of X1, with the channels first."""
    return image().reshape(2, 5, 24)


def exchanged(x):
    return tf.transpose(x, (0, 2, 1))


def attended(x):
    """Attention over the channels of a sequence with the channels first."""
    return tf.matmul(tf.nn.softmax(tf.matmul(x, x, transpose_b=True)), x)


# Functions of a sequence with the channels first. They keep its shape and the order of its axes.
USES = {
    "attention": attended,
    "examples move": lambda x: tf.transpose(tf.tanh(tf.transpose(x, (1, 0, 2))), (1, 0, 2)),
    "reshapes": lambda x: tf.reshape(tf.tanh(tf.reshape(x, (-1, 10, 12))), (-1, 5, 24)),
    "einsum": lambda x: tf.einsum("bct,ts->bcs", x, tf.eye(24) * 2.0),
    "joined": lambda x: tf.concat([x[:, :2], tf.tanh(x[:, 2:])], 1),
    "joined with a table": lambda x: tf.concat([x[:, :2], tf.ones_like(x[:, 2:])], 1),
}


def model_of(call):
    model = Model(call, c=layers.Conv1D(5, 1, name="c"), f=head())
    model(X1)
    return model


@pytest.mark.parametrize("use", USES)
def test_an_image_that_is_moved_back_is_refused(use, tmp_path):
    function = USES[use]

    def call(m, x):
        moved = function(exchanged(m.c(x)))
        return m.f(tf.reshape(exchanged(moved), (-1, 120)))

    model = model_of(call)
    file, mapping = saved(tmp_path, C1, F), {"c": "c", "f": "f"}
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping=mapping)
    load(model, file, mapping={**mapping, "f": Key("f", flattened=(5, 24))})
    expected = flat(function(tf.constant(sequence(), tf.float32)).numpy()) @ F["f.weight"].T
    np.testing.assert_allclose(model(X1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", ["reshapes", "joined"])
def test_an_image_that_stays_moved(use, tmp_path):
    """Checks that an image in PyTorch's order may be flattened as it is."""
    function = USES[use]
    model = model_of(lambda m, x: m.f(tf.reshape(function(exchanged(m.c(x))), (-1, 120))))
    used = function(tf.constant(sequence(), tf.float32)).numpy()
    check(model, flat(used) @ F["f.weight"].T, tmp_path, C1, F, x=X1)


@needs_keras3("keras.ops")
def test_a_functional_model_that_moves_an_image_back(tmp_path):
    inputs = keras.Input((24, 3))
    rows = layers.Permute((2, 1))(layers.Conv1D(5, 1, name="c")(inputs))
    scores = keras.ops.softmax(keras.ops.matmul(rows, keras.ops.transpose(rows, (0, 2, 1))))
    back = layers.Permute((2, 1))(keras.ops.matmul(scores, rows))
    model = keras.Model(inputs, head()(layers.Flatten()(back)))
    with pytest.raises(PlanError, match="'f/kernel'"):
        load(model, saved(tmp_path, C1, F), mapping={"c": "c", "f": "f"})


def test_features_that_become_an_image_by_way_of_pytorchs_order(tmp_path):
    """Checks the same before a convolution: PyTorch's model may reshape to channels first."""
    weight = {"g.weight": RNG.normal(size=(72, 7))}

    def call(m, x):
        made = tf.reshape(m.g(x), (-1, 24, 3))  # positions and channels, as Keras has them
        rows = tf.transpose(made, (0, 2, 1))
        scores = tf.nn.softmax(tf.matmul(rows, rows, transpose_b=True))
        mixed = tf.transpose(tf.matmul(scores, rows), (0, 2, 1))
        return m.c(mixed)

    model = Model(call, g=head(72, "g"), c=layers.Conv1D(5, 1, name="c"))
    model(RNG.normal(size=(2, 7)).astype("float32"))
    with pytest.raises(PlanError, match="'g/kernel'"):
        load(model, saved(tmp_path, C1, weight), mapping={"c": "c", "g": "g"})
