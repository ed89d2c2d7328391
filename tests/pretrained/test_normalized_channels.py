"""Normalizations between an image and `Flatten`: which order PyTorch flattens, or an error."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved, sequential
from stack_marks import IS_KERAS_2, needs_keras3

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 8, 3))
CONV = {"c.weight": RNG.normal(size=(5, 3, 1)), "c.bias": RNG.normal(size=5)}
LINEAR = {"f.weight": RNG.normal(size=(4, 40)), "f.bias": RNG.normal(size=4)}


class Positions(layers.Layer):
    """A custom layer with a weight for each position."""

    def build(self, shape):
        self.table = self.add_weight(name="table", shape=shape[1:])

    def call(self, x):
        return x + self.table


class Norm(layers.Layer):
    """A custom layer that contains a normalization of the batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.n = layers.BatchNormalization(name="n", epsilon=1e-5)

    def build(self, shape):
        self.n.build(shape)
        self.built = True

    def call(self, x):
        return self.n(x)


class ConvBlock(Norm):
    """A custom layer that contains a convolution."""

    def __init__(self, **kwargs):
        layers.Layer.__init__(self, **kwargs)
        self.n = layers.Conv1D(5, 1, name="n")


def convolved():
    """Returns PyTorch's Conv1d of width 1, [examples, channels, length]."""
    return np.einsum("nti,oi->not", X, CONV["c.weight"][:, :, 0]) + CONV["c.bias"][:, None]


def classifier(*between, activation=None):
    return sequential(
        *(keras.Input((8, 3)), layers.Conv1D(5, 1, activation=activation, name="c"), *between),
        *(layers.Flatten(), layers.Dense(4, name="f")),
    )


def decoder(*between):
    return sequential(
        *(keras.Input((4,)), layers.Dense(40, name="f"), layers.Reshape((8, 5)), *between),
        layers.Conv1D(3, 1, name="c"),
    )


VECTORS = {"n.weight": RNG.normal(size=5), "n.bias": RNG.normal(size=5)}
NAMES = {
    "layer": (lambda: layers.LayerNormalization(name="n"), VECTORS, "'n' normalizes some axes of"),
    "softmax": (lambda: layers.Softmax(name="n"), {}, "'n' has a softmax over the channels of an"),
    "activation": (lambda: layers.Activation("softmax", name="n"), {}, "'n' has a softmax over"),
    "positions": (
        lambda: Positions(name="n"),
        {"n.table": RNG.normal(size=(8, 5))},
        " has weights for the positions of an image of (8, 5)",
    ),
}
BOTH = [(name, make) for name in NAMES for make in (classifier, decoder)]


def mapping_of(tensors):
    mapping = {"c": "c", "f": "f"}
    if "n.table" in tensors:
        mapping["n/table"] = Key("n.table", transposed=False)
    elif tensors:
        mapping["n"] = "n"
    return mapping


@pytest.mark.parametrize(("name", "make"), BOTH, ids=[f"{n}-{m.__name__}" for n, m in BOTH])
def test_the_order_of_normalized_channels_is_unknown(name, make, tmp_path):
    layer, tensors, message = NAMES[name]
    if make is classifier:
        saved(tmp_path, CONV, LINEAR, tensors)
    else:
        point = {"c.weight": RNG.normal(size=(3, 5, 1)), "c.bias": RNG.normal(size=3)}
        saved(tmp_path, point, tensors, {"f.weight": LINEAR["f.weight"].T, "f.bias": np.ones(40)})
    with pytest.raises(PlanError) as caught:
        load(make(layer()), tmp_path, mapping=mapping_of(tensors))
    assert "'f/kernel': " in str(caught.value)
    assert message in str(caught.value)


class Vector(layers.Layer):
    """A custom layer with a weight for each channel, or for each step."""

    def __init__(self, form):
        super().__init__(name="n")
        self.form = form

    def build(self, shape):
        sizes = (shape[1], 1) if self.form == "steps" else (shape[-1],)
        self.w = self.add_weight(name="w", shape=sizes)

    def call(self, x):
        if self.form != "moments":
            return x * self.w
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        return (x - mean) * (tf.math.rsqrt(variance + 1e-5) * self.w)


