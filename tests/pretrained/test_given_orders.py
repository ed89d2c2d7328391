"""Orders that a key gives for one weight, and that other weights must have too.

The oracle is PyTorch's formula in NumPy.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from flattened_images import saved, sequential
from pointwise_convolution import CONV, behind_flatten, conv, pointwise
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


@pytest.mark.parametrize("given", ["kernel", "bias", "both"])
def test_outputs_in_the_same_order(given, tmp_path):
    """Checks that `unflattened` of the kernel counts for the bias, and the other way round."""
    x = RNG.normal(size=(2, 5)).astype("float32")
    w, b = RNG.normal(size=(24, 5)), RNG.normal(size=24)
    dense = layers.Dense(24, name="d")
    model = sequential(keras.Input((5,)), dense, layers.Reshape((2, 3, 4)), conv())
    same = {given} if given != "both" else {"kernel", "bias"}
    names = {"kernel": "d.weight", "bias": "d.bias"}
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b}, CONV)
    keys = {f"d/{k}": Key(v, flattened=()) if k in same else v for k, v in names.items()}
    with pytest.raises(PlanError, match=r"flattened=\(\)\) is about the inputs, but the outputs"):
        load(model, folder, mapping={"c": "c", **keys})
    keys = {f"d/{k}": Key(v, unflattened=()) if k in same else v for k, v in names.items()}
    load(model, folder, mapping={"c": "c", **keys})
    expected = pointwise((x @ w.T + b).reshape(2, 2, 3, 4))
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


def test_a_normalization_before_the_kernel(tmp_path):
    """Checks that both weights on the same features need `flattened=()`, or none."""
    x = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    w, scale = RNG.normal(size=(5, 24)), RNG.normal(size=24)
    norm = layers.BatchNormalization(name="n", epsilon=0.0)
    dense = layers.Dense(5, use_bias=False, name="f")
    model = sequential(keras.Input((2, 3, 4)), conv(), layers.Flatten(), norm, dense)
    stored = {"f.weight": w, "n.weight": scale, "n.bias": 0 * scale}
    stored |= {"n.running_mean": 0 * scale, "n.running_var": 0 * scale + 1}
    folder = saved(tmp_path, stored, CONV)
    keys = {"c": "c", "n": "n", "f": Key("f", flattened=())}
    with pytest.raises(PlanError, match=r"has the same features as 'f/kernel', whose"):
        load(model, folder, mapping=keys)
    load(model, folder, mapping={**keys, "n": Key("n", flattened=())})
    expected = (pointwise(x).reshape(2, 24) * scale) @ w.T
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)
    load(model, folder, mapping={name: name for name in "cnf"})
    flat = pointwise(x).transpose(0, 3, 1, 2).reshape(2, 24)
    np.testing.assert_allclose(model(x), (flat * scale) @ w.T, rtol=1e-4, atol=1e-4)


def test_a_bias_for_a_part_of_the_axes_of_an_image(tmp_path):
    x = RNG.normal(size=(2, 5)).astype("float32")
    dense = layers.EinsumDense("bi,ihwc->bhwc", (2, 3, 4), bias_axes="wc", name="d")
    model = sequential(keras.Input((5,)), dense, conv())
    model(x)
    folder = saved(tmp_path, {"d.weight": RNG.normal(size=(24, 5)), "d.bias": np.ones(12)}, CONV)
    with pytest.raises(PlanError, match="no weight for a part of the axes"):
        load(model, folder, mapping={"d": "d", "c": "c"})


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_flattened_features_as_a_state(kind, tmp_path):
    """Checks that the next kernel is refused too: the outputs have the order of the state."""
    image, steps = keras.Input((2, 3, 4)), keras.Input((3, 5))
    state = layers.Flatten()(conv()(image))
    layer = getattr(layers, kind)(24, use_bias=False, name="r")
    outputs = layer(steps, initial_state=[state] * (2 if kind == "LSTM" else 1))
    model = keras.Model([image, steps], layers.Dense(2, use_bias=False, name="f")(outputs))
    size = layer.weights[0].shape[1]
    stored = {"r.weight_ih": np.ones((size, 5)), "r.weight_hh": np.ones((size, 24))}
    folder = saved(tmp_path, stored, {"f.weight": np.ones((2, 24))}, CONV)
    keys = {"/.*/recurrent_kernel": "r.weight_hh", "c": "c", "f": "f"}
    with pytest.raises(PlanError) as caught:
        load(model, folder, mapping={"/.*cell/kernel": "r.weight_ih", **keys})
    assert "cell/kernel': 'r' takes flattened features as its state" in str(caught.value)
    assert "'f/kernel': 'r' takes flattened features as its state" in str(caught.value)
    keys["/.*cell/kernel"] = Key("r.weight_ih", flattened=())
    with pytest.raises(PlanError, match="'f/kernel': 'r' takes flattened features as its state"):
        load(model, folder, mapping=keys)


class Generator(keras.Model):
    """A model whose `call` uses one of two layers. Another method makes an image."""

    def __init__(self):
        super().__init__()
        self.a = layers.Dense(24, use_bias=False, name="a")
        self.d = layers.Dense(24, use_bias=False, name="d")

    def build(self, shape):
        self.a.build(shape)
        self.d.build((None, 24))
        self.built = True

    def call(self, z):
        return self.a(z)

    def image(self, z):
        return tf.reshape(self.d(self.a(z)), (-1, 2, 3, 4))


def test_a_layer_that_only_another_method_uses(tmp_path):
    model, z = Generator(), RNG.normal(size=(2, 5)).astype("float32")
    model(z)
    model.image(z)
    folder = saved(tmp_path, {"a.weight": RNG.normal(size=(24, 5)), "d.weight": np.ones((24, 24))})
    with pytest.raises(PlanError, match="'d/kernel': a method of Generator, which tfwd does not"):
        load(model, folder, mapping={"a": "a", "d": "d"})


def test_outputs_that_become_rows(tmp_path):
    """Checks heads of a captcha, which PyTorch has in the same order."""
    x = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    w, b = RNG.normal(size=(15, 24)), RNG.normal(size=15)
    rows = [layers.Reshape((3, 5)), layers.Softmax()]
    dense = layers.Dense(15, name="d")
    model = sequential(keras.Input((2, 3, 4)), conv(), layers.Flatten(), dense, *rows)
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b}, CONV)
    for key in ("d", Key("d", flattened=()), Key("d", flattened=(4, 2, 3))):
        with pytest.raises(PlanError, match=r"Key\('d', unflattened=\(\)\) if PyTorch has axes of"):
            load(model, folder, mapping={"c": "c", "d": key})
    load(model, folder, mapping={"c": "c", "d": Key("d", unflattened=())})
    flat = pointwise(x).transpose(0, 3, 1, 2).reshape(2, 24)
    exponentials = np.exp((flat @ w.T + b).reshape(2, 3, 5))
    expected = exponentials / exponentials.sum(-1, keepdims=True)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_a_recurrent_layer_whose_outputs_become_an_image(kind, tmp_path):
    """Checks that each weight is refused until the file has it in Keras's order."""
    layer = getattr(layers, kind)(24, use_bias=False, name="r")
    model = sequential(keras.Input((3, 5)), layer, layers.Reshape((2, 3, 4)), conv())
    before, size = layer.get_weights(), layer.weights[0].shape[1]
    stored = {"r.weight_ih": np.ones((size, 5)), "r.weight_hh": np.ones((size, 24))}
    keys = {"/.*cell/kernel": "r.weight_ih", "/.*/recurrent_kernel": "r.weight_hh", "c": "c"}
    with pytest.raises(PlanError, match="cell/kernel': its outputs become an image after 'r'"):
        load(model, saved(tmp_path, stored, CONV), mapping=keys)
    stored["r.weight_ih"] = before[0]
    keys["/.*cell/kernel"] = Key("r.weight_ih", transposed=False, unflattened=())
    with pytest.raises(PlanError, match="recurrent_kernel': its outputs become an image"):
        load(model, saved(tmp_path, stored, CONV), mapping=keys)
    stored["r.weight_hh"] = before[1]
    keys["/.*/recurrent_kernel"] = Key("r.weight_hh", transposed=False)
    load(model, saved(tmp_path, stored, CONV), mapping=keys)
    np.testing.assert_array_equal(layer.get_weights()[1], before[1])


