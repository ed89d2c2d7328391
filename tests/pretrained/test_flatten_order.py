"""Images that a model flattens: PyTorch has channels first. The oracle is PyTorch's formula."""

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
from stack_marks import needs_keras3

import tfwd
from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(0)
layers = keras.layers
X = RNG.normal(size=(2, 5, 4, 3)).astype("float32")  # examples, height, width, channels
KERNEL = {"c.weight": RNG.normal(size=(4, 3, 2, 2)), "c.bias": RNG.normal(size=4)}
LINEAR = {"f.weight": RNG.normal(size=(6, 4 * 4 * 3)), "f.bias": RNG.normal(size=6)}
NORM = {
    f"n.{name}": RNG.uniform(0.5, 2, 4 * 4 * 3)
    for name in ("weight", "bias", "running_mean", "running_var")
}
MAPPING = {"c": "c", "f": "f", "n": "n"}


def saved(folder, *parts):
    tensors = {name: value for part in parts for name, value in part.items()}
    tensors = {name: np.ascontiguousarray(value, "float32") for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def convolved(x):
    """Returns PyTorch's Conv2d, [examples, channels, height, width]."""
    image = np.zeros((len(x), 4, x.shape[1] - 1, x.shape[2] - 1))
    for i, j in np.ndindex(*image.shape[2:]):
        part = x[:, i : i + 2, j : j + 2]
        image[:, :, i, j] = np.einsum("nhwc,ochw->no", part, KERNEL["c.weight"])
    return image + KERNEL["c.bias"][:, None, None]


def linear(rows):
    return rows @ LINEAR["f.weight"].T + LINEAR["f.bias"]


def normalized(rows):
    scale = NORM["n.weight"] / np.sqrt(NORM["n.running_var"] + 1e-3)
    return (rows - NORM["n.running_mean"]) * scale + NORM["n.bias"]


def sequential(*parts):
    return keras.Sequential(list(parts))


def convolution():
    return layers.Conv2D(4, 2, name="c")


def head():
    return layers.Dense(6, name="f")


def nested():
    inputs = keras.Input((5, 4, 3))
    backbone = sequential(keras.Input((5, 4, 3)), convolution(), layers.Flatten())
    return keras.Model(inputs, head()(layers.Dropout(0.5)(backbone(inputs))))


def residual():
    """Returns a model with a merge of two images; both are the same here."""
    inputs = keras.Input((5, 4, 3))
    image = convolution()(inputs)
    image = layers.Average()([image, layers.Activation("linear")(image)])
    return keras.Model(inputs, head()(layers.Flatten()(image)))


MODELS = {
    "flatten": lambda: sequential(keras.Input((5, 4, 3)), convolution(), layers.Flatten(), head()),
    "reshape": lambda: sequential(
        keras.Input((5, 4, 3)), convolution(), layers.Reshape((-1,)), head()
    ),
    "permuted": lambda: sequential(
        keras.Input((5, 4, 3)), convolution(), layers.Permute((3, 1, 2)), layers.Flatten(), head()
    ),
    "nested": nested,
    "residual": residual,
    "parametrized": lambda: tfwd.parametrize(
        nested(), {"f/kernel": tfwd.parametrizations.Dropout(0.1)}
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_dense_after_a_flattened_image(name, tmp_path):
    model = MODELS[name]()
    load(model, saved(tmp_path, KERNEL, LINEAR), mapping={"c": "c", "f": "f"})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X, training=False), expected, rtol=1e-4, atol=1e-4)


def test_a_normalization_between(tmp_path):
    model = sequential(
        keras.Input((5, 4, 3)),
        convolution(),
        layers.Flatten(),
        layers.BatchNormalization(name="n"),
        head(),
    )
    load(model, saved(tmp_path, KERNEL, LINEAR, NORM), mapping=MAPPING)
    expected = linear(normalized(convolved(X).reshape(2, -1)))
    np.testing.assert_allclose(model(X, training=False), expected, rtol=1e-4, atol=1e-4)


def test_files_with_kernels_of_keras_stay_as_they_are(tmp_path):
    model = MODELS["flatten"]()
    kernel = {"c.kernel": KERNEL["c.weight"].transpose(2, 3, 1, 0), "c.bias": KERNEL["c.bias"]}
    dense = {"f.kernel": LINEAR["f.weight"].T, "f.bias": LINEAR["f.bias"]}
    load(model, saved(tmp_path, kernel, dense), mapping={"c": "c", "f": "f"})
    expected = linear(np.moveaxis(convolved(X), 1, -1).reshape(2, -1))
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", ["weight", "kernel"])
def test_dense_whose_outputs_become_an_image(style, tmp_path):
    """Checks a decoder: PyTorch's `view(channels, height, width)`, then a 1 x 1 convolution."""
    w, b, x = RNG.normal(size=(48, 5)), RNG.normal(size=48), RNG.normal(size=(2, 5))
    point = RNG.normal(size=(2, 3, 1, 1))
    model = sequential(
        keras.Input((5,)),
        layers.Dense(48, name="d"),
        layers.BatchNormalization(name="n"),
        layers.ReLU(),
        layers.Reshape((4, 4, 3)),
        layers.Conv2D(2, 1, name="p", use_bias=False),
    )
    rows = np.maximum(normalized(x @ w.T + b), 0)
    if style == "weight":
        dense, image = {"d.weight": w}, rows.reshape(2, 3, 4, 4)
        norm = NORM
    else:  # a file in Keras's order, also of the biases
        dense, image = {"d.kernel": w.T}, np.moveaxis(rows.reshape(2, 4, 4, 3), -1, 1)
        names = {"weight": "gamma", "bias": "beta"}
        names |= {"running_mean": "moving_mean", "running_var": "moving_variance"}
        norm = {f"n.{ours}": NORM[f"n.{theirs}"] for theirs, ours in names.items()}
    folder = saved(tmp_path, dense, {"d.bias": b, "p.weight": point}, norm)
    load(model, folder, mapping={"d": "d", "n": "n", "p": "p"})
    expected = np.einsum("nchw,oc->nhwo", image, point[:, :, 0, 0])
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-3, atol=1e-3)


