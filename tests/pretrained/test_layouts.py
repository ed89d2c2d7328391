"""Layouts: a layer with PyTorch's tensor computes PyTorch's formula."""

import re

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load, plan

RNG = np.random.default_rng(0)
layers = keras.layers
NAMES_OF_NORMALIZATIONS = (("gamma", "weight"), ("beta", "bias"))


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def loaded(layer, shape, tensors, folder, mapping):
    """Returns a model of one layer with loaded tensors."""
    model = keras.Sequential([keras.Input(shape), layer])
    save_file(tensors, folder / "model.safetensors")
    load(model, folder, mapping=mapping)
    return model


def test_dense(tmp_path):
    weight, bias, x = normal(3, 4), normal(3), normal(2, 4)
    tensors = {"fc.weight": weight, "fc.bias": bias}
    model = loaded(layers.Dense(3, name="d"), (4,), tensors, tmp_path, {"d": "fc"})
    np.testing.assert_allclose(model(x), x @ weight.T + bias, rtol=1e-5, atol=1e-5)


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


@needs_keras3("ReversibleEmbedding")
@pytest.mark.parametrize("vocabulary", [4, 5])
@pytest.mark.parametrize("transposed", [None, True, False])
def test_a_head_beside_an_embedding(vocabulary, transposed, tmp_path):
    table, head, x = normal(vocabulary, 4), normal(vocabulary, 4), normal(2, 4)
    layer = layers.ReversibleEmbedding(vocabulary, 4, tie_weights=False, name="e")
    mapping = {
        "e/embeddings": "tok.weight",
        "e/reverse_embeddings": Key("lm_head.weight", transposed=transposed),
    }
    in_file = head.T.copy() if transposed is False else head
    tensors = {"tok.weight": table, "lm_head.weight": in_file}
    model = loaded(layer, (3,), tensors, tmp_path, mapping)
    np.testing.assert_array_equal(layer.embeddings, table)
    np.testing.assert_allclose(layer(x, reverse=True), x @ head.T, rtol=1e-4, atol=1e-6)
    assert model.count_params() == 8 * vocabulary


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize(
    ("mapping", "copy", "outputs_first"),
    [
        ({"d/kernel": Key("head.weight", copies=("tok.weight",))}, "tok.weight", True),
        ({"d/kernel": Key("head.kernel", copies=("tok.kernel",))}, "tok.kernel", False),
        ({"d/kernel": Key("head.weight", copies=("tok.table",))}, "tok.table", True),
        ({"d": Key("head", copies=("tok.weight",))}, "tok.weight", True),
        ({"d": Key("head", copies=("tok.kernel",))}, "tok.kernel", False),
    ],
)
def test_a_copy_without_its_key_keeps_the_layout(kind, mapping, copy, outputs_first, tmp_path):
    """Checks a file that has only the copy. The kind of file does not matter."""
    tensor, x = normal(4, 4), normal(2, 4)
    file = tmp_path / f"model.{kind}"
    if kind == "npz":
        np.savez(file, **{copy: tensor})
    else:
        save_file({copy: tensor}, file)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, use_bias=False, name="d")])
    load(model, file, mapping=mapping)
    expected = x @ (tensor.T if outputs_first else tensor)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shape", "output"),
    [
        ("abc,cd->abd", (None, 5), 5),
        ("abc,cde->abde", (None, 2, 3), 6),
        ("abcd,cde->abe", (None, 5), 5),
        ("abc,dec->abde", (None, 2, 3), 6),
        ("abc,cde->abed", (None, 3, 2), 6),  # the kernel's outputs have another order
        ("abcd,dce->abe", (None, 5), 5),  # the kernel's inputs have another order
        ("abcd,efdc->abfe", (None, 3, 2), 6),
        ("...cd,dce->...e", (5,), 5),
    ],
)
def test_products_of_many_axes(equation, shape, output, tmp_path):
    """Checks PyTorch's matrix of all outputs by all inputs, each in the order of the equation."""
    inputs = (7, 4) if equation.startswith("abc,") else (7, 2, 3)
    size = int(np.prod(inputs[1:]))
    weight, bias, x = normal(output, size), normal(output), normal(2, *inputs)
    axes = equation.partition("->")[2].removeprefix("...").removeprefix("ab")
    layer = layers.EinsumDense(equation, shape, bias_axes=axes, name="d")
    tensors = {"fc.weight": weight, "fc.bias": bias}
    model = loaded(layer, inputs, tensors, tmp_path, {"d": "fc"})
    expected = x.reshape(2, 7, size) @ weight.T + bias
    np.testing.assert_allclose(np.reshape(model(x), (2, 7, output)), expected, rtol=1e-4, atol=1e-5)


