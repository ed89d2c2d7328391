"""Tests of whose order a tensor has by the name of its key: PyTorch's order or Keras's.

Oracles: NumPy with the formula of the layers, and PyTorch's order of a flattened image, which has
the channels first.
"""

import keras
import numpy as np
import pytest
from keras import layers
from safetensors.numpy import save_file

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
FLAT = {"keras": X.reshape(2, 24), "torch": X.transpose(0, 3, 1, 2).reshape(2, 24)}


def normal(*shape):
    return RNG.normal(size=shape).astype("float32")


def head(*parts, to_image=False):
    """Model on an image `[2, 3, 4]`, whose parts are behind `Flatten`; or that makes an image."""
    if to_image:
        return keras.Sequential(
            [keras.Input((5,)), *parts, layers.Reshape((2, 3, 4)), layers.AveragePooling2D(1)]
        )
    first = layers.AveragePooling2D(1)  # an image in both libraries
    return keras.Sequential([keras.Input((2, 3, 4)), first, layers.Flatten(), *parts])


def saved(folder, kind, tensors):
    path = folder / f"weights.{kind}"
    if kind == "npz":
        np.savez(path, **tensors)
    else:
        save_file(tensors, path)
    return path


def test_a_bias_beside_a_kernel_with_an_unclear_name(tmp_path):
    """An npz file has Keras's order by default: "bias" has the order of the kernel "W"."""
    w, b, x = normal(5, 24), normal(24), normal(2, 5)
    model = head(layers.Dense(24, name="f"), to_image=True)
    path = saved(tmp_path, "npz", {"f.W": w, "f.bias": b})
    load(model, path, mapping={"f/kernel": "f.W", "f/bias": "f.bias"})
    np.testing.assert_allclose(model(x), (x @ w + b).reshape(2, 2, 3, 4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
@pytest.mark.parametrize("separator", ["/", "."])
def test_a_normalization_with_names_of_flax(kind, separator, tmp_path):
    """Flax calls gamma "scale" and beta "bias", and has images as Keras has them."""
    names = {"gamma": "scale", "beta": "bias", "moving_mean": "mean", "moving_variance": "var"}
    values = {name: normal(24) for name in names.values()}
    values["var"] = np.abs(values["var"]) + 0.5
    w, b = normal(24, 5), normal(5)
    model = head(layers.BatchNormalization(name="n", epsilon=1e-3), layers.Dense(5, name="f"))
    tensors = {separator.join(("n", name)): value for name, value in values.items()}
    tensors |= {separator.join(("f", "kernel")): w, separator.join(("f", "bias")): b}
    mapping = {f"n/{ours}": separator.join(("n", name)) for ours, name in names.items()}
    mapping |= {f"f/{name}": separator.join(("f", name)) for name in ("kernel", "bias")}
    load(model, saved(tmp_path, kind, tensors), mapping=mapping)
    normalized = (FLAT["keras"] - values["mean"]) / np.sqrt(values["var"] + 1e-3)
    features = normalized * values["scale"] + values["bias"]
    np.testing.assert_allclose(model(X), features @ w + b, rtol=1e-4, atol=1e-4)


def test_a_normalization_with_names_of_pytorch_beside_an_unclear_kernel(tmp_path):
    """Checks that "bias" has the order of the "weight" beside it, and not of other layers."""
    gamma, beta, w, b = normal(24), normal(24), normal(5, 24), normal(5)
    model = head(layers.BatchNormalization(name="n", epsilon=1e-3), layers.Dense(5, name="f"))
    tensors = {"n.weight": gamma, "n.bias": beta, "f.weight": w, "f.bias": b}
    tensors |= {"n.running_mean": np.zeros(24), "n.running_var": np.ones(24)}
    load(model, saved(tmp_path, "npz", tensors), mapping={"n": "n", "f": "f"})
    features = FLAT["torch"] / np.sqrt(1.001) * gamma + beta
    np.testing.assert_allclose(model(X), features @ w.T + b, rtol=1e-4, atol=1e-4)


def test_a_normalization_beside_a_kernel_in_keras_order(tmp_path):
    """Checks that features whose order one key states need a statement for the other weights."""
    gamma, beta, w = normal(24), normal(24), normal(24, 5)
    norm = layers.BatchNormalization(name="n", epsilon=1e-3)
    model = head(norm, layers.Dense(5, use_bias=False, name="f"))
    tensors = {"n.weight": gamma, "n.bias": beta, "f.weight": w}
    tensors |= {"n.running_mean": np.zeros(24), "n.running_var": np.ones(24)}
    path = saved(tmp_path, "safetensors", tensors)
    mapping = {"n": "n", "f": Key("f", transposed=False, flattened=())}
    with pytest.raises(PlanError, match=r"'n/gamma' has the same features as 'f/kernel'"):
        load(model, path, mapping=mapping)
    for order, given in (("torch", (4, 2, 3)), ("keras", ())):
        load(model, path, mapping={**mapping, "n": Key("n", flattened=given)})
        expected = np.empty_like(FLAT["keras"])
        scaled = FLAT[order] / np.sqrt(1.001) * gamma + beta
        expected = scaled
        if order == "torch":
            expected = scaled.reshape(2, 4, 2, 3).transpose(0, 2, 3, 1).reshape(2, 24)
        np.testing.assert_allclose(model(X), expected @ w, rtol=1e-4, atol=1e-4)


def test_a_shape_counts_for_the_bias_of_a_kernel_with_the_inputs_first(tmp_path):
    """PyTorch's kernel `[inputs, outputs]`, whose outputs are an image `[4, 2, 3]` there."""
    w, b, x = normal(5, 24), normal(24), normal(2, 5)
    model = head(layers.Dense(24, name="f"), to_image=True)
    path = saved(tmp_path, "safetensors", {"f.weight": w, "f.extra": b})
    kernel = Key("f.weight", transposed=False, unflattened=(4, 2, 3))
    load(model, path, mapping={"f/kernel": kernel, "f/bias": Key("f.extra", transposed=False)})
    expected = (x @ w + b).reshape(2, 4, 2, 3).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_bias_of_pytorch_beside_a_kernel_in_keras_order(tmp_path):
    """Checks that () for the kernel says nothing about PyTorch's order of the bias."""
    w, b, x = normal(5, 24), normal(24), normal(2, 5)
    model = head(layers.Dense(24, name="f"), to_image=True)
    path = saved(tmp_path, "safetensors", {"f.weight": w, "f.extra": b})
    mapping = {"f/kernel": Key("f.weight", transposed=False, unflattened=())}
    with pytest.raises(PlanError, match=r"'f/bias': .*unflattened=\(4, 2, 3\)"):
        load(model, path, mapping={**mapping, "f/bias": Key("f.extra", transposed=True)})
    bias = Key("f.extra", transposed=True, unflattened=(4, 2, 3))
    load(model, path, mapping={**mapping, "f/bias": bias})
    moved = b.reshape(4, 2, 3).transpose(1, 2, 0)
    expected = (x @ w).reshape(2, 2, 3, 4) + moved
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


class Gain(layers.Layer):
    """A layer with a factor for each feature."""

    def build(self, shape):
        self.g = self.add_weight(name="g", shape=(shape[-1],))

    def call(self, x):
        return x * self.g


def test_two_shapes_for_a_vector_of_a_users_layer(tmp_path):
    """Checks that one axis has one order. () twice is one order."""
    model, gains = head(Gain(name="g")), normal(24)
    path = saved(tmp_path, "safetensors", {"g.g": gains})
    both = Key("g.g", flattened=(), unflattened=(4, 2, 3))
    with pytest.raises(PlanError, match="'g/g' has one axis: give flattened= or unflattened="):
        load(model, path, mapping={"g/g": both})
    load(model, path, mapping={"g/g": Key("g.g", flattened=(), unflattened=())})
    np.testing.assert_allclose(model(X), FLAT["keras"] * gains, rtol=1e-5)


def test_the_inputs_first_in_an_order_that_nothing_proves(tmp_path):
    """The channels of an image are merged with its rows, so PyTorch may have another order."""
    flat = layers.Reshape((12, 2)), layers.Permute((2, 1)), layers.Flatten()
    model = keras.Sequential(
        [keras.Input((2, 3, 4)), layers.AveragePooling2D(1), *flat, layers.Dense(5, name="f")]
    )
    w, b = normal(24, 5), normal(5)
    path = saved(tmp_path, "safetensors", {"f.weight": w, "f.bias": b})
    with pytest.raises(PlanError, match=r"'f/kernel'.*transposed=False, flattened=\(\)\)"):
        load(model, path, mapping={"f": "f"})
    with pytest.raises(PlanError, match=r"'f/kernel'.* also give flattened=\(\) if the file has"):
        load(model, path, mapping={"f": Key("f", transposed=False)})
    load(model, path, mapping={"f": Key("f", transposed=False, flattened=())})
    features = X.reshape(2, 12, 2).transpose(0, 2, 1).reshape(2, 24)
    np.testing.assert_allclose(model(X), features @ w + b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_flat", [True, False])
def test_a_bias_of_an_einsum_beside_a_kernel_of_keras(is_flat, tmp_path):
    """Keras's attention has a bias of (heads, size), and PyTorch a vector."""
    layer = layers.EinsumDense("bti,ihs->bths", (None, 2, 3), bias_axes="hs", name="e")
    model = keras.Sequential([keras.Input((4, 5)), layer])
    w, b, x = normal(5, 2, 3), normal(2, 3), normal(2, 4, 5)
    tensors = {"e/kernel": w, "e/bias": b.reshape(6) if is_flat else b}
    load(model, saved(tmp_path, "safetensors", tensors), mapping={"e": "e"})
    np.testing.assert_allclose(model(x), np.einsum("bti,ihs->bths", x, w) + b, rtol=1e-4, atol=1e-5)


def cubes():
    """Layers whose weight `[4, 4, 4]` or `[4, 4]` may have either order of axes, by its shape."""
    return {
        "gamma": layers.LayerNormalization(axis=(1, 2, 3), center=False, name="n"),
        "alpha": layers.PReLU(name="n"),
        "kernel": layers.Dense(4, use_bias=False, name="n"),
    }


@pytest.mark.parametrize("last", cubes())
def test_a_shape_for_both_orders_in_a_file_with_names_of_both(last, tmp_path):
    """Checks a parameter of PyTorch that is called as in Keras."""
    layer = cubes()[last]
    model = keras.Sequential([keras.Input((4, 4, 4)), layer])
    value = normal(*layer.weights[0].shape)
    path = saved(tmp_path, "safetensors", {f"n.{last}": value, "other.weight": normal(3, 3)})
    with pytest.raises(PlanError, match=f"'n.{last}' ends as in Keras, but 'other.weight' in the"):
        load(model, path, mapping={"n": "n"}, ignore="other.*")
    load(model, path, mapping={"n": Key("n", transposed=False)}, ignore="other.*")
    np.testing.assert_array_equal(layer.get_weights()[0], value)


def test_a_shape_for_one_order_in_a_file_with_names_of_both(tmp_path):
    """Checks that a shape that only Keras's order has needs no option."""
    x, w = normal(2, 4), normal(4, 3)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, use_bias=False, name="n")])
    path = saved(tmp_path, "safetensors", {"n.kernel": w, "other.weight": normal(3, 3)})
    load(model, path, mapping={"n": "n"}, ignore="other.*")
    np.testing.assert_allclose(model(x), x @ w, rtol=1e-4, atol=1e-5)