def frames_of_features():
    """Returns a decoder of several frames."""
    return sequential(
        keras.Input((2, 5)),
        layers.TimeDistributed(layers.Dense(12, name="d")),
        layers.TimeDistributed(layers.Reshape((2, 2, 3))),
        layers.TimeDistributed(layers.Conv2D(2, 1, name="p", use_bias=False)),
    )


def frames_by_a_model():
    inner = sequential(
        *(keras.Input((5,)), layers.Dense(12, name="d"), layers.Reshape((2, 2, 3))),
        layers.Conv2D(2, 1, name="p", use_bias=False),
    )
    return sequential(keras.Input((2, 5)), layers.TimeDistributed(inner))


@pytest.mark.parametrize("make", [frames_of_features, frames_by_a_model])
def test_dense_whose_outputs_become_the_images_of_frames(make, tmp_path):
    w, b, x = RNG.normal(size=(12, 5)), RNG.normal(size=12), RNG.normal(size=(3, 2, 5))
    point = RNG.normal(size=(2, 3, 1, 1))
    model = make()
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b, "p.weight": point})
    load(model, folder, mapping={"d": "d", "p": "p"})
    images = (x @ w.T + b).reshape(3, 2, 3, 2, 2)
    expected = np.einsum("ntchw,oc->nthwo", images, point[:, :, 0, 0])
    np.testing.assert_allclose(model(x.astype("float32")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sequences", [False, True])
def test_dense_after_a_recurrent_convolution(sequences, tmp_path):
    image = layers.ConvLSTM2D(3, 1, name="c", return_sequences=sequences)
    model = sequential(keras.Input((2, 4, 5, 1)), image, layers.Flatten(), head())
    kernels = {f"c.{i}": weight.numpy() for i, weight in enumerate(image.cell.weights)}
    size = 60 * (2 if sequences else 1)
    linear_of = {"f.weight": RNG.normal(size=(6, size)), "f.bias": LINEAR["f.bias"]}
    saved(tmp_path, kernels, linear_of)
    names = ("kernel", "recurrent_kernel", "bias")
    mapping = {f"c/.*/{name}": Key(f"c.{i}", transposed=False) for i, name in enumerate(names)}
    load(model, tmp_path, mapping={**mapping, "f": "f"})
    x = RNG.normal(size=(2, 2, 4, 5, 1)).astype("float32")
    rows = np.moveaxis(image(x).numpy(), -1, -3).reshape(2, -1)
    expected = rows @ linear_of["f.weight"].T + linear_of["f.bias"]
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


def table_of_images():
    inputs = keras.Input((1,), dtype="int32")
    return keras.Model(inputs, layers.Reshape((2, 2, 3))(layers.Embedding(7, 12, name="d")(inputs)))


def einsum_of_images():
    inputs = keras.Input((5,))
    rows = layers.EinsumDense("ab,bc->ac", 12, bias_axes="c", name="d")(inputs)
    return keras.Model(inputs, layers.Reshape((2, 2, 3))(rows))


def sequences_of_images():
    inputs = keras.Input((4, 5))
    rows = layers.EinsumDense("abc,cd->abd", (4, 12), bias_axes="d", name="d")(inputs)
    images = layers.Reshape((4, 2, 2, 3))(rows)
    return keras.Model(inputs, layers.TimeDistributed(layers.ReLU())(images))


def half_of_the_outputs():
    inputs = keras.Input((5,))
    half = layers.Lambda(lambda rows: rows[:, :12], output_shape=(12,))
    rows = half(layers.Dense(24, name="d")(inputs))
    return keras.Model(inputs, layers.Reshape((2, 2, 3))(rows))


@pytest.mark.parametrize(
    "make", [table_of_images, einsum_of_images, sequences_of_images, half_of_the_outputs]
)
def test_outputs_that_become_an_image_in_an_unknown_order(make, tmp_path):
    inside = make()
    model = sequential(
        *(keras.Input(inside.input_shape[1:]), inside),
        layers.ZeroPadding3D(1) if make is sequences_of_images else layers.ZeroPadding2D(1),
    )
    outputs = 24 if make is half_of_the_outputs else 12
    weight = RNG.normal(size=(7, 12) if make is table_of_images else (outputs, 5))
    bias = {} if make is table_of_images else {"d.bias": RNG.normal(size=outputs)}
    saved(tmp_path, {"d.weight": weight}, bias)
    with pytest.raises(PlanError, match=r"map to Key\('d', transposed=False\)"):
        load(model, tmp_path, mapping={"d": "d"})


@pytest.mark.parametrize("name", ["Add", "Multiply", "Maximum"])
def test_outputs_that_are_combined_with_a_flattened_image(name, tmp_path):
    x = keras.Input((5, 4, 3))
    flat = layers.Flatten()(layers.Conv2D(4, 2, name="c")(x))
    other = layers.Dense(48, name="d")(seen := keras.Input((7,)))
    model = keras.Model([x, seen], getattr(layers, name)(name="r")([flat, other]))
    saved(tmp_path, KERNEL, {"d.weight": RNG.normal(size=(48, 7)), "d.bias": np.ones(48)})
    with pytest.raises(PlanError, match="'d/kernel': 'r' combines the outputs with flattened feat"):
        load(model, tmp_path, mapping={"c": "c", "d": "d"})


def test_a_recurrent_layer_on_one_flattened_image(tmp_path):
    weight = RNG.normal(size=(6, 48)) / 10
    model = sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Flatten(), layers.Reshape((1, 48))),
        layers.SimpleRNN(6, name="f", use_bias=False),
    )
    saved(tmp_path, KERNEL, {"f.weight_ih_l0": weight, "f.weight_hh_l0": np.zeros((6, 6))})
    load(
        model,
        tmp_path,
        mapping={
            "c": "c",
            "f/.*/kernel": "f.weight_ih_l0",
            "f/.*/recurrent_kernel": "f.weight_hh_l0",
        },
    )
    expected = np.tanh(convolved(X).reshape(2, -1) @ weight.T)
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-5)