def test_a_kernel_for_each_position_has_no_known_layout(tmp_path):
    layer = layers.EinsumDense("abc,bcd->abd", (7, 3), name="d")
    with pytest.raises(
        PlanError, match="'d/kernel' belongs to a EinsumDense, and tfwd does not know"
    ):
        loaded(layer, (7, 4), {"fc.weight": normal(21, 4)}, tmp_path, {"d": "fc"})


def test_keras_attention(tmp_path):
    """Checks that heads are the slow axis of PyTorch's rows, and of its columns in the output."""
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
            part = x[0, i : i + 3, j : j + 3]  # positions, positions, inputs
            expected[i, j] = np.einsum("hwc,ochw->o", part, weight) + bias
    np.testing.assert_allclose(model(x)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "in_file", "needed"),
    [
        (layers.Dense(3, name="c"), (3, 3, 1, 1), (3, 3)),
        (layers.Conv2D(3, 1, name="c"), (3, 3), (3, 3, 1, 1)),
    ],
    ids=["dense", "convolution"],
)
def test_a_linear_layer_and_a_convolution_of_size_1(layer, in_file, needed, tmp_path):
    """Checks that the advice for a Linear layer and a convolution of size 1 gives `x W^T`."""
    weight, x = normal(*in_file), normal(1, 5, 5, 3)
    advice = re.escape(f"with the shape {needed}")
    tensors = {"c.weight": weight, "c.bias": normal(3)}
    with pytest.raises(ValueError, match=advice):
        loaded(layer, (5, 5, 3), tensors, tmp_path, {"c": "c"})
    tensors["c.weight"] = weight.reshape(needed)
    model = loaded(layer, (5, 5, 3), tensors, tmp_path, {"c": "c"})
    expected = x @ weight.reshape(3, 3).T + tensors["c.bias"]
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_transposed_convolution_is_no_linear_layer(tmp_path):
    """Checks that no advice is given for a kernel whose first axis is its inputs in PyTorch."""
    tensors = {"c.weight": normal(3, 3), "c.bias": normal(3)}
    with pytest.raises(ValueError, match=r"c.weight' is \(3, 3\)") as error:
        loaded(layers.Conv2DTranspose(3, 1, name="c"), (5, 5, 3), tensors, tmp_path, {"c": "c"})
    assert "with the shape" not in str(error.value)


@pytest.mark.parametrize("rank", [1, 2])
def test_transposed_convolution(rank, tmp_path):
    """Checks that each input writes `x W` to the outputs below the kernel.

    PyTorch's axes: inputs, outputs, sizes.
    """
    weight, bias, x = normal(3, 3, *[3] * rank), normal(3), normal(1, *[3] * rank, 3)
    layer = [layers.Conv1DTranspose, layers.Conv2DTranspose][rank - 1](3, 3, strides=2, name="c")
    tensors = {"c.weight": weight, "c.bias": bias}
    model = loaded(layer, (*[3] * rank, 3), tensors, tmp_path, {"c": "c"})
    expected = np.zeros((*[7] * rank, 3))
    for place in np.ndindex(*[3] * rank):
        part = tuple(slice(2 * i, 2 * i + 3) for i in place)
        expected[part] += np.moveaxis(np.tensordot(x[(0, *place)], weight, 1), 0, -1)
    np.testing.assert_allclose(model(x)[0], expected + bias, rtol=1e-4, atol=1e-5)


def test_depthwise_and_separable_convolutions(tmp_path):
    """Checks PyTorch's `groups=inputs`: output i * multiplier + m belongs to input i."""
    weight, point, x = normal(4, 1, 3, 3), normal(4, 4, 1, 1), normal(1, 5, 5, 2)
    deep = np.zeros((3, 3, 4))
    for i, j in np.ndindex(3, 3):
        part = np.repeat(x[0, i : i + 3, j : j + 3], 2, axis=-1)
        deep[i, j] = np.einsum("hwo,ohw->o", part, weight[:, 0])
    layer = layers.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False, name="c")
    model = loaded(layer, (5, 5, 2), {"c.weight": weight}, tmp_path, {"c": "c"})
    np.testing.assert_allclose(model(x)[0], deep, rtol=1e-4, atol=1e-5)
    layer = layers.SeparableConv2D(4, 3, depth_multiplier=2, use_bias=False, name="c")
    mapping = {"c/depthwise_kernel": "deep.weight", "c/pointwise_kernel": "point.weight"}
    tensors = {"deep.weight": weight, "point.weight": point}
    model = loaded(layer, (5, 5, 2), tensors, tmp_path, mapping)
    expected = deep @ point[:, :, 0, 0].T
    np.testing.assert_allclose(model(x)[0], expected, rtol=1e-4, atol=1e-5)