@pytest.mark.parametrize("form", ["scale", "steps", "moments"])
def test_a_custom_layer_on_channels_or_steps(form, tmp_path):
    """Checks a PyTorch model that has the channels last for the layer, and flattens them last."""
    w = RNG.normal(size=(8, 1) if form == "steps" else 5)
    saved(tmp_path, CONV, LINEAR, {"w": w})
    mapping = {"c": "c", "f": "f", "n/w": Key("w", transposed=False)}
    model = classifier(Vector(form))
    with pytest.raises(PlanError, match="'f/kernel': .*(has weights for|several orders of axes)"):
        load(model, tmp_path, mapping=mapping)
    load(model, tmp_path, mapping={**mapping, "f": Key("f", flattened=())})
    last = convolved().swapaxes(1, 2)
    rows = standardized(last, -1) * w if form == "moments" else last * w
    expected = rows.reshape(2, -1) @ LINEAR["f.weight"].T + LINEAR["f.bias"]
    np.testing.assert_allclose(model(X.astype("float32")), expected, rtol=1e-4, atol=1e-4)


def test_an_image_with_a_weight_for_each_channel(tmp_path):
    """PyTorch may make the image with the channels last, for the custom layer."""
    model = sequential(
        *(keras.Input((4,)), layers.Dense(30, use_bias=False, name="f"), layers.Reshape((2, 3, 5))),
        *(Vector("scale"), layers.Conv2D(3, 1, use_bias=False, name="c")),
    )
    k, w, table = RNG.normal(size=(3, 5, 1, 1)), RNG.normal(size=5), RNG.normal(size=(30, 4))
    saved(tmp_path, {"c.weight": k, "w": w, "f.weight": table})
    mapping = {"c": "c", "f": "f", "n/w": Key("w", transposed=False)}
    with pytest.raises(PlanError, match="'f/kernel': .* has weights for the channels of an image"):
        load(model, tmp_path, mapping=mapping)
    load(model, tmp_path, mapping={**mapping, "f": Key("f", unflattened=())})
    x = RNG.normal(size=(2, 4)).astype("float32")
    image = (x @ table.T).reshape(2, 2, 3, 5) * w
    np.testing.assert_allclose(model(x), image @ k[:, :, 0, 0].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", [classifier, decoder])
def test_a_normalization_of_all_axes(make, tmp_path):
    """PyTorch's LayerNorm has the shape of its input, with the channels first or last."""
    model = make(layers.LayerNormalization((1, 2), epsilon=1e-5, center=False, name="n"))
    scale = RNG.normal(size=(8, 5))
    mapping = {"c": "c", "f": "f", "n": Key("n", transposed=False)}
    point, table = RNG.normal(size=(3, 5, 1)), RNG.normal(size=(40, 4))
    if make is classifier:
        saved(tmp_path, CONV, LINEAR, {"n.weight": scale})
    else:
        ends = {"c.weight": point, "c.bias": np.ones(3), "f.bias": np.ones(40), "f.weight": table}
        saved(tmp_path, ends, {"n.weight": scale})
    with pytest.raises(PlanError, match="'f/kernel': 'n' has weights for the positions of an"):
        load(model, tmp_path, mapping=mapping)
    options = {"flattened": ()} if make is classifier else {"unflattened": ()}
    load(model, tmp_path, mapping={**mapping, "f": Key("f", **options)})
    if make is classifier:
        rows = (standardized(convolved().swapaxes(1, 2), (1, 2)) * scale).reshape(2, 40)
        x, expected = X, rows @ LINEAR["f.weight"].T + LINEAR["f.bias"]
    else:
        x = RNG.normal(size=(2, 4))
        steps = standardized((x @ table.T + 1).reshape(2, 8, 5), (1, 2)) * scale
        expected = steps @ point[:, :, 0].T + 1
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not IS_KERAS_2, reason="Keras 3 normalizes one axis")
def test_batch_normalization_of_several_axes(tmp_path):
    model = classifier(layers.BatchNormalization((1, 2), center=False, name="n"))
    tables = {f"n.{name}": np.ones((1, 8, 5)) for name in ("weight", "running_mean", "running_var")}
    saved(tmp_path, CONV, LINEAR, tables)
    with pytest.raises(PlanError, match="'n/gamma' .* does not know PyTorch's order of axes"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=()), "n": "n"})