def test_recurrent_layers_on_flattened_frames(tmp_path):
    frames = np.stack([X, X[::-1]], axis=1)
    w, u = RNG.normal(size=(3, 48)), RNG.normal(size=(3, 3))
    model = sequential(
        keras.Input((2, 5, 4, 3)),
        layers.TimeDistributed(convolution()),
        layers.TimeDistributed(layers.Flatten()),
        layers.SimpleRNN(3, use_bias=False, name="r"),
    )
    folder = saved(tmp_path, KERNEL, {"r.weight_ih_l0": w / 9, "r.weight_hh_l0": u})
    load(model, folder, mapping={"c": "c", "r/.*cell": "r"})
    h = np.zeros((2, 3))
    for t in range(2):
        h = np.tanh(convolved(frames[:, t]).reshape(2, -1) @ w.T / 9 + h @ u.T)
    np.testing.assert_allclose(model(frames), h, rtol=1e-4, atol=1e-4)


def test_tensors_that_pytorch_flattens_in_the_same_order(tmp_path):
    """Checks sequences, images of one channel, and pooled images."""
    table, weight = RNG.normal(size=(9, 4)), RNG.normal(size=(6, 12))
    model = sequential(
        keras.Input((3,)),
        layers.Embedding(9, 4, name="e"),
        layers.Flatten(),
        layers.Dense(6, use_bias=False, name="f"),
    )
    folder = saved(tmp_path, {"e.weight": table, "f.weight": weight})
    load(model, folder, mapping={"e": "e", "f": "f"})
    ids = np.array([[1, 8, 0], [2, 2, 5]])
    np.testing.assert_allclose(model(ids), table[ids].reshape(2, 12) @ weight.T, rtol=1e-4)
    model = sequential(
        keras.Input((3, 4, 1)), layers.Flatten(), layers.Dense(6, use_bias=False, name="f")
    )
    load(model, saved(tmp_path, {"f.weight": weight}), mapping={"f": "f"})
    x = RNG.normal(size=(2, 3, 4, 1)).astype("float32")
    np.testing.assert_allclose(model(x), x.reshape(2, 12) @ weight.T, rtol=1e-3, atol=1e-5)