def test_the_advice_for_a_cube_is_accepted(tmp_path):
    """The axes of a cube are equal, so no shape shows whether the channels are first."""
    norm = layers.BatchNormalization(name="n", center=False, scale=False)
    model = keras.Sequential([keras.Input((4, 4, 4)), layers.Reshape((64,)), norm])
    mean, variance = normal(64), np.abs(normal(64)) + 0.5
    tensors = {"n.running_mean": mean, "n.running_var": variance}
    path = saved(tmp_path, "safetensors", tensors)
    with pytest.raises(PlanError, match=r"flattened=\(\).*and not the channels first") as error:
        load(model, path, mapping={"n": "n"})
    assert "flattened=(4, 4, 4)" not in str(error.value)
    load(model, path, mapping={"n": Key("n", flattened=())})
    x = normal(2, 4, 4, 4)
    expected = (x.reshape(2, 64) - mean) / np.sqrt(variance + 1e-3)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_torch", [True, False])
def test_a_normalization_with_other_names_beside_a_kernel_of_pytorch(in_torch, tmp_path):
    """Checks `.npz` files whose names show PyTorch's order for a kernel, but not for its features.

    The oracle is NumPy on the image with the channels first.
    """
    norm = layers.LayerNormalization(epsilon=1e-5, name="norm")
    linear = layers.Dense(2, use_bias=False, name="fc")
    convolution = layers.Conv2D(4, 1, use_bias=False, name="conv")
    inputs = [keras.Input((3, 2, 5)), convolution, layers.Flatten()]
    model = keras.Sequential([*inputs, norm, linear])
    rng = np.random.default_rng(0)
    kernel, w = rng.normal(size=(4, 5, 1, 1)), rng.normal(size=(2, 24))
    gain, shift = rng.normal(size=24), rng.normal(size=24)
    x = rng.normal(size=(2, 3, 2, 5))
    flat = np.einsum("bhwi,oi->bohw", x, kernel[..., 0, 0]).reshape(2, -1)
    normal = (flat - flat.mean(1, keepdims=True)) / np.sqrt(flat.var(1, keepdims=True) + 1e-5)
    expected = (normal * gain + shift) @ w.T
    if not in_torch:
        gain, shift = (v.reshape(4, 3, 2).transpose(1, 2, 0).ravel() for v in (gain, shift))
    tensors = {"conv.weight": kernel, "fc.weight": w, "norm.g": gain, "norm.b": shift}
    path = tmp_path / "model.npz"
    np.savez(path, **{name: v.astype("float32") for name, v in tensors.items()})
    keys = {"conv": "conv", "fc": "fc", "norm/gamma": "norm.g", "norm/beta": "norm.b"}
    message = "'norm/gamma' has the same features as 'fc/kernel', and the file has 'fc.weight' in"
    with pytest.raises(PlanError, match=message):
        load(model, path, mapping=keys)
    options = {"transposed": True} if in_torch else {"transposed": False, "flattened": ()}
    keys |= {"norm/gamma": Key("norm.g", **options), "norm/beta": Key("norm.b", **options)}
    if not in_torch:
        keys["fc"] = Key("fc", flattened=(4, 3, 2))
    load(model, path, mapping=keys)
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-4)


def test_a_counter_of_pytorch_with_another_separator_is_no_weight(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.BatchNormalization(name="n")])
    values = dict(zip(("weight", "bias", "running_mean", "running_var"), range(1, 5), strict=True))
    tensors = {f"n/{name}": np.full(3, value, "float32") for name, value in values.items()}
    path = tmp_path / "model.npz"
    np.savez(path, **tensors, **{"n/num_batches_tracked": np.array(7)})
    names = {"gamma": "weight", "beta": "bias", "moving_mean": "running_mean"}
    names["moving_variance"] = "running_var"
    load(model, path, mapping={f"n/{ours}": f"n/{theirs}" for ours, theirs in names.items()})
    np.testing.assert_array_equal([w.numpy()[0] for w in model.weights], [1, 2, 3, 4])
