"""Layouts: a layer on a tensor as PyTorch has it computes what PyTorch's formula says."""

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

from tfwd.pretrained import Key, load, plan

RNG = np.random.default_rng(0)
layers = keras.layers


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def loaded(layer, shape, tensors, folder, mapping):
    """A model of one layer, with the tensors in it."""
    model = keras.Sequential([keras.Input(shape), layer])
    save_file(tensors, folder / "model.safetensors")
    load(model, folder, mapping=mapping)
    return model


def test_dense(tmp_path):
    weight, bias, x = normal(3, 4), normal(3), normal(2, 4)
    tensors = {"fc.weight": weight, "fc.bias": bias}
    model = loaded(layers.Dense(3, name="d"), (4,), tensors, tmp_path, {"d": "fc"})
    np.testing.assert_allclose(model(x), x @ weight.T + bias, rtol=1e-5)


def test_a_square_kernel_is_transposed_too(tmp_path):
    weight, x = normal(4, 4), normal(2, 4)
    for name, expected in (("weight", x @ weight.T), ("kernel", x @ weight)):
        layer = layers.Dense(4, use_bias=False, name="d")
        model = loaded(layer, (4,), {f"fc.{name}": weight}, tmp_path, {"d": "fc"})
        np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-6)
    layer = layers.Dense(4, use_bias=False, name="d")
    mapping = {"d/kernel": Key("odd", transposed=False)}
    model = loaded(layer, (4,), {"odd": weight}, tmp_path, mapping)
    np.testing.assert_allclose(model(x), x @ weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shape", "output"),
    [
        ("abc,cd->abd", (None, 5), 5),
        ("abc,cde->abde", (None, 2, 3), 6),
        ("abcd,cde->abe", (None, 5), 5),
        ("abc,dec->abde", (None, 2, 3), 6),
    ],
)
def test_products_of_many_axes(equation, shape, output, tmp_path):
    """PyTorch's matrix is of all outputs by all inputs, each in the order of the equation."""
    inputs = {"abc": (7, 4), "abcd": (7, 2, 3)}[equation.partition(",")[0]]
    size = int(np.prod(inputs[1:]))
    weight, x = normal(output, size), normal(2, *inputs)
    layer = layers.EinsumDense(equation, shape, name="d")
    model = loaded(layer, inputs, {"fc.weight": weight}, tmp_path, {"d": "fc"})
    expected = x.reshape(2, 7, size) @ weight.T
    np.testing.assert_allclose(np.reshape(model(x), (2, 7, output)), expected, rtol=1e-4, atol=1e-5)


def test_keras_attention(tmp_path):
    """Heads are the slow axis of PyTorch's rows, and of its columns where they are joined."""
    width, heads, size = 8, 2, 4
    names = {"query": "q", "key": "k", "value": "v", "attention_output": "o"}
    tensors = {f"{n}.weight": normal(width, width) for n in names.values()}
    tensors |= {f"{n}.bias": normal(width) for n in names.values()}
    save_file(tensors, tmp_path / "model.safetensors")
    inputs = keras.Input((5, width))
    outputs = layers.MultiHeadAttention(heads, size, name="mha")(inputs, inputs)
    model = keras.Model(inputs, outputs)
    load(model, tmp_path, mapping={f"mha/{ours}": n for ours, n in names.items()})
    x = normal(3, 5, width)
    q, k, v = (x @ tensors[f"{n}.weight"].T + tensors[f"{n}.bias"] for n in "qkv")
    joined = []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(0, 2, 1) / np.sqrt(size)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        joined.append(weights / weights.sum(-1, keepdims=True) @ v[..., part])
    expected = np.concatenate(joined, -1) @ tensors["o.weight"].T + tensors["o.bias"]
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_convolution(tmp_path):
    weight, bias, x = normal(3, 2, 3, 3), normal(3), normal(1, 5, 5, 2)
    tensors = {"c.weight": weight, "c.bias": bias}
    model = loaded(layers.Conv2D(3, 3, name="c"), (5, 5, 2), tensors, tmp_path, {"c": "c"})
    expected = np.zeros((3, 3, 3))
    for i in range(3):
        for j in range(3):
            part = x[0, i : i + 3, j : j + 3]  # places, places, inputs
            expected[i, j] = np.einsum("hwc,ochw->o", part, weight) + bias
    np.testing.assert_allclose(model(x)[0], expected, rtol=1e-4, atol=1e-5)


def test_normalizations(tmp_path):
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = {f"n.{name}": abs(normal(4)) + 0.5 for name in names}
    x = normal(3, 4)
    model = loaded(layers.BatchNormalization(name="n"), (4,), tensors, tmp_path, {"n": "n"})
    scale = tensors["n.weight"] / np.sqrt(tensors["n.running_var"] + 1e-3)
    expected = (x - tensors["n.running_mean"]) * scale + tensors["n.bias"]
    np.testing.assert_allclose(model(x, training=False), expected, rtol=1e-4, atol=1e-5)


def test_names_of_normalizations_are_whole_names(tmp_path):
    """`gamma` in the name of a layer is none."""
    tensors = {
        "my_gamma_proj.weight": normal(2, 4),
        "norm.gamma": normal(2),
        "norm.beta": normal(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(2, use_bias=False, name="my_gamma_proj"),
            layers.LayerNormalization(name="norm"),
        ]
    )
    mapping = {"my_gamma_proj": "my_gamma_proj", "norm": "norm"}
    found = plan(model, tmp_path, mapping=mapping)
    assert {step.key: step.target.name for step in found.steps} == {
        "my_gamma_proj.weight": "kernel",
        "norm.gamma": "gamma",
        "norm.beta": "beta",
    }
    found.apply()
    np.testing.assert_array_equal(model.layers[0].kernel, tensors["my_gamma_proj.weight"].T)
