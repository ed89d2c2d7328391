"""Gains of `WeightNorm(gain=True)`, whose entries have the order of their weight in PyTorch.

The oracle is weight normalization in NumPy, on PyTorch's tensors: `w = g v / ||v||`.
"""

import keras
import numpy as np
import pytest
from flattened_images import saved, sequential

from tfwd.layers import Parametrized
from tfwd.parametrizations import WeightNorm
from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers


def normalized(v, g, axis):
    """Returns a weight of PyTorch from its direction and its gain."""
    other = tuple(i for i in range(v.ndim) if i != axis)
    return v / np.sqrt((v**2).sum(other, keepdims=True)) * np.expand_dims(g, other)


def test_outputs_that_become_an_image(tmp_path):
    x = RNG.normal(size=(2, 5)).astype("float32")
    v, g, k = RNG.normal(size=(24, 5)), RNG.uniform(1, 2, 24), RNG.normal(size=(3, 4, 1, 1))
    norm = {"kernel": WeightNorm(gain=True)}
    dense = Parametrized(layers.Dense(24, use_bias=False), norm, name="d")
    image = [layers.Reshape((2, 3, 4)), layers.Conv2D(3, 1, use_bias=False, name="c")]
    model = sequential(keras.Input((5,)), dense, *image)
    folder = saved(tmp_path, {"d.weight": v, "d.g": g, "c.weight": k})
    load(model, folder, mapping={"d/.*kernel": "d.weight", "d/.*gain": "d.g", "c": "c"})
    made = (x @ normalized(v, g, 0).T).reshape(2, 4, 2, 3)  # channels first
    expected = np.einsum("nchw,oc->nhwo", made, k[..., 0, 0])
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_inputs_that_are_a_flattened_image(tmp_path):
    x = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    v, g, k = RNG.normal(size=(5, 24)), RNG.uniform(1, 2, 24), RNG.normal(size=(4, 4, 1, 1))
    norm = {"kernel": WeightNorm(axis=0, gain=True)}
    dense = Parametrized(layers.Dense(5, use_bias=False), norm, name="d")
    convolution = layers.Conv2D(4, 1, use_bias=False, name="c")
    model = sequential(keras.Input((2, 3, 4)), convolution, layers.Flatten(), dense)
    folder = saved(tmp_path, {"d.weight": v, "d.g": g, "c.weight": k})
    load(model, folder, mapping={"d/.*kernel": "d.weight", "d/.*gain": "d.g", "c": "c"})
    flat = np.einsum("nhwc,oc->nohw", x, k[..., 0, 0]).reshape(2, 24)
    np.testing.assert_allclose(model(x), flat @ normalized(v, g, 1).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transposed", [None, False])
def test_gates_of_a_gru(transposed, tmp_path):
    """Checks the gates reset, update and new of PyTorch, and Keras's update, reset and new."""
    x = RNG.normal(size=(2, 4, 5)).astype("float32")
    norms = {name: WeightNorm(gain=True) for name in ("kernel", "recurrent_kernel")}
    layer = Parametrized(layers.GRU(3, use_bias=False), norms, name="r")
    layer(x)
    v = {"kernel": RNG.normal(size=(9, 5)), "recurrent_kernel": RNG.normal(size=(9, 3))}
    g = {name: RNG.uniform(1, 2, 9) for name in v}
    gates = [3, 4, 5, 0, 1, 2, 6, 7, 8]
    key_of = {"kernel": "weight_ih_l0", "recurrent_kernel": "weight_hh_l0"}
    stored = {key_of[k]: v[k] for k in v} | {f"{k}.g": g[k][:, np.newaxis] for k in v}
    if transposed is False:
        stored = {key: value[gates].T for key, value in stored.items()}
    paths = [weight.name for weight in layer.gains.weights]
    keys = {f"(.*/)?{k}": Key(key_of[k], transposed=transposed) for k in v}
    for k, path in zip(v, paths, strict=True):
        name = path.partition(":")[0].rpartition("/")[2]
        keys[f"(.*/)?{name}"] = Key(f"{k}.g", transposed=transposed)
    load(layer, saved(tmp_path, stored), mapping=keys)
    w, u = (normalized(v[k], g[k], 0) for k in v)
    h = np.zeros((2, 3))
    for t in range(4):
        given, kept = np.split(x[:, t] @ w.T, 3, 1), np.split(h @ u.T, 3, 1)
        reset, update = (1 / (1 + np.exp(-given[i] - kept[i])) for i in range(2))
        h = (1 - update) * np.tanh(given[2] + reset * kept[2]) + update * h
    np.testing.assert_allclose(layer(x), h, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1, 1)])
