"""Axes that a model divides, exchanges and merges again, followed to the layers with weights.

The expected outputs are PyTorch's formulas in NumPy, with the channels of images on the first axis.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved
from traced_images import C, Model, X, check, conv, dense_layers, flat, head, image, linear

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def test_shuffled_channels(tmp_path):
    """Checks groups of channels that are exchanged, as in ShuffleNet, before another layer."""
    made, weights = dense_layers(f=(4, 6))
    weights |= {"c.weight": RNG.normal(size=(6, 3, 1, 1)), "c.bias": RNG.normal(size=6)}

    def call(m, x):
        groups = tf.reshape(m.c(x), (-1, 4, 6, 2, 3))
        shuffled = tf.reshape(tf.transpose(groups, (0, 1, 2, 4, 3)), (-1, 4, 6, 6))
        return m.f(tf.reduce_mean(shuffled, (1, 2)))

    convolved = np.einsum("nhwi,oi->nohw", X, weights["c.weight"][:, :, 0, 0])
    convolved = convolved + weights["c.bias"][:, None, None]
    shuffled = convolved.reshape(2, 2, 3, 4, 6).swapaxes(1, 2).reshape(2, 6, 4, 6)
    expected = linear("f", shuffled.mean((2, 3)), weights)
    model = Model(call, c=layers.Conv2D(6, 1, name="c"), **made)
    check(model, expected, tmp_path, weights)


def test_windows_of_an_image(tmp_path):
    """Checks windows that become examples, as in a Swin transformer, and are joined again."""
    made, weights = dense_layers(d=(6, 5), f=(4, 6))
    norm = {"n.weight": RNG.normal(size=5), "n.bias": RNG.normal(size=5)}

    def call(m, x):
        h = m.n(m.c(x))
        windows = tf.transpose(tf.reshape(h, (-1, 2, 2, 3, 2, 5)), (0, 1, 3, 2, 4, 5))
        rows = m.d(tf.reshape(windows, (-1, 4, 5)))
        rows = rows - tf.reduce_mean(rows, 1, keepdims=True)
        windows = tf.reshape(rows, (-1, 2, 3, 2, 2, 6))
        joined = tf.reshape(tf.transpose(windows, (0, 1, 3, 2, 4, 5)), (-1, 4, 6, 6))
        return m.f(tf.reduce_max(joined, (1, 2)))

    h = np.moveaxis(image(), 1, -1)
    h = (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + 1e-3)
    h = h * norm["n.weight"] + norm["n.bias"]
    windows = h.reshape(2, 2, 2, 3, 2, 5).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 4, 5)
    rows = linear("d", windows, weights)
    rows = (rows - rows.mean(1, keepdims=True)).reshape(2, 2, 3, 2, 2, 6)
    expected = linear("f", rows.max((1, 2, 3, 4)), weights)
    model = Model(call, c=conv(), n=layers.LayerNormalization(name="n"), **made)
    check(model, expected, tmp_path, C, norm, weights)


def test_halves_of_an_image(tmp_path):
    """Checks channels that are divided into halves, one of which gates the other."""
    weight = {"f.weight": RNG.normal(size=(4, 48))}
    both = {"c.weight": RNG.normal(size=(4, 3, 1, 1)), "c.bias": RNG.normal(size=4)}

    def call(m, x):
        first, second = tf.split(m.c(x), 2, axis=-1)
        return m.f(tf.reshape(first * tf.sigmoid(second), (-1, 48)))

    convolved = np.einsum("nhwi,oi->nohw", X, both["c.weight"][:, :, 0, 0])
    convolved = convolved + both["c.bias"][:, None, None]
    gated = convolved[:, :2] / (1 + np.exp(-convolved[:, 2:]))
    expected = linear("f", gated.reshape(2, -1), weight)
    check(Model(call, c=layers.Conv2D(4, 1, name="c"), f=head()), expected, tmp_path, both, weight)


# Functions on an image that Keras and PyTorch would write alike, although their results differ.
REFUSED = {
    "patches": lambda x: tf.image.extract_patches(
        x, (1, 2, 2, 1), (1, 2, 2, 1), (1, 1, 1, 1), "VALID"
    ),
    "rows of channels": lambda x: tf.reduce_mean(tf.reshape(x, (-1, 4, 30)), 2),
    "outer product": lambda x: (
        tf.reduce_mean(x, (2, 3))[:, :, None] * tf.reduce_mean(x, (1, 2))[:, None, :]
    ),
    "repeated features": lambda x: tf.repeat(tf.reduce_mean(x, (1, 2))[:, None], 7, 1),
    "features that are stacked": lambda x: tf.stack(
        tf.unstack(tf.reshape(x, (-1, 120)), axis=1), axis=1
    ),
    "steps that are stacked": lambda x: tf.stack(tf.unstack(x, axis=1), axis=1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_functions_whose_result_pytorch_may_have_in_another_order(name, tmp_path):
    function = REFUSED[name]
    model = Model(lambda m, x: m.f(layers.Flatten()(function(m.c(x)))), c=conv(), f=head())
    model(X)
    kernel = model.f.kernel
    file = saved(tmp_path, C, {"f.weight": RNG.normal(size=tuple(kernel.shape)[::-1])})
    mapping = {"c": "c", "f": "f"}
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping=mapping)
    load(model, file, mapping={**mapping, "f": Key("f", flattened=())})


# Layers on a sequence after which the order of steps and channels is not Keras's for certain.
ON_SEQUENCES = {
    "normalized steps": lambda: layers.LayerNormalization(axis=1, name="n"),
    "products along steps": lambda: layers.EinsumDense("btc,ts->bsc", (7, 5), name="n"),
}


@pytest.mark.parametrize("name", ON_SEQUENCES)
def test_layers_on_the_steps_of_a_sequence(name, tmp_path):
    inputs = keras.Input((7, 3))
    rows = head(5, "d")(inputs)
    outputs = head()(layers.Flatten()(ON_SEQUENCES[name]()(rows)))
    model = keras.Model(inputs, outputs)
    shapes = {"d.weight": (5, 3), "f.weight": (4, 35)}
    file = saved(tmp_path, {key: RNG.normal(size=shape) for key, shape in shapes.items()})
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping={"d": "d", "f": "f"}, allow_missing="n/.*")


def prelu_of_steps():
    return [keras.Input((6, 2)), head(4, "d"), layers.PReLU(shared_axes=[1])], (4, 24)


def table_of_pixels():
    inputs = keras.Input((4, 3, 2), dtype="int32")
    return [inputs, layers.Embedding(7, 5, name="d")], (4, 120)


def groups_of_joined_features():
    inputs = keras.Input((4, 6, 3))
    flat = layers.Flatten()(layers.Conv2D(2, 1, name="d", use_bias=False)(inputs))
    both = layers.Concatenate()([flat, layers.GlobalAveragePooling2D()(inputs)])
    groups = layers.GroupNormalization(3, scale=False, center=False)(both)
    return [keras.Model(inputs, groups)], (4, 51)


@pytest.mark.parametrize("make", [prelu_of_steps, table_of_pixels, groups_of_joined_features])
def test_layers_that_pytorch_calls_on_other_axes(make, tmp_path):
    parts, shape = make()
    model = keras.Sequential([*parts, layers.Flatten(), head()])
    file = saved(tmp_path, {"f.weight": RNG.normal(size=shape)})
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping={"f": "f"}, allow_missing=".*")


# Activation functions of a layer whose 24 outputs become an image, and its units.
ACTIVATIONS = {
    "running sums": (lambda x: tf.cumsum(x, -1), 24),
    "halves": (lambda x: x[..., :24] * tf.sigmoid(x[..., 24:]), 48),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_that_reorders_features(name, tmp_path):
    activation, units = ACTIVATIONS[name]
    made = layers.Dense(units, activation=activation, use_bias=False, name="g")
    model = Model(lambda m, x: m.c(tf.reshape(m.g(x), (-1, 4, 3, 2))), g=made, c=conv())
    model(np.ones((2, 7), "float32"))
    file = saved(tmp_path, {"g.weight": RNG.normal(size=(units, 7))})
    with pytest.raises(PlanError, match="'g/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping={"g": "g"}, allow_missing="c/.*")


def test_an_activation_of_single_entries(tmp_path):
    """Checks a function of the user that treats all entries alike."""
    weights = {"g.weight": RNG.normal(size=(72, 7))}
    layer = layers.Dense(
        72, activation=lambda x: tf.nn.leaky_relu(x, 0.2), use_bias=False, name="g"
    )
    model = Model(lambda m, x: m.c(tf.reshape(m.g(x), (-1, 4, 6, 3))), g=layer, c=conv())
    rows = linear("g", X[:, 0, 0, :1] * np.ones((1, 7)), weights)
    made = np.where(rows > 0, rows, 0.2 * rows).reshape(2, 3, 4, 6)
    expected = np.einsum("nchw,oc->nhwo", made, C["c.weight"][:, :, 0, 0]) + C["c.bias"]
    check(model, expected, tmp_path, C, weights, x=X[:, 0, 0, :1] * np.ones((1, 7), "float32"))


# Functions of an image that a model makes of features, and the same functions in PyTorch.
OF_IMAGES = {
    "mean": (lambda x: tf.reduce_mean(x, 2), lambda x: x.mean(3)),
    "row": (lambda x: x[:, 0], lambda x: x[:, :, 0]),
    "reversed": (lambda x: x[:, ::-1], lambda x: x[:, :, ::-1]),
}


@pytest.mark.parametrize("name", OF_IMAGES)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_of_an_image_that_a_model_makes(name, is_first, tmp_path):
    """Checks two heads on an image of features: one flattens a part of it, the other convolves."""
    function, in_numpy = OF_IMAGES[name]
    weights = {"g.weight": RNG.normal(size=(72, 7))}

    def call(m, x):
        made = tf.reshape(m.g(x), (-1, 4, 6, 3))
        heads = [lambda: m.f(m.flat(function(made))), lambda: tf.reduce_max(m.c(made), (1, 2))]
        results = [head() for head in (heads if is_first else heads[::-1])]
        return tf.concat(results if is_first else results[::-1], 1)

    rows = RNG.normal(size=(2, 7)).astype("float32")
    made = linear("g", rows, weights).reshape(2, 3, 4, 6)
    flattened = in_numpy(made).reshape(2, -1)
    weights["f.weight"] = RNG.normal(size=(4, flattened.shape[1]))
    convolved = np.einsum("nchw,oc->nohw", made, C["c.weight"][:, :, 0, 0])
    convolved = (convolved + C["c.bias"][:, None, None]).max((2, 3))
    expected = np.hstack([linear("f", flattened, weights), convolved])
    model = Model(call, c=conv(), f=head(), g=head(72, "g"), flat=layers.Flatten())
    model(rows)
    file = saved(tmp_path, C, weights)
    try:
        load(model, file, mapping={name: name for name in "cfg"})
    except PlanError:
        return
    np.testing.assert_allclose(model(rows), expected, rtol=1e-4, atol=1e-4)


def test_one_of_several_images_that_a_model_makes(tmp_path):
    """Checks outputs of steps that are divided into two images. The model convolves one image."""
    made, weights = dense_layers(g=(16, 5), f=(4, 96))
    depthwise = {"w.weight": RNG.normal(size=(8, 1, 1, 1))}
    rows = RNG.normal(size=(2, 12, 5)).astype("float32")

    def call(m, x):
        first = tf.unstack(tf.reshape(m.g(x), (-1, 12, 2, 8)), axis=2)[0]
        return m.f(m.flat(m.w(tf.reshape(first, (-1, 4, 3, 8)))))

    layer = layers.DepthwiseConv2D(1, use_bias=False, name="w")
    model = Model(call, w=layer, flat=layers.Flatten(), **made)
    first = linear("g", rows, weights).reshape(2, 12, 2, 8)[:, :, 0]
    scaled = first.swapaxes(1, 2) * depthwise["w.weight"][:, 0, 0]
    check(model, linear("f", scaled.reshape(2, 96), weights), tmp_path, weights, depthwise, x=rows)


# Functions that choose single features of a flattened image, or a part of them, and sum.
CHOICES = {
    "one": lambda x: x[:, 5:6] * tf.ones_like(x),
    "mean of some": lambda x: tf.reduce_mean(x[:, :24], 1, keepdims=True) * tf.ones_like(x),
    "number of the largest": lambda x: tf.cast(tf.argmax(x, 1)[:, None], x.dtype) * tf.ones_like(x),
    "two sums": lambda x: (
        tf.reduce_sum(tf.reduce_max(tf.reshape(x, (-1, 12, 10)), 2), 1)[:, None] * tf.ones_like(x)
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_single_features_are_other_features_in_torch(name, tmp_path):
    function = CHOICES[name]
    model = Model(lambda m, x: m.f(function(tf.reshape(m.c(x), (-1, 120)))), c=conv(), f=head())
    model(X)
    file = saved(tmp_path, C, {"f.weight": RNG.normal(size=(4, 120))})
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping={"c": "c", "f": "f"})


@pytest.mark.parametrize("is_first", [True, False])
def test_an_input_that_several_branches_use(is_first, tmp_path):
    """Checks that the order of the branches does not matter."""
    inputs = keras.Input((4, 6, 3))
    made = [
        lambda: head()(layers.Flatten()(layers.Dense(5, use_bias=False, name="d")(inputs))),
        lambda: layers.GlobalMaxPooling2D()(conv()(inputs)),
    ]
    outputs = [make() for make in (made if is_first else made[::-1])]
    model = keras.Model(inputs, layers.Concatenate()(outputs))
    shapes = {"d.weight": (5, 3), "f.weight": (4, 120)}
    file = saved(tmp_path, C, {key: RNG.normal(size=shape) for key, shape in shapes.items()})
    with pytest.raises(PlanError, match="'f/kernel': .*PyTorch flattens channels first"):
        load(model, file, mapping={name: name for name in "cdf"})


def test_a_deep_model(tmp_path):
    """Checks that the search does not recurse: each convolution changes the axes of the image."""
    inputs = outputs = keras.Input((404, 1, 3))
    for _ in range(400):
        outputs = layers.Conv2D(2, (2, 1), use_bias=False)(outputs)
    model = keras.Model(inputs, head()(layers.Flatten()(outputs)))
    weight = RNG.normal(size=(4, 8))
    load(
        model,
        saved(tmp_path, {"f.weight": weight}),
        mapping={"f": "f"},
        allow_missing="conv2d.*",
    )
    rows = weight.reshape(4, 2, 4).transpose(2, 1, 0).reshape(8, 4)
    np.testing.assert_allclose(model.layers[-1].kernel, rows, rtol=1e-6)


def test_a_flattened_image_that_is_kept(tmp_path):
    """Checks the same image flattened twice, and joined with its own pooled channels."""
    made, weights = dense_layers(f=(4, 125))

    def call(m, x):
        h = m.c(x)
        return m.f(tf.concat([tf.reshape(h, (-1, 120)), tf.reduce_mean(h, (1, 2))], 1))

    expected = linear("f", np.hstack([flat(image()), image().mean((2, 3))]), weights)
    check(Model(call, c=conv(), **made), expected, tmp_path, C, weights)


def test_a_convolution_on_an_embedding_of_a_grid(tmp_path):
    """Checks numbers of a grid, whose vectors PyTorch's model moves to the channels."""
    ids = RNG.integers(0, 9, (2, 4, 6))
    inputs = keras.Input((4, 6), dtype="int32")
    vectors = layers.Embedding(9, 3, name="e")(inputs)
    model = keras.Model(inputs, head()(layers.Flatten()(conv()(vectors))))
    table, weight = RNG.normal(size=(9, 3)), RNG.normal(size=(4, 120))
    file = saved(tmp_path, C, {"e.weight": table, "f.weight": weight})
    load(model, file, mapping={"e": "e", "c": "c", "f": "f"})
    expected = flat(image(table[ids])) @ weight.T
    np.testing.assert_allclose(model(ids), expected, rtol=1e-4, atol=1e-4)


def test_an_embedding_of_a_grid_that_is_flattened(tmp_path):
    inputs = keras.Input((4, 6), dtype="int32")
    model = keras.Model(inputs, head()(layers.Flatten()(layers.Embedding(9, 5, name="e")(inputs))))
    file = saved(tmp_path, {"e.weight": np.ones((9, 5)), "f.weight": np.ones((4, 120))})
    with pytest.raises(PlanError, match="may have the channels of the image first"):
        load(model, file, mapping={"e": "e", "f": "f"})