def pytorch_rnn(kind, x, w, u):
    """Returns the last state by PyTorch's formulas and order of gates, without biases."""
    size, h = u.shape[1], np.zeros((len(x), u.shape[1]))
    c = h

    def sigmoid(a):
        return 1 / (1 + np.exp(-a))

    for t in range(x.shape[1]):
        a, b = x[:, t] @ w.T, h @ u.T
        gates = [slice(i * size, (i + 1) * size) for i in range(len(w) // size)]
        if kind == "SimpleRNN":
            h = np.tanh(a + b)
        elif kind == "LSTM":
            i, f, g, o = ((a + b)[:, gate] for gate in gates)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
        else:
            r, z = (sigmoid((a + b)[:, gate]) for gate in gates[:2])
            h = (1 - z) * np.tanh(a[:, gates[2]] + r * b[:, gates[2]]) + z * h
    return h


@pytest.mark.parametrize(("kind", "gates"), [("SimpleRNN", 1), ("LSTM", 4), ("GRU", 3)])
def test_recurrent_layers(kind, gates, tmp_path):
    size = 3 * gates  # of the inputs, so that the kernel's shape does not tell
    w, u, x = normal(3 * gates, size), normal(3 * gates, 3), normal(2, 4, size)
    layer = getattr(layers, kind)(3, use_bias=False, name="r")
    tensors = {"rnn.weight_ih_l0": w, "rnn.weight_hh_l0": u}
    model = loaded(layer, (4, size), tensors, tmp_path, {"r/.*cell": "rnn"})
    np.testing.assert_allclose(model(x), pytorch_rnn(kind, x, w, u), rtol=1e-4, atol=1e-5)


def test_a_gru_of_another_formula(tmp_path):
    layer = layers.GRU(3, use_bias=False, reset_after=False, name="r")
    tensors = {"rnn.weight_ih_l0": normal(9, 9), "rnn.weight_hh_l0": normal(9, 3)}
    with pytest.raises(PlanError, match="with reset_after=False, whose formula differs from torch"):
        loaded(layer, (4, 9), tensors, tmp_path, {"r/.*cell": "rnn"})


@keras.saving.register_keras_serializable("tests")
class Cubic(keras.layers.Layer):
    """A layer with a kernel whose order of axes no other layer has."""

    def __init__(self, rank, **kwargs):
        super().__init__(**kwargs)
        self.rank = rank

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=[4] * self.rank, name="kernel")
        self.scale = self.add_weight(shape=[1, 1, 4], name="scale")
        self.built = True

    def call(self, inputs):
        return inputs @ self.kernel * self.scale


def test_layers_that_are_not_keras_own(tmp_path):
    weight, scale, x = normal(4, 4), normal(1, 1, 4), normal(1, 2, 4)
    tensors = {"m.weight": weight, "m.scale": scale}
    mapping = {"c/kernel": "m.weight", "c/scale": "m.scale"}
    with pytest.raises(PlanError) as caught:
        loaded(Cubic(2, name="c"), (2, 4), tensors, tmp_path, mapping)
    assert "'c/kernel' belongs to a Cubic, and tfwd does not know" in str(caught.value)
    assert "map to Key('m.weight', transposed=True) if the file has the" in str(caught.value)
    assert "'c/scale'" not in str(caught.value)  # which have only one order
    for transposed, kernel in ((True, weight.T), (False, weight)):
        mapping = {
            "c/kernel": Key("m.weight", transposed=transposed),
            "c/scale": "m.scale",
        }
        model = loaded(Cubic(2, name="c"), (2, 4), tensors, tmp_path, mapping)
        np.testing.assert_allclose(model(x), x @ kernel * scale, rtol=1e-4, atol=1e-5)
    tensors["m.weight"] = normal(4, 4, 4)
    mapping["c/kernel"] = Key("m.weight", transposed=True)
    with pytest.raises(PlanError, match=r"write \(4, 4, 4\) to the file in Keras's order of axes"):
        loaded(Cubic(3, name="c"), (4, 4), tensors, tmp_path, mapping)


def test_files_whose_keys_are_paths_are_as_keras_has_them(tmp_path):
    tensors = {"c/kernel": normal(4, 4), "c/scale": normal(1, 1, 4)}
    for mapping in (None, {"c/kernel": "c/kernel", "c/scale": "c/scale"}):
        model = loaded(Cubic(2, name="c"), (2, 4), tensors, tmp_path, mapping)
        np.testing.assert_array_equal(model.layers[-1].kernel, tensors["c/kernel"])


def test_normalizations(tmp_path):
    names = ("weight", "bias", "running_mean", "running_var")
    tensors = {f"n.{name}": abs(normal(4)) + 0.5 for name in names}
    tensors["n.num_batches_tracked"] = np.array(7)  # a count, which is no weight
    x = normal(3, 4)
    model = loaded(layers.BatchNormalization(name="n"), (4,), tensors, tmp_path, {"n": "n"})
    scale = tensors["n.weight"] / np.sqrt(tensors["n.running_var"] + 1e-3)
    expected = (x - tensors["n.running_mean"]) * scale + tensors["n.bias"]
    np.testing.assert_allclose(model(x, training=False), expected, rtol=1e-4, atol=1e-5)


def test_names_of_normalizations_are_whole_names(tmp_path):
    """Checks that `gamma` in the name of a layer is not the name of a weight."""
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


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4)])
def test_a_normalization_over_several_axes_has_no_known_layout(shape, tmp_path):
    """Checks that the advice does not transpose a gain, which has no outputs."""
    axes = list(range(1, len(shape) + 1))
    layer, x = layers.LayerNormalization(axis=axes, name="n"), normal(3, *shape)
    gain, shift = normal(*shape), normal(*shape)
    tensors = {"n.weight": gain, "n.bias": shift}
    with pytest.raises(PlanError, match="'n/gamma' belongs to a LayerNorm.*in Keras's") as error:
        loaded(layer, shape, tensors, tmp_path, {"n": "n"})
    assert "transposed=True" not in str(error.value)
    keys = {f"n/{k}": Key(f"n.{n}", transposed=False) for k, n in NAMES_OF_NORMALIZATIONS}
    centered = x - x.mean(tuple(axes), keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(tuple(axes), keepdims=True) + 1e-3)
    model = loaded(layer, shape, tensors, tmp_path, keys)
    np.testing.assert_allclose(model(x), scaled * gain + shift, rtol=1e-4, atol=1e-5)