@needs_keras3("RMSNormalization")
def test_the_order_of_root_mean_squares_is_unknown(tmp_path):
    model = classifier(layers.RMSNormalization(name="n"))
    saved(tmp_path, CONV, LINEAR, {"n.weight": VECTORS["n.weight"]})
    with pytest.raises(PlanError, match="'f/kernel': 'n' normalizes some axes of an image of"):
        load(model, tmp_path, mapping={"c": "c", "f": "f", "n": "n"})


def softmax(x, axis):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


@pytest.mark.parametrize("flattened", [(5, 8), ()])
def test_the_mapping_says_the_order(flattened, tmp_path):
    """Checks both models of PyTorch, with a softmax in the convolution layer."""
    model = classifier(activation="softmax")
    saved(tmp_path, CONV, LINEAR)
    with pytest.raises(PlanError, match="'f/kernel': 'c' has a softmax over the channels of an im"):
        load(model, tmp_path, mapping={"c": "c", "f": "f"})
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=flattened)})
    image = softmax(convolved(), 1)
    rows = (image if flattened else image.swapaxes(1, 2)).reshape(2, -1)
    expected = rows @ LINEAR["f.weight"].T + LINEAR["f.bias"]
    np.testing.assert_allclose(model(X.astype("float32")), expected, rtol=1e-4, atol=1e-4)


def standardized(x, axes):
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + 1e-5)


def batch_norm(x):
    scale = VECTORS["n.weight"] / np.sqrt(RUNNING["n.running_var"] + 1e-5)
    shift = VECTORS["n.bias"] - RUNNING["n.running_mean"] * scale
    return x * scale[:, None] + shift[:, None]


def group_norm(x):
    return standardized(x, 2) * VECTORS["n.weight"][:, None] + VECTORS["n.bias"][:, None]


def two_convolutions(x):
    return np.einsum("nit,oi->not", x, SQUARE["n.weight"][:, :, 0]) + SQUARE["n.bias"][:, None]


