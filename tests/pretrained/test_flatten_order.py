"""Flattened images: the next kernel gets PyTorch's order. The oracle is PyTorch's formula."""

import keras
import numpy as np
import pytest
from flattened_images import (
    KERNEL,
    LINEAR,
    MAPPING,
    NORM,
    X,
    convolution,
    convolved,
    head,
    linear,
    normalized,
    saved,
    sequential,
)
from stack_marks import needs_keras3

import tfwd
from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


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


@pytest.mark.parametrize(
    "flatten", [lambda: layers.TimeDistributed(layers.Flatten()), lambda: layers.Reshape((2, 48))]
)
def test_recurrent_layers_on_flattened_frames(flatten, tmp_path):
    frames = np.stack([X, X[::-1]], axis=1)
    w, u = RNG.normal(size=(3, 48)), RNG.normal(size=(3, 3))
    model = sequential(
        keras.Input((2, 5, 4, 3)),
        layers.TimeDistributed(convolution()),
        flatten(),
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
    np.testing.assert_allclose(
        model(ids), table[ids].reshape(2, 12) @ weight.T, rtol=1e-4, atol=1e-5
    )
    model = sequential(
        keras.Input((3, 4, 1)), layers.Flatten(), layers.Dense(6, use_bias=False, name="f")
    )
    load(model, saved(tmp_path, {"f.weight": weight}), mapping={"f": "f"})
    x = RNG.normal(size=(2, 3, 4, 1)).astype("float32")
    np.testing.assert_allclose(model(x), x.reshape(2, 12) @ weight.T, rtol=1e-3, atol=1e-5)


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


@pytest.mark.parametrize("wrong", [(3, 4, 4), (12, 4), (48,)])
def test_a_shape_that_the_model_contradicts(wrong, tmp_path):
    model = sequential(keras.Input(X.shape[1:]), convolution(), layers.Flatten(), head())
    saved(tmp_path, KERNEL, LINEAR)
    with pytest.raises(PlanError, match=r"is not \(4, 4, 3\), which the model shows: give this"):
        load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=wrong)})
    load(model, tmp_path, mapping={"c": "c", "f": Key("f", flattened=(4, 4, 3))})
    expected = linear(convolved(X).reshape(2, -1))
    np.testing.assert_allclose(model(X), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("order", [(4, 4, 3), ()])
def test_a_kernel_with_the_inputs_first(order, tmp_path):
    """Checks a kernel of `x.flatten(1) @ w`. The rows may have either order."""
    model = sequential(keras.Input(X.shape[1:]), convolution(), layers.Flatten(), head())
    weight = LINEAR["f.weight"].T
    saved(tmp_path, KERNEL, {**LINEAR, "f.weight": weight})
    key = Key("f.weight", transposed=False)
    keys = {"c": "c", "f/kernel": key, "f/bias": "f.bias"}
    with pytest.raises(PlanError, match=r"Beside transposed=False, give flattened=\(4, 4, 3\) in"):
        load(model, tmp_path, mapping=keys)
    keys["f/kernel"] = Key("f.weight", transposed=False, flattened=order)
    load(model, tmp_path, mapping=keys)
    image = convolved(X) if order else np.moveaxis(convolved(X), 1, -1)
    np.testing.assert_allclose(model(X), linear(image.reshape(2, -1)), rtol=1e-3, atol=1e-4)


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


def joined(kind):
    """Returns a model that joins two flattened images and a vector, for a layer on all features."""
    inputs, vector = keras.Input((5, 4, 3)), keras.Input((2,))
    image = convolution()(inputs)
    parts = [layers.Flatten()(layers.Cropping2D(((2 * i, 2 - 2 * i), 0))(image)) for i in range(2)]
    rows = layers.Concatenate()([parts[0], vector])
    rows = layers.Concatenate()([rows, parts[1]])
    if kind == "norm":
        rows = layers.BatchNormalization(name="n", epsilon=1e-3)(rows)
    if kind == "rnn":
        rows = layers.Reshape((1, -1))(rows)
        return keras.Model([inputs, vector], layers.SimpleRNN(6, use_bias=False, name="f")(rows))
    if kind == "gru":
        rows = layers.Reshape((1, -1))(rows)
        return keras.Model([inputs, vector], layers.GRU(2, use_bias=False, name="f")(rows))
    return keras.Model([inputs, vector], head()(rows))


@pytest.mark.parametrize("kind", ["dense", "norm", "rnn", "gru"])
def test_joined_features(kind, tmp_path):
    vector, size = RNG.normal(size=(2, 2)).astype("float32"), 2 * 2 * 3 * 4 + 2
    weight, bias = RNG.normal(size=(6, size)) / 9, RNG.normal(size=6)
    norm = {
        f"n.{name}": RNG.uniform(0.5, 2, size)
        for name in ("weight", "bias", "running_mean", "running_var")
    }
    image = convolved(X)
    parts = [image[:, :, :2].reshape(2, -1), vector, image[:, :, 2:].reshape(2, -1)]
    rows, model = np.concatenate(parts, 1), joined(kind)
    if kind in ("dense", "norm"):
        tensors = {"f.weight": weight, "f.bias": bias}
        mapping = {"c": "c", "f": "f"}
        if kind == "norm":
            tensors, mapping = {**tensors, **norm}, {**mapping, "n": "n"}
            scale = norm["n.weight"] / np.sqrt(norm["n.running_var"] + 1e-3)
            rows = (rows - norm["n.running_mean"]) * scale + norm["n.bias"]
        expected = rows @ weight.T + bias
    else:
        units = 6 if kind == "rnn" else 2
        recurrent = np.zeros((6, units))
        tensors = {"f.weight_ih_l0": weight, "f.weight_hh_l0": recurrent}
        mapping = {
            "c": "c",
            "f/.*/kernel": "f.weight_ih_l0",
            "f/.*/recurrent_kernel": "f.weight_hh_l0",
        }
        gates = rows @ weight.T
        expected = np.tanh(gates)
        if kind == "gru":  # PyTorch: reset, update, new; from a state of zeros
            update = 1 / (1 + np.exp(-gates[:, 2:4]))
            expected = (1 - update) * np.tanh(gates[:, 4:])
    load(model, saved(tmp_path, KERNEL, tensors), mapping=mapping)
    np.testing.assert_allclose(model([X, vector], training=False), expected, rtol=1e-4, atol=1e-4)


def test_a_nested_model_that_takes_a_dict(tmp_path):
    """Checks inputs that the inner model has in another order than the names."""
    z, a = keras.Input((48,), name="z"), keras.Input((48,), name="a")
    inner = keras.Model([z, a], layers.Subtract()([head()(z), layers.Dense(6, name="g")(a)]))
    inputs, vector = keras.Input((5, 4, 3)), keras.Input((48,))
    outputs = inner({"z": layers.Flatten()(convolution()(inputs)), "a": vector})
    model = keras.Model([inputs, vector], outputs)
    other = {"g.weight": RNG.normal(size=(6, 48)), "g.bias": RNG.normal(size=6)}
    load(model, saved(tmp_path, KERNEL, LINEAR, other), mapping={"c": "c", "f": "f", "g": "g"})
    x = RNG.normal(size=(2, 48)).astype("float32")
    expected = linear(convolved(X).reshape(2, -1)) - x @ other["g.weight"].T - other["g.bias"]
    np.testing.assert_allclose(model([X, x]), expected, rtol=1e-4, atol=1e-4)


def test_frames_that_are_flattened_twice(tmp_path):
    frames = np.stack([X, X[::-1]], axis=1)
    weight = RNG.normal(size=(6, 2 * 48)) / 9
    model = sequential(
        keras.Input((2, 5, 4, 3)),
        layers.TimeDistributed(convolution()),
        *(layers.TimeDistributed(layers.Flatten()), layers.Flatten(), head()),
    )
    folder = saved(tmp_path, KERNEL, {"f.weight": weight, "f.bias": LINEAR["f.bias"]})
    load(model, folder, mapping={"c": "c", "f": "f"})
    rows = np.stack([convolved(frames[:, t]).reshape(2, -1) for t in range(2)], 1).reshape(2, -1)
    np.testing.assert_allclose(
        model(frames), rows @ weight.T + LINEAR["f.bias"], rtol=1e-4, atol=1e-5
    )