@needs_keras3("enable_lora")
@pytest.mark.parametrize("is_matrix", [True, False])
def test_low_rank_matrices_of_an_einsum(is_matrix, tmp_path):
    """Keras's first matrix has all axes of the kernel but the last one."""
    equation, shape = ("abc,cd->abd", (None, 6)) if is_matrix else ("abc,cde->abde", (None, 2, 3))
    layer = layers.EinsumDense(equation, output_shape=shape, name="e")
    model = keras.Sequential([keras.Input((4, 8)), layer])
    layer.enable_lora(2)
    x, w, last = normal(3, 4, 8), normal(6, 8), shape[-1]
    a, b = normal(*layer.kernel.shape[:-1], 2), normal(last, 2)
    tensors = {"e.weight": w, "A.weight": a.T.copy() if is_matrix else a, "B.weight": b}
    save_file(tensors, tmp_path / "model.safetensors")
    keys = {"e/kernel": "e.weight", "e/lora_kernel_b": Key("B.weight", transposed=True)}
    advice = r"transposed=True\) if" if is_matrix else r"write \(8, 2, 2\) to the file in Keras's"
    with pytest.raises(PlanError, match=f"'e/lora_kernel_a' belongs to a EinsumDense.*{advice}"):
        load(model, tmp_path, mapping={**keys, "e/lora_kernel_a": "A.weight"})
    load(
        model, tmp_path, mapping={**keys, "e/lora_kernel_a": Key("A.weight", transposed=is_matrix)}
    )
    kernel = w.T.reshape(8, *shape[1:]) + a @ b.T
    np.testing.assert_allclose(model(x), np.tensordot(x, kernel, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "slopes"), [([1, 2], (4,)), ([1, 2, 3], (1,)), (None, (4,)), ([1], (4,))]
)
def test_slopes_of_a_prelu(axes, slopes, tmp_path):
    """Checks PyTorch's slopes: one for each channel, or a single one."""
    shape = (5, 6, 4) if axes and len(axes) > 1 else (6, 4) if axes else (4,)
    slope, x = normal(*slopes), normal(2, *shape)
    layer = layers.PReLU(shared_axes=axes, name="p")
    model = loaded(layer, shape, {"act.weight": slope}, tmp_path, {"p": "act"})
    np.testing.assert_allclose(model(x), np.where(x > 0, x, slope * x), rtol=1e-5)


