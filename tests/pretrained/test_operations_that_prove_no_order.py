"""Operations of traced calls that prove no order of a flattened image: loading is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import IS_KERAS_2
from traced_images import ROWS, Model, X, conv, head

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


class Weighted(keras.Model):
    """A model with a weight of its own."""

    def __init__(self, function, shape, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)
        self.w = self.add_weight(shape=shape, name="w")

    def call(self, x):
        return self.function(self, x, tf.convert_to_tensor(self.w))


class CellOfRows(layers.Layer):
    """A recurrent cell that flattens its step."""

    def __init__(self):
        super().__init__()
        self.f = head()
        self.state_size = self.output_size = 4

    def build(self, shape):
        with tf.name_scope(self.f.name):
            self.f.build((None, 30))
        self.built = True

    def call(self, x, states, training=None):
        y = self.f(tf.reshape(x, (-1, 30))) + states[0]
        return y, [y]


def patches(m, x):
    sizes = [1, 3, 3, 1]
    found = tf.image.extract_patches(m.c(x), sizes, [1] * 4, [1] * 4, "SAME")
    return tf.reduce_mean(m.f(found), (1, 2))


def gated_in_a_loop(m, x):
    """Makes a gate of as many entries as the image has, in a call that cannot be traced."""
    _, gate = tf.while_loop(
        lambda i, _: i < 1, lambda i, _: (i + 1, m.g(x[:, 0, 0])), (0, tf.zeros((len(x), 120)))
    )
    return m.f(tf.reshape(m.c(x), (-1, 120)) * gate)


def of_varying_size(*between):
    inputs = keras.Input((None, None, 3))
    outputs = conv()(inputs)
    for each in between:
        outputs = each(outputs)
    return keras.Model(inputs, head()(outputs))


def steps_from_one_layer():
    inputs = keras.Input((7,))
    reshape = layers.Lambda(lambda y: tf.reshape(y, (-1, 4, 6, 3)), output_shape=(4, 6, 3))
    return keras.Model(inputs, conv()(reshape(head(216)(inputs))))


def pooled_sequence():
    pool = layers.MaxPooling1D(2)
    return Model(
        lambda m, x: m.f(tf.reshape(tf.nn.max_pool1d(m.e(x), 2, 2, "VALID"), (-1, 30))),
        e=layers.Embedding(9, 5),
        pool=pool,
        f=head(),
    )


# A model, its inputs, and the name of a weight whose order is not known.
REFUSED = {
    "pixels from channels": (
        lambda: Model(
            lambda m, x: tf.nn.depth_to_space(m.f(x), 2), f=layers.Conv2D(12, 1, name="f")
        ),
        X,
        "f/kernel",
    ),
    "patches of all positions": (lambda: Model(patches, c=conv(), f=head()), X, "f/kernel"),
    "a reshaped matrix": (
        lambda: Weighted(
            lambda m, x, w: tf.einsum("bhwc,hwco->bo", m.c(x), tf.reshape(w, (4, 6, 5, 4))),
            (120, 4),
            c=conv(),
        ),
        X,
        "w",
    ),
    "a reshaped vector": (
        lambda: Weighted(
            lambda m, x, w: m.f(tf.reshape(m.c(x) * tf.reshape(w, (4, 6, 5)), (-1, 120))),
            (120,),
            c=conv(),
            f=head(),
        ),
        X,
        "w",
    ),
    "an image from a vector": (
        lambda: Weighted(
            lambda m, x, w: m.c(tf.reshape(w, (1, 4, 6, 3)) * m.f(x)[:, None, None]),
            (72,),
            c=conv(),
            f=head(3),
        ),
        ROWS,
        "w",
    ),
    "a matrix on rows": (
        lambda: Weighted(lambda m, x, w: tf.reshape(m.c(x), (-1, 4, 30)) @ w, (30, 4), c=conv()),
        X,
        "w",
    ),
    "a cell that flattens": (
        lambda: Model(lambda m, x: m.r(m.c(x)), c=conv(), r=layers.RNN(CellOfRows())),
        X,
        "f/kernel",
    ),
    "a call that cannot be traced": (
        lambda: Model(gated_in_a_loop, c=conv(), g=head(120, "g"), f=head()),
        X,
        "f/kernel",
    ),
    "pooling of a sequence": (pooled_sequence, np.ones((2, 12), "int32"), "f/kernel"),
    "a size that varies": (lambda: of_varying_size(layers.Reshape((120,))), X, "f/kernel"),
    "a function on a size that varies": (
        lambda: of_varying_size(layers.Lambda(lambda y: tf.reshape(y, (-1, 120)), (120,))),
        X,
        "f/kernel",
    ),
    "all steps from one layer": (steps_from_one_layer, ROWS, "f/kernel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_operation_that_does_not_prove_the_order(name, tmp_path):
    make, x, path = REFUSED[name]
    model = make()
    model(x)
    (weight,) = (v for v in model.weights if f"/{path_of(v)}".endswith(f"/{path}"))
    shape = tuple(weight.shape)
    tensor = RNG.normal(size=(*shape[:-3:-1], *shape[:-2]))
    key = Key("f.weight", transposed=True if path == "w" and len(shape) > 1 else None)
    with pytest.raises(PlanError, match=f"{path}': .*PyTorch flattens channels first"):
        load(
            model,
            saved(tmp_path, {"f.weight": tensor}),
            mapping={f"(.*/)?{path}": key},
            allow_missing=".*",
        )


def path_of(variable):
    return variable.name.partition(":")[0] if IS_KERAS_2 else variable.path