class Subclassed(keras.Model):
    """A model without a graph."""

    def __init__(self):
        super().__init__()
        self.c, self.flatten, self.f = convolution(), layers.Flatten(), head()

    def call(self, x):
        return self.f(self.flatten(self.c(x)))


class Block(layers.Layer):
    """A custom layer of a functional model, with a convolution."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.c = convolution()

    def build(self, input_shape):
        self.c.build(input_shape)
        self.built = True

    def call(self, x):
        return self.c(x)


def with_block():
    return sequential(keras.Input((5, 4, 3)), Block(), layers.Flatten(), head())


def joined():
    inputs = keras.Input((5, 4, 3))
    image = convolution()(inputs)
    rows = [layers.Flatten()(layers.Cropping2D(((2 * i, 2 - 2 * i), 0))(image)) for i in range(2)]
    return keras.Model(inputs, head()(layers.Concatenate()(rows)))


def columns():
    """Returns a model that reads an image column by column, as for text in images."""
    return sequential(
        *(keras.Input((5, 4, 3)), convolution()),
        *(layers.Reshape((4, 12), name="r"), head()),
    )


def tokens():
    return sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Reshape((12, 4), name="r")),
        *(layers.Flatten(), head()),
    )


def mean_column():
    def mean(image):
        return image[:, 0] / 2 + image[:, 1] / 2

    return sequential(
        *(
            keras.Input((5, 4, 3)),
            convolution(),
            layers.Lambda(mean, name="r", output_shape=(3, 4)),
        ),
        *(layers.Flatten(), head()),
    )


def rows_and_columns():
    """Returns a model that exchanges the rows and columns of an image, as PyTorch's may do."""
    return sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Permute((2, 1, 3), name="r")),
        *(layers.Flatten(), head()),
    )


def permuted_sequence():
    inputs = keras.Input((5, 4, 3))
    steps = layers.Reshape((48, 1))(layers.Flatten()(convolution()(inputs)))
    steps = layers.SimpleRNN(1, return_sequences=True, use_bias=False, name="s")(steps)
    steps = layers.Permute((2, 1), name="r")(layers.Concatenate()([steps, steps]))
    return keras.Model(inputs, head()(layers.Flatten()(steps)))


class Backbone(Block):
    """A custom layer that flattens an image."""

    def call(self, x):
        image = self.c(x)
        return layers.Flatten()(image)


def with_backbone():
    return sequential(keras.Input((5, 4, 3)), Backbone(name="r"), head())


def on_channels():
    return sequential(
        *(keras.Input((5, 4, 3)), convolution(), layers.Dense(4, name="r")),
        *(layers.Flatten(), head()),
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (mean_column, "'r' changes the axes of an image of (4, 3, 4)"),
        (with_backbone, "'r' has convolutions inside, and may flatten an image"),
        (on_channels, "'r' is on the channels of an image of (4, 3, 4)"),
        (columns, "'r' is a reshape between an image of (4, 3, 4) and (4, 12)"),
        (tokens, "'r' is a reshape between an image of (4, 3, 4) and (12, 4)"),
        (Subclassed, "flattens (4, 3, 4), maybe for this layer"),
        (joined, "joins flattened features with others"),
        (with_block, "has convolutions inside, and may return an image"),
        (rows_and_columns, "does not show whether PyTorch's model permutes like 'r'"),
        (permuted_sequence, "does not show whether PyTorch's model permutes like 'r'"),
    ],
)
def test_an_order_that_the_model_does_not_show(make, message, tmp_path):
    model = make()
    model(X)
    saved(tmp_path, KERNEL, LINEAR)
    mapping = {"c": "c", "f": "f", **({"r": "r"} if make is on_channels else {})}
    with pytest.raises(PlanError) as caught:
        load(model, tmp_path, mapping=mapping)
    assert "'f/kernel'" in str(caught.value)
    assert message in str(caught.value)
    assert "map to Key('f', flattened=(channels, height, width))" in str(caught.value)
    assert "'f/bias'" not in str(caught.value)