@pytest.mark.parametrize("which", ["both", "one"])
def test_a_given_order_of_axes_beside_names_of_keras(which, tmp_path):
    """Checks that `transposed=True` counts more than a name that ends as in Keras."""
    w, scale, shift = RNG.normal(size=(5, 24)), RNG.normal(size=24), RNG.normal(size=24)
    norm = layers.LayerNormalization(name="n", epsilon=1e-5)
    dense = layers.Dense(5, use_bias=False, name="f")
    model, x, flat = behind_flatten(norm, dense)
    last = "n.beta" if which == "both" else "n.bias"
    folder = saved(tmp_path, {"f.weight": w, "n.gamma": scale, last: shift}, CONV)
    beta = Key(last, transposed=True) if which == "both" else last
    keys = {"c": "c", "f": "f", "n/gamma": Key("n.gamma", transposed=True), "n/beta": beta}
    load(model, folder, mapping=keys)
    centered = flat - flat.mean(1, keepdims=True)
    normal = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(model(x), (normal * scale + shift) @ w.T, rtol=1e-4, atol=1e-3)


@needs_keras3("enable_lora")
def test_low_rank_matrices_behind_flatten(tmp_path):
    dense = layers.Dense(5, use_bias=False, name="f")
    model, x, flat = behind_flatten(dense)
    dense.enable_lora(2)
    w, a, b = RNG.normal(size=(5, 24)), RNG.normal(size=(2, 24)), RNG.normal(size=(5, 2))
    folder = saved(tmp_path, {"f.weight": w, "f.A.weight": a, "f.B.weight": b}, CONV)
    keys = {f"f/lora_kernel_{k}": Key(f"f.{k.upper()}.weight", transposed=True) for k in "ab"}
    load(model, folder, mapping={"c": "c", "f/kernel": "f.weight", **keys})
    np.testing.assert_allclose(model(x), flat @ (w + b @ a).T, rtol=1e-4, atol=1e-3)