def test_a_transposed_convolution_of_flax(tmp_path):
    """Checks the conversion in the docs. Flax spreads the image by the stride, and correlates."""
    x, kernel = normal(1, 4, 5, 3), normal(3, 2, 3, 4)
    spread = np.zeros((1, 7, 9, 3), "float32")
    spread[:, ::2, ::2] = x
    spread = np.pad(spread, ((0, 0), (2, 2), (1, 1), (0, 0)))  # without the padding of "valid"
    expected = np.zeros((1, 9, 10, 4))
    for i, j in np.ndindex(3, 2):
        expected += spread[:, i : i + 9, j : j + 10] @ kernel[i, j]
    layer = layers.Conv2DTranspose(4, (3, 2), strides=2, use_bias=False, name="c")
    tensors = {"c.kernel": np.ascontiguousarray(kernel[::-1, ::-1].swapaxes(2, 3))}
    model = loaded(layer, (4, 5, 3), tensors, tmp_path, {"c": "c"})
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


class LayerScale(layers.Layer):
    """A factor for each channel, as in ConvNeXt."""

    def __init__(self, shape, **kwargs):
        super().__init__(**kwargs)
        self.shape = shape

    def build(self, shape):
        self.gamma = self.add_weight(name="gamma", shape=self.shape)

    def call(self, x):
        return x * self.gamma


@pytest.mark.parametrize("in_file", [(4,), (4, 1, 1), (1, 4, 1, 1)])
@pytest.mark.parametrize("shape", [(4,), (1, 1, 4)])
def test_a_factor_for_each_channel(shape, in_file, tmp_path):
    """Checks that axes of size 1 are added or removed, for a weight with one other axis."""
    gamma, x = normal(4), normal(2, 3, 5, 4)
    tensors = {"s.layer_scale": gamma.reshape(in_file)}
    mapping = {"s/gamma": "s.layer_scale"}
    model = loaded(LayerScale(shape, name="s"), (3, 5, 4), tensors, tmp_path, mapping)
    np.testing.assert_allclose(model(x), x * gamma, rtol=1e-5)


def test_a_table_of_positions_with_an_axis_for_the_examples(tmp_path):
    table = normal(1, 5, 5)
    model = loaded(layers.Embedding(5, 5, name="p"), (3,), {"p": table}, tmp_path, {"p": "p"})
    np.testing.assert_array_equal(model(np.array([[4, 0, 1]])), table[:, [4, 0, 1]])


@pytest.mark.parametrize("rows", [4, 3])
def test_a_table_with_the_features_first(rows, tmp_path):
    """Checks that `transposed=True` is refused, which a square table would ignore."""
    table, ids = normal(4, rows), np.array([[2, 0]])
    model = keras.Sequential([keras.Input((2,)), layers.Embedding(rows, 4, name="e")])
    save_file({"e": table}, tmp_path / "model.safetensors")
    with pytest.raises(PlanError, match="write the transposed table to the file if the file has"):
        load(model, tmp_path, mapping={"e/embeddings": Key("e", transposed=True)})
    save_file({"e": np.ascontiguousarray(table.T)}, tmp_path / "model.safetensors")
    load(model, tmp_path, mapping={"e/embeddings": "e"})
    np.testing.assert_array_equal(model(ids), table.T[ids])


def test_a_bias_has_one_axis(tmp_path):
    """Checks that a kernel with one output is no bias, so that a wrong mapping is found."""
    tensors = {"d.weight": normal(3, 4), "d.bias": normal(1, 3)}
    with pytest.raises(PlanError, match=r"'d/bias' is \(3,\); but key 'd.bias' is \(1, 3\)"):
        loaded(layers.Dense(3, name="d"), (4,), tensors, tmp_path, {"d": "d"})