def test_the_mapping_says_the_order(tmp_path):
    model = Subclassed()
    model(X)
    saved(tmp_path, KERNEL, LINEAR)
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 4, 3))})
    image = convolved(X)
    np.testing.assert_allclose(model(X), linear(image.reshape(2, -1)), rtol=1e-4, atol=1e-4)
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=())})
    rows = np.moveaxis(image, 1, -1).reshape(2, -1)
    np.testing.assert_allclose(model(X), linear(rows), rtol=1e-4, atol=1e-4)
    with pytest.raises(PlanError, match="has 24 entries: give the shape in PyTorch"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 2, 3))})


def test_the_mapping_says_the_order_in_a_row_of_an_image(tmp_path):
    weight = RNG.normal(size=(6, 12))
    saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": LINEAR["f.bias"]})
    model = columns()
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 3))})
    rows = convolved(X).transpose(0, 2, 1, 3).reshape(2, 4, 12)
    expected = rows @ weight.T + LINEAR["f.bias"]
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_heads_and_groups_of_channels_keep_their_order(tmp_path):
    """Checks a `Dense` layer on the channels of an image whose positions were merged."""
    bias = RNG.normal(size=6)
    for shape in ((12, 4), (4, 3, 2, 2)):
        weight = RNG.normal(size=(6, shape[-1]))
        model = sequential(keras.Input((5, 4, 3)), convolution(), layers.Reshape(shape), head())
        saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": bias})
        load(model, tmp_path, mapping={"c": "c", "f": "f"})
        rows = np.moveaxis(convolved(X), 1, -1).reshape(2, *shape)
        np.testing.assert_allclose(model(X), rows @ weight.T + bias, rtol=1e-4, atol=1e-4)


def test_an_image_of_the_data_is_not_known(tmp_path):
    weight = RNG.normal(size=(6, 60))
    saved(tmp_path, {"f.weight": weight})
    model = sequential(
        keras.Input((5, 4, 3)), layers.Flatten(), layers.Dense(6, use_bias=False, name="f")
    )
    with pytest.raises(PlanError, match=r"the model does not show what the axes of \(5, 4, 3\)"):
        load(model, tmp_path, mapping={"f": "f"})
    load(model, tmp_path, mapping={"f": Key("f", flattened=(3, 5, 4))})
    expected = np.moveaxis(X, -1, 1).reshape(2, -1) @ weight.T
    np.testing.assert_allclose(model(X), expected, rtol=1e-3, atol=1e-4)


def test_a_shared_layer_on_two_orders(tmp_path):
    inputs, other = keras.Input((5, 4, 3)), keras.Input((48,))
    dense = head()
    flat = layers.Flatten()(convolution()(inputs))
    model = keras.Model([inputs, other], [dense(flat), dense(other)])
    with pytest.raises(PlanError, match="calls the layer on features in several orders"):
        load(model, saved(tmp_path, KERNEL, LINEAR), mapping={"c": "c", "f": "f"})


def test_a_normalization_over_several_axes_has_no_known_layout(tmp_path):
    model = sequential(keras.Input((4, 4, 4)), layers.LayerNormalization(axis=[1, 2, 3], name="n"))
    weights = {"n.weight": RNG.normal(size=(4, 4, 4)), "n.bias": RNG.normal(size=(4, 4, 4))}
    with pytest.raises(PlanError, match="'n/gamma' belongs to a LayerNormalization, and tfwd does"):
        load(model, saved(tmp_path, weights), mapping={"n": "n"})


@needs_keras3("functions of keras.ops in a graph")
def test_functions_that_flatten(tmp_path):
    inputs = keras.Input((5, 4, 3))
    rows = keras.ops.reshape(convolution()(inputs), (-1, 48))
    model = keras.Model(inputs, head()(rows))
    load(model, saved(tmp_path, KERNEL, LINEAR), mapping={"c": "c", "f": "f"})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X), expected, rtol=1e-4, atol=1e-4)


def test_the_first_vector_of_a_sequence_of_any_length(tmp_path):
    table, weight = RNG.normal(size=(9, 4)), RNG.normal(size=(6, 4))
    model = sequential(
        *(keras.Input((None,)), layers.Embedding(9, 4, name="e")),
        layers.Lambda(lambda x: x[:, 0], output_shape=(4,)),
        layers.Dense(6, use_bias=False, name="f"),
    )
    saved(tmp_path, {"e.weight": table, "f.weight": weight})
    load(model, tmp_path, mapping={"e": "e", "f": "f"})
    ids = np.array([[1, 8, 0], [2, 2, 5]])
    np.testing.assert_allclose(model(ids), table[ids[:, 0]] @ weight.T, rtol=1e-4, atol=1e-6)