def test_outputs_that_become_an_image_in_a_later_model(tmp_path):
    """Checks a model that ends before the reshape. The shape of the image reorders the outputs."""
    w, b, x = (RNG.normal(size=size) for size in ((24, 5), 24, (2, 5)))
    model = sequential(keras.Input((5,)), layers.Dense(24, name="d"))
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b})
    load(model, folder, mapping={"d": Key("d", unflattened=(4, 2, 3))})
    image = (x @ w.T + b).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(model(x).numpy().reshape(2, 2, 3, 4), image, rtol=1e-4, atol=1e-4)
    with pytest.raises(PlanError, match=r"unflattened=\(5, 2, 3\) has 30 entries: give the shape"):
        load(model, folder, mapping={"d": Key("d", unflattened=(5, 2, 3))})


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN", "Embedding", "Conv2D"])
def test_layers_whose_outputs_are_not_reordered(kind, tmp_path):
    shape = (5, 5, 5) if kind == "Conv2D" else (3, 5) if kind != "Embedding" else (3,)
    options = {"kernel_size": 1} if kind == "Conv2D" else {}
    arguments = (5, 24) if kind == "Embedding" else (24,)
    layer = getattr(layers, kind)(*arguments, name="r", **options)
    model = sequential(keras.Input(shape), layer)
    path = "r/embeddings" if kind == "Embedding" else "r/(.*/)?kernel"
    folder = saved(tmp_path, {"r": layer.weights[0].numpy().T})
    keys = {path: Key("r", unflattened=(4, 2, 3))}
    with pytest.raises(PlanError, match="unflattened= reorders no such weight of a"):
        load(model, folder, mapping=keys, allow_missing=".*")