RUNNING = {"n.running_mean": RNG.normal(size=5), "n.running_var": RNG.uniform(0.5, 2, 5)}
SQUARE = {"n.weight": RNG.normal(size=(5, 5, 1)), "n.bias": RNG.normal(size=5)}
KNOWN = {
    "batch": (
        lambda: layers.BatchNormalization(name="n", epsilon=1e-5),
        {**VECTORS, **RUNNING},
        batch_norm,
    ),
    "custom batch": (lambda: Norm(name="b"), {**VECTORS, **RUNNING}, batch_norm),
    "custom convolution": (lambda: ConvBlock(name="b"), SQUARE, two_convolutions),
    "group": (
        lambda: layers.GroupNormalization(5, epsilon=1e-5, name="n"),
        VECTORS,
        group_norm,
    ),
    "length": (
        lambda: layers.LayerNormalization(1, center=False, scale=False, epsilon=1e-5, name="n"),
        {},
        lambda x: standardized(x, 2),
    ),
    "image": (
        lambda: layers.LayerNormalization((1, 2), center=False, scale=False, epsilon=1e-5),
        {},
        lambda x: standardized(x, (1, 2)),
    ),
    "softmax over length": (lambda: layers.Softmax(1), {}, lambda x: softmax(x, 2)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_normalizations_with_channels_first_in_torch(name, tmp_path):
    layer, tensors, formula = KNOWN[name]
    model = classifier(layer())
    load(model, saved(tmp_path, CONV, LINEAR, tensors), mapping=mapping_of(tensors))
    rows = formula(convolved()).reshape(2, -1)
    expected = rows @ LINEAR["f.weight"].T + LINEAR["f.bias"]
    got = model(X.astype("float32"), training=False)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_a_sum_with_normalized_channels_is_unknown(tmp_path):
    image = layers.Conv1D(5, 1, name="c")(x := keras.Input((8, 3)))
    image = layers.Add()([image, layers.LayerNormalization(name="n")(image)])
    model = keras.Model(x, layers.Dense(4, name="f")(layers.Flatten()(image)))
    saved(tmp_path, CONV, LINEAR, VECTORS)
    with pytest.raises(PlanError, match="'f/kernel': 'n' normalizes some axes of an image of"):
        load(model, tmp_path, mapping={"c": "c", "f": "f", "n": "n"})


def sequence_classifier(*between):
    return sequential(
        *(keras.Input((8,)), layers.Embedding(9, 5, name="e"), *between, layers.Flatten()),
        layers.Dense(4, name="f"),
    )


@pytest.mark.parametrize("name", ["batch", "custom batch", "group"])
@pytest.mark.parametrize("flattened", [(5, 8), ()])
def test_a_sequence_whose_channels_torch_has_first(name, flattened, tmp_path):
    """Checks `BatchNorm1d`, for which PyTorch's model transposes a sequence."""
    layer, tensors, formula = KNOWN[name]
    table, ids = RNG.normal(size=(9, 5)), RNG.integers(0, 9, (2, 8))
    model = sequence_classifier(layer())
    saved(tmp_path, {"e.weight": table}, LINEAR, tensors)
    mapping = {"e": "e", "f": "f", "n": "n"}
    with pytest.raises(PlanError, match="'f/kernel': '[nb]' normalizes the channels of a sequence"):
        load(model, tmp_path, mapping=mapping)
    load(model, tmp_path, mapping={**mapping, "f": Key("f", flattened=flattened)})
    image = formula(table[ids].swapaxes(1, 2))
    rows = (image if flattened else image.swapaxes(1, 2)).reshape(2, -1)
    expected = rows @ LINEAR["f.weight"].T + LINEAR["f.bias"]
    np.testing.assert_allclose(model(ids, training=False), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_that_needs_the_channels_last_again(tmp_path):
    """Checks `Dense` after the normalization, whose inputs PyTorch has as a sequence."""
    layer, tensors, formula = KNOWN["batch"]
    table, matrix, ids = RNG.normal(size=(9, 5)), RNG.normal(size=(5, 5)), np.array([[1, 2] * 4])
    model = sequence_classifier(layer(), layers.Dense(5, use_bias=False, name="d"))
    saved(tmp_path, {"e.weight": table, "d.weight": matrix}, LINEAR, tensors)
    load(model, tmp_path, mapping={"e": "e", "f": "f", "n": "n", "d": "d"})
    rows = formula(table[ids].swapaxes(1, 2)).swapaxes(1, 2) @ matrix.T
    expected = rows.reshape(1, -1) @ LINEAR["f.weight"].T + LINEAR["f.bias"]
    np.testing.assert_allclose(model(ids, training=False), expected, rtol=1e-4, atol=1e-4)


def test_a_function_that_flattens_normalized_channels(tmp_path):
    flatten = layers.Lambda(lambda x: tf.reshape(x, (-1, 40)), output_shape=(40,))
    model = sequential(
        *(keras.Input((8, 3)), layers.Conv1D(5, 1, name="c"), layers.LayerNormalization(name="n")),
        *(flatten, layers.Dense(4, name="f")),
    )
    saved(tmp_path, CONV, LINEAR, VECTORS)
    with pytest.raises(PlanError, match="'f/kernel': 'n' normalizes some axes of an image of"):
        load(model, tmp_path, mapping={"c": "c", "f": "f", "n": "n"})
