"""Operations of TensorFlow between the layers of a traced call, on an image that is flattened.

The expected outputs are PyTorch's formulas in NumPy, with the channels on the first axis.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from stack_marks import needs_keras3
from traced_images import ROWS, C, F, G, Model, X, check, conv, flat, head, image, point

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def on_image(function, shape):
    """Returns a model with a function between a convolution and a flattened image."""
    return keras.Sequential(
        [keras.Input((4, 6, 3)), conv(), layers.Lambda(function, shape), layers.Flatten(), head()]
    )


def before_image(function, shape):
    """Returns a model with a function between an image of features and a convolution."""
    point = layers.Conv2D(5, 1, name="c")
    reshape = layers.Reshape((4, 6, 3))
    model = [keras.Input((7,)), head(72, "g"), reshape, layers.Lambda(function, shape), point]
    return keras.Sequential(model)


# A function on Keras's image, its result's shape, and the same function on PyTorch's image.
FUNCTIONS = {
    "a row": (lambda x: x[:, 0], (6, 5), lambda x: x[:, :, 0]),
    "a part": (lambda x: x[:, 1:, ::2], (3, 3, 5), lambda x: x[:, :, 1:, ::2]),
    "some channels": (lambda x: x[..., :2], (4, 6, 2), lambda x: x[:, :2]),
    "a channel": (lambda x: x[..., 1], (4, 6), lambda x: x[:, 1]),
    "a new axis": (lambda x: x[:, None], (1, 4, 6, 5), lambda x: x),
    "a mean of rows": (lambda x: tf.reduce_mean(x, 1), (6, 5), lambda x: x.mean(2)),
    "a maximum of channels": (
        lambda x: tf.reduce_max(x, -1, keepdims=True),
        (4, 6, 1),
        lambda x: x.max(1),
    ),
    "a border": (
        lambda x: tf.pad(x, ((0, 0), (1, 0), (0, 2), (0, 0))),
        (5, 8, 5),
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 0), (0, 2))),
    ),
    "tiles": (lambda x: tf.tile(x, (1, 1, 1, 2)), (4, 6, 10), lambda x: np.tile(x, (1, 2, 1, 1))),
    "running sums": (lambda x: tf.cumsum(x, 2), (4, 6, 5), lambda x: x.cumsum(3)),
    "rolled rows": (lambda x: tf.roll(x, 1, 1), (4, 6, 5), lambda x: np.roll(x, 1, 2)),
    "PyTorch's axes": (lambda x: tf.transpose(x, (0, 3, 1, 2)), (5, 4, 6), lambda x: x),
    "a gate": (
        lambda x: x[..., :2] * tf.sigmoid(x[..., 2:4]),
        (4, 6, 2),
        lambda x: x[:, :2] / (1 + np.exp(-x[:, 2:4])),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_on_an_image(name, tmp_path):
    function, shape, in_numpy = FUNCTIONS[name]
    weight = {"f.weight": RNG.normal(size=(4, int(np.prod(shape))))}
    expected = flat(in_numpy(image())) @ weight["f.weight"].T
    check(on_image(function, shape), expected, tmp_path, C, weight)


@pytest.mark.parametrize("name", ["a part", "a border", "running sums", "rolled rows"])
def test_a_function_on_features_that_become_an_image(name, tmp_path):
    function, shape, in_numpy = FUNCTIONS[name]
    made = (ROWS @ G["g.weight"].T).reshape(2, 3, 4, 6)
    expected = np.moveaxis(point(in_numpy(made)), 1, -1)
    check(before_image(function, (*shape[:2], 3)), expected, tmp_path, C, G, x=ROWS)


# Functions that keep the order of flattened features.
ON_FEATURES = {
    "gelu": lambda x: keras.activations.gelu(x),
    "swish": lambda x: tf.nn.swish(x),
    "where": lambda x: tf.where(x > 0.5, x, tf.zeros_like(x)),
    "normalized": lambda x: tf.math.l2_normalize(x, -1),
    "checked": lambda x: tf.debugging.check_numerics(tf.ensure_shape(x, (None, 120)), "x"),
}


@pytest.mark.parametrize("name", ON_FEATURES)
def test_a_function_on_features(name, tmp_path):
    function = ON_FEATURES[name]
    model = Model(lambda m, x: m.f(function(tf.reshape(m.c(x), (-1, 120)))), c=conv(), f=head())
    rows = function(tf.constant(flat(image()))).numpy()
    check(model, rows @ F["f.weight"].T, tmp_path, C, F)


def test_a_gate_of_channels(tmp_path):
    """Checks squeeze and excitation, whose mean keeps the axes of positions."""
    squeeze = {"s.weight": RNG.normal(size=(5, 5))}

    def call(m, x):
        h = m.c(x)
        h = h * m.s(tf.reduce_mean(h, (1, 2), keepdims=True))
        return m.f(tf.reshape(h, (-1, 120)))

    model = Model(call, c=conv(), s=head(5, "s"), f=head())
    gate = image().mean((2, 3)) @ squeeze["s.weight"].T
    check(model, flat(image() * gate[:, :, None, None]) @ F["f.weight"].T, tmp_path, C, squeeze, F)


def test_a_table_of_positions(tmp_path):
    """Checks tokens of an image with an `Embedding` of their numbers, and a mean of the tokens."""
    table = {"p.weight": RNG.normal(size=(24, 5))}
    weight = {"f.weight": RNG.normal(size=(4, 5))}

    def call(m, x):
        tokens = tf.reshape(m.c(x), (-1, 24, 5)) + m.p(tf.range(24))
        return m.f(tf.reduce_mean(tokens, 1))

    model = Model(call, c=conv(), p=layers.Embedding(24, 5, name="p"), f=head())
    tokens = np.moveaxis(image(), 1, -1).reshape(2, 24, 5) + table["p.weight"]
    check(model, tokens.mean(1) @ weight["f.weight"].T, tmp_path, C, table, weight)


def test_a_slice_of_examples_from_an_image_is_refused(tmp_path):
    """Checks that an image whose rows become the first axis keeps its unknown order."""

    def call(m, x):
        rows = tf.transpose(m.c(x), (1, 0, 2, 3))  # [height, examples, width, channels]
        return m.f(tf.reshape(rows[0], (-1, 30)))

    model = Model(call, c=conv(), f=head())
    model(X)
    file = saved(tmp_path, C, {"f.weight": np.zeros((4, 30))})
    with pytest.raises(PlanError, match="moves the axis of the examples"):
        load(model, file, mapping={"c": "c", "f": "f"})


def test_a_layer_on_constants(tmp_path):
    """Checks a bias of channels that a `Dense` layer computes from numbers."""
    weight = {"g.weight": RNG.normal(size=(5, 3))}

    def call(m, x):
        return m.f(tf.reshape(m.c(x) + m.g(tf.ones((1, 3))), (-1, 120)))

    model = Model(call, c=conv(), g=head(5, "g"), f=head())
    bias = weight["g.weight"].sum(1)[:, None, None]
    check(model, flat(image() + bias) @ F["f.weight"].T, tmp_path, C, weight, F)


class TorchFlatten(layers.Flatten):
    """A `Flatten` that has PyTorch's order."""

    def call(self, x):
        return super().call(tf.transpose(x, (0, 3, 1, 2)))