@pytest.mark.parametrize("is_exchanged", [False, True])
def test_a_shape_beside_the_axes_that_keras_flattens(is_exchanged, tmp_path):
    """Checks that a shape of PyTorch is compared with the axes of Keras.

    The same axes are in the same order. With the last axis first, PyTorch has the channels first.
    Merged axes may be rows with the columns first, or with the channels first.
    """
    inner = layers.Dense(5, use_bias=False, name="d")
    parts = [layers.Permute((2, 1, 3))] if is_exchanged else []
    model = sequential(
        keras.Input((2, 3, 4)), conv(), inner, *parts, layers.Flatten(), layers.Dense(6, name="f")
    )
    d, f, b = RNG.normal(size=(5, 4)), RNG.normal(size=(6, 30)), np.zeros(6)
    folder = saved(tmp_path, {"d.weight": d, "f.weight": f, "f.bias": b}, CONV)
    keys, x = {"c": "c", "d": "d"}, RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    made = pointwise(x) @ d.T
    made = made.swapaxes(1, 2) if is_exchanged else made
    in_keras = made.shape[1:]
    with pytest.raises(PlanError, match="has one axis, which shows no order"):
        load(model, folder, mapping={**keys, "f": Key("f", flattened=(30,))})
    for shape in ((5, 2, 3), (2, 3, 5), (3, 2, 5), (5, 3, 2), (6, 5), (5, 6), (2, 15), (3, 10)):
        given = {**keys, "f": Key("f", flattened=shape)}
        first = (shape[1:] == in_keras[:2]) or shape == (5, 6)
        if shape in (in_keras, (6, 5)):
            rows = made.reshape(2, 30)
        elif shape[0] == 5 and first:
            rows = made.transpose(0, 3, 1, 2).reshape(2, 30)
        else:
            is_merged = shape == (in_keras[0], 30 // in_keras[0])
            said = "equal or axes are merged" if is_merged else "has other axes than"
            with pytest.raises(PlanError, match=said):
                load(model, folder, mapping=given)
            continue
        load(model, folder, mapping=given)
        np.testing.assert_allclose(model(x), rows @ f.T, rtol=1e-4, atol=1e-3)


def test_a_shape_of_equal_sizes(tmp_path):
    """Checks a matrix of transformations: its shape does not show which axis is first."""
    model = sequential(
        keras.Input((5,)), layers.Dense(9, name="d"), layers.Reshape((3, 3)), layers.Softmax()
    )
    w, b, x = RNG.normal(size=(9, 5)), RNG.normal(size=9), RNG.normal(size=(2, 5))
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b})
    with pytest.raises(
        PlanError, match=r"because sizes are equal: give unflattened=\(\) if it has"
    ):
        load(model, folder, mapping={"d": Key("d", unflattened=(3, 3))})
    load(model, folder, mapping={"d": Key("d", unflattened=())})
    made = np.exp((x @ w.T + b).reshape(2, 3, 3))
    expected = made / made.sum(-1, keepdims=True)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_an_image_with_pytorchs_axes(tmp_path):
    """Checks that PyTorch's shape gives no other order if Keras makes the same axes."""
    model = sequential(
        *(keras.Input((5,)), layers.Dense(24, name="d"), layers.Reshape((4, 2, 3))),
        *(layers.Permute((2, 3, 1)), conv()),
    )
    w, b, x = RNG.normal(size=(24, 5)), RNG.normal(size=24), RNG.normal(size=(2, 5))
    folder = saved(tmp_path, {"d.weight": w, "d.bias": b}, CONV)
    for shape in ((4, 2, 3), ()):
        load(model, folder, mapping={"c": "c", "d": Key("d", unflattened=shape)})
        image = (x @ w.T + b).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1)
        np.testing.assert_allclose(model(x), pointwise(image), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("is_part", [False, True])
def test_a_normalization_of_outputs_that_become_an_image(is_part, tmp_path):
    """Checks that a shape for the outputs of `Dense` is demanded for the normalization too."""
    norm = layers.BatchNormalization(name="n", epsilon=0.0)
    image = [] if is_part else [layers.Reshape((2, 3, 4)), conv()]
    model = sequential(keras.Input((5,)), layers.Dense(24, name="d"), norm, *image)
    w, b, x = RNG.normal(size=(24, 5)), RNG.normal(size=24), RNG.normal(size=(2, 5))
    scale, mean = RNG.normal(size=24), RNG.normal(size=24)
    stored = {"d.weight": w, "d.bias": b, "n.weight": scale, "n.bias": 0 * scale}
    stored |= {"n.running_mean": mean, "n.running_var": 0 * scale + 1}
    folder = saved(tmp_path, stored, *([] if is_part else [CONV]))
    shape = (4, 2, 3) if is_part else ()
    keys = {"d": Key("d", unflattened=shape), "n": "n"} | ({} if is_part else {"c": "c"})
    with pytest.raises(PlanError, match="'n/gamma' has the same features as 'd/kernel', whose key"):
        load(model, folder, mapping=keys)
    with pytest.raises(PlanError, match="unflattened= of Key.'n'. has no effect on a BatchNorm"):
        load(model, folder, mapping={**keys, "n": Key("n", unflattened=shape)})
    load(model, folder, mapping={**keys, "n": Key("n", flattened=shape)})
    features = (x @ w.T + b - mean) * scale
    if is_part:
        expected = features.reshape(2, 4, 2, 3).transpose(0, 2, 3, 1).reshape(2, 24)
    else:
        expected = pointwise(features.reshape(2, 2, 3, 4))
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["d.weight", "w"])
def test_a_bias_beside_a_kernel_with_the_inputs_first(name, tmp_path):
    """Checks that the order of the outputs also counts for the bias."""
    model = sequential(
        keras.Input((5,)), layers.Dense(24, name="d"), layers.Reshape((2, 3, 4)), conv()
    )
    w, b, x = RNG.normal(size=(24, 5)), RNG.normal(size=24), RNG.normal(size=(2, 5))
    folder = saved(tmp_path, {name: w.T, "d.bias": b}, CONV)
    kernel = Key(name, transposed=False, unflattened=(4, 2, 3))
    load(model, folder, mapping={"c": "c", "d/kernel": kernel, "d/bias": "d.bias"})
    image = (x @ w.T + b).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(model(x), pointwise(image), rtol=1e-4, atol=1e-3)