def test_a_convolution(shape, tmp_path):
    """Checks a gain with the axes of size 1 of PyTorch's `weight_g`, and without them."""
    x = RNG.normal(size=(2, 1, 1, 4)).astype("float32")
    v, g = RNG.normal(size=(3, 4, 1, 1)), RNG.uniform(1, 2, 3)
    norm = {"kernel": WeightNorm(gain=True)}
    layer = Parametrized(layers.Conv2D(3, 1, use_bias=False), norm, name="c")
    layer(x)
    folder = saved(tmp_path, {"c.weight": v, "c.g": g.reshape(shape)})
    load(layer, folder, mapping={"(.*/)?kernel": "c.weight", "(.*/)?kernel_gain": "c.g"})
    expected = np.einsum("nhwc,oc->nhwo", x, normalized(v, g, 0)[..., 0, 0])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


TRANSPOSED = {  # PyTorch's weight is [inputs, outputs, height, width], and Keras's axis -1 inputs
    "inputs": (0, -1),
    "outputs": (1, -2),
}


@pytest.mark.parametrize("built", TRANSPOSED)
@pytest.mark.parametrize("stored", TRANSPOSED)
def test_a_transposed_convolution(stored, built, tmp_path):
    """Checks that the shape of the gain in the file shows its axis, where all sizes are equal."""
    x = RNG.normal(size=(2, 1, 1, 4)).astype("float32")
    v, g = RNG.normal(size=(4, 4, 1, 1)), RNG.uniform(1, 2, 4)
    norm = {"kernel": WeightNorm(axis=TRANSPOSED[built][1], gain=True)}
    layer = Parametrized(layers.Conv2DTranspose(4, 1, use_bias=False), norm, name="c")
    layer(x)
    axis = TRANSPOSED[stored][0]
    gain = np.expand_dims(g, tuple({0, 1, 2, 3} - {axis}))
    folder = saved(tmp_path, {"c.weight_v": v, "c.weight_g": gain})
    mapping = {"(.*/)?kernel": "c.weight_v", "(.*/)?kernel_gain": "c.weight_g"}
    if stored != built:
        right = TRANSPOSED[stored][1] % 4
        with pytest.raises(PlanError, match=rf"Use WeightNorm\(axis={right}, gain=True\)"):
            load(layer, folder, mapping=mapping)
        return
    load(layer, folder, mapping=mapping)
    expected = np.einsum("nhwi,io->nhwo", x, normalized(v, g, axis)[..., 0, 0])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
@pytest.mark.parametrize("transposed", [True, False])
def test_the_axis_of_a_square_kernel(transposed, shape, tmp_path):
    """The outputs are axis 0 of PyTorch's kernel, and axis 1 of Keras's."""
    x = RNG.normal(size=(2, 4)).astype("float32")
    v, g = RNG.normal(size=(4, 4)), RNG.uniform(1, 2, 4)
    layer = Parametrized(
        layers.Dense(4, use_bias=False), {"kernel": WeightNorm(gain=True)}, name="f"
    )
    layer(x)
    folder = saved(tmp_path, {"v": v, "g": g.reshape(shape)})
    keys = {"kernel": "v", "kernel_gain": "g"}
    mapping = {f"(.*/)?{k}": Key(name, transposed=transposed) for k, name in keys.items()}
    if (shape == (4, 1)) != transposed:
        with pytest.raises(PlanError, match=r"WeightNorm\(axis=0, gain=True\)"):
            load(layer, folder, mapping=mapping)
        return
    load(layer, folder, mapping=mapping)
    weight = normalized(v, g, 0).T if transposed else normalized(v, g, 1)
    np.testing.assert_allclose(layer(x), x @ weight, rtol=1e-4, atol=1e-5)