class FlatPooling(layers.MaxPooling2D):
    """A pooling that also flattens."""

    def call(self, x):
        return tf.reshape(super().call(x), (-1, 30))

    def compute_output_shape(self, shape):
        return (shape[0], 30)


class FlatConvolution(layers.Conv2D):
    """A convolution that also flattens."""

    def call(self, x):
        return tf.reshape(super().call(x), (-1, 120))

    def compute_output_shape(self, shape):
        return (shape[0], 120)


@pytest.mark.parametrize("is_functional", [True, False])
@pytest.mark.parametrize(
    "kind",
    [
        TorchFlatten,
        FlatPooling,
        pytest.param(FlatConvolution, marks=needs_keras3("convolution that may flatten")),
    ],
)
def test_a_subclass_of_a_layer_of_keras(kind, is_functional, tmp_path):
    first, middle = conv(), layers.Dropout(0.5)
    rows = image()
    if kind is FlatConvolution:
        first = FlatConvolution(5, 1, name="c")
    else:
        middle = kind(2) if kind is FlatPooling else kind()
    if kind is FlatPooling:
        rows = rows.reshape(2, 5, 2, 2, 3, 2).max((3, 5))
    weight = {"f.weight": RNG.normal(size=(4, flat(rows).shape[1]))}
    model = Model(lambda m, x: m.f(m.m(m.c(x))), c=first, m=middle, f=head())
    if is_functional:
        inputs = keras.Input((4, 6, 3))
        model = keras.Model(inputs, head()(middle(first(inputs))))
    check(model, flat(rows) @ weight["f.weight"].T, tmp_path, C, weight)


@pytest.mark.parametrize("is_functional", [True, False])
def test_one_image_for_each_step(is_functional, tmp_path):
    """Checks outputs of a `Dense` layer for steps, each of which becomes an image of its own."""
    steps = RNG.normal(size=(2, 3, 7)).astype("float32")
    images = layers.Lambda(lambda y: tf.reshape(y, (-1, 4, 6, 3)), output_shape=(4, 6, 3))
    model = Model(lambda m, x: m.c(images(m.g(x))), g=head(72, "g"), c=conv())
    if is_functional:
        inputs = keras.Input((3, 7))
        model = keras.Model(inputs, conv()(images(head(72, "g")(inputs))))
    expected = np.moveaxis(point((steps @ G["g.weight"].T).reshape(6, 3, 4, 6)), 1, -1)
    check(model, expected, tmp_path, C, G, x=steps)


class Gated(layers.Layer):
    """A custom layer with two inputs, which have as many features."""

    def __init__(self):
        super().__init__()
        self.g, self.f = head(120, "g"), head()

    def build(self, *shapes):
        self.g.build((None, 7))
        self.f.build((None, 120))
        self.built = True

    def call(self, inputs):
        image, other = inputs
        return self.f(tf.reshape(image, (-1, 120)) * self.g(other))

    def compute_output_shape(self, shapes):
        return (shapes[0][0], 4)


def test_a_custom_layer_with_two_inputs(tmp_path):
    inputs, other = keras.Input((4, 6, 3)), keras.Input((7,))
    model = keras.Model([inputs, other], Gated()([conv()(inputs), other]))
    saved(tmp_path, {"g.weight": RNG.normal(size=(120, 7))})
    with pytest.raises(PlanError, match="g/kernel': .* combines the outputs with flattened"):
        load(model, tmp_path, mapping={"(.*/)?g": "g"}, allow_missing=".*")


def test_none_among_the_inputs(tmp_path):
    """Checks a list of inputs with None, which has no shape."""

    def call(m, inputs):
        return m.f(tf.reshape(m.c(inputs[0]), (-1, 120)))

    model = Model(call, c=conv(), f=head())
    model([X, None])
    saved(tmp_path, C, F)
    mapping = {"c": "c", "f": Key("f", flattened=(5, 4, 6))}
    load(model, tmp_path, mapping=mapping)
    expected = flat(image()) @ F["f.weight"].T
    np.testing.assert_allclose(model([X, None]), expected, rtol=1e-4, atol=1e-4)