def test_the_inputs_first_beside_an_image_of_equal_sizes(tmp_path):
    """Checks that the model shows the order that the shape alone does not show."""
    model = sequential(
        *(keras.Input((4, 4, 4)), conv(), layers.Flatten()),
        layers.Dense(3, use_bias=False, name="f"),
    )
    w, x = RNG.normal(size=(64, 3)), RNG.normal(size=(2, 4, 4, 4)).astype("float32")
    folder = saved(tmp_path, {"w": w}, CONV)
    key = Key("w", transposed=False, flattened=(4, 4, 4))
    load(model, folder, mapping={"c": "c", "f/kernel": key})
    flat = pointwise(x).transpose(0, 3, 1, 2).reshape(2, 64)
    np.testing.assert_allclose(model(x), flat @ w, rtol=1e-4, atol=1e-3)


def test_a_sequence_of_equal_sizes(tmp_path):
    """Checks that a shape of equal sizes is not taken for Keras's order."""
    model = sequential(
        keras.Input((4, 4)), layers.Flatten(), layers.Dense(3, use_bias=False, name="f")
    )
    folder = saved(tmp_path, {"f.weight": RNG.normal(size=(3, 16))})
    with pytest.raises(PlanError, match="because sizes are equal"):
        load(model, folder, mapping={"f": Key("f", flattened=(4, 4))})


def test_two_orders_for_the_outputs_of_a_layer(tmp_path):
    model = sequential(
        keras.Input((5,)), layers.Dense(24, name="d"), layers.Reshape((2, 3, 4)), conv()
    )
    folder = saved(tmp_path, {"d.weight": np.ones((24, 5)), "d.bias": np.ones(24)}, CONV)
    keys = {"c": "c", "d/kernel": Key("d.weight", unflattened=())}
    keys["d/bias"] = Key("d.bias", unflattened=(4, 2, 3))
    with pytest.raises(PlanError, match="'d/bias' has the same features as 'd/kernel', .* but its"):
        load(model, folder, mapping=keys)


@pytest.mark.parametrize("shape", [(4, 2), ()])
def test_columns_of_an_image_with_pytorchs_axes(shape, tmp_path):
    """Checks a reader of text: `[channels, height]` of each column, in Keras as in PyTorch."""
    columns = [layers.Permute((2, 3, 1)), layers.Reshape((3, 8))]
    layer = layers.SimpleRNN(5, use_bias=False, name="r")
    model = sequential(keras.Input((2, 3, 4)), conv(), *columns, layer)
    w, u = RNG.normal(size=(5, 8)) / 3, RNG.normal(size=(5, 5)) / 3
    folder = saved(tmp_path, {"r.weight_ih": w, "r.weight_hh": u}, CONV)
    keys = {"c": "c", "r/.*/recurrent_kernel": "r.weight_hh"}
    load(model, folder, mapping={**keys, "r/.*/kernel": Key("r.weight_ih", flattened=shape)})
    x = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    steps, h = pointwise(x).transpose(0, 2, 3, 1).reshape(2, 3, 8), np.zeros((2, 5))
    for t in range(3):
        h = np.tanh(steps[:, t] @ w.T + h @ u.T)
    np.testing.assert_allclose(model(x), h, rtol=1e-4, atol=1e-4)


def test_a_bias_in_pytorchs_order_beside_a_kernel_in_keras_order(tmp_path):
    model = sequential(
        keras.Input((5,)), layers.Dense(24, name="d"), layers.Reshape((2, 3, 4)), conv()
    )
    w, b, x = RNG.normal(size=(24, 5)), RNG.normal(size=24), RNG.normal(size=(2, 5))
    in_keras = w.reshape(4, 2, 3, 5).transpose(1, 2, 0, 3).reshape(24, 5).T
    folder = saved(tmp_path, {"d.weight": in_keras, "d.bias": b}, CONV)
    kernel = Key("d.weight", transposed=False, unflattened=())
    keys = {"c": "c", "d/kernel": kernel, "d/bias": Key("d.bias", unflattened=(4, 2, 3))}
    load(model, folder, mapping=keys)
    image = (x @ w.T + b).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(model(x), pointwise(image), rtol=1e-4, atol=1e-3)
