"""Gates of recurrent layers under keys that show no order, and NumPy's formulas."""

import keras
import numpy as np
import pytest
from flattened_images import saved

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 4, 5)).astype("float32")
UNITS = 3
PATHS = {"w": "(.*/)?kernel", "u": "(.*/)?recurrent_kernel", "b": "(.*/)?bias"}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm(w, u, b, gates):
    """Returns the last state of an LSTM with its gates in any order, such as "ifog"."""
    h = c = np.zeros((2, UNITS))
    for t in range(4):
        parts = np.split(X[:, t] @ w + h @ u + b, 4, 1)
        gate = dict(zip(gates, parts, strict=True))
        c = sigmoid(gate["f"]) * c + sigmoid(gate["i"]) * np.tanh(gate["g"])
        h = sigmoid(gate["o"]) * np.tanh(c)
    return h


def gru(w, u):
    """Returns the last state of a GRU that resets the state before the product. Gates: z, r, n."""
    h = np.zeros((2, UNITS))
    wz, wr, wn = np.split(w, 3, 1)
    uz, ur, un = np.split(u, 3, 1)
    for t in range(4):
        z, r = sigmoid(X[:, t] @ wz + h @ uz), sigmoid(X[:, t] @ wr + h @ ur)
        h = z * h + (1 - z) * np.tanh(X[:, t] @ wn + (r * h) @ un)
    return h


def tensors(gates):
    sizes = {"w": (5, gates * UNITS), "u": (UNITS, gates * UNITS), "b": gates * UNITS}
    return {name: RNG.normal(size=size) for name, size in sizes.items()}


def in_file(folder, kind, weights):
    """Writes weights as `nn.Linear` of PyTorch has them, or as NumPy has them."""
    if kind == "npz":
        np.savez(folder / "model.npz", **weights)
        return dict(zip("wub", "wub", strict=True))
    names = {"w": "cell.x.weight", "u": "cell.h.weight", "b": "cell.x.bias"}
    saved(folder, {names[k]: value.T for k, value in weights.items()})
    return names


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_an_lstm_with_other_gates(kind, tmp_path):
    """Checks the gates input, forget, output, cell, which many handwritten LSTMs have."""
    weights = tensors(4)
    names = in_file(tmp_path, kind, weights)
    layer = layers.LSTM(UNITS, name="r")
    layer(X)
    with pytest.raises(PlanError, match=r"(?s)/kernel' has gates, .*recurrent_kernel' has gates"):
        load(layer, tmp_path, mapping={PATHS[k]: names[k] for k in names})
    order = np.arange(4 * UNITS).reshape(4, UNITS)[[0, 1, 3, 2]].ravel()
    in_keras = {k: value[..., order] for k, value in weights.items()}
    np.savez(tmp_path / "model.npz", **in_keras)
    mapping = {PATHS[k]: Key(k, transposed=False) for k in names}
    load(layer, tmp_path / "model.npz", mapping=mapping)
    np.testing.assert_allclose(layer(X), lstm(**weights, gates="ifog"), rtol=1e-4, atol=1e-5)


def test_an_lstm_like_pytorch_with_other_names(tmp_path):
    weights = tensors(4)
    names = in_file(tmp_path, "safetensors", weights)
    layer = layers.LSTM(UNITS, name="r")
    layer(X)
    mapping = {PATHS[k]: Key(names[k], transposed=True if k != "b" else None) for k in names}
    load(layer, tmp_path, mapping=mapping)
    np.testing.assert_allclose(layer(X), lstm(**weights, gates="ifgo"), rtol=1e-4, atol=1e-5)


def test_names_of_awd_lstm_show_the_gates(tmp_path):
    weights = tensors(4)
    keys = {"w": "weight_ih_l0", "u": "weight_hh_l0_raw"}
    saved(tmp_path, {key: weights[k].T for k, key in keys.items()})
    layer = layers.LSTM(UNITS, use_bias=False, name="r")
    layer(X)
    load(layer, tmp_path, mapping={PATHS[k]: key for k, key in keys.items()})
    expected = lstm(weights["w"], weights["u"], 0, "ifgo")
    np.testing.assert_allclose(layer(X), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reset_after", [False, True])
def test_a_gru_that_resets_before_the_product(reset_after, tmp_path):
    """Checks that neither formula loads without an entry, and that the advice gives the formula."""
    weights = {k: value for k, value in tensors(3).items() if k != "b"}
    names = in_file(tmp_path, "safetensors", weights)
    layer = layers.GRU(UNITS, use_bias=False, reset_after=reset_after, name="r")
    layer(X)
    mapping = {PATHS[k]: names[k] for k in weights}
    with pytest.raises(PlanError, match=r"like Keras's GRU.* transposed=False\)") as error:
        load(layer, tmp_path, mapping=mapping)
    assert ("for a file of torch.nn.GRU" in str(error.value)) is not reset_after
    if not reset_after:
        np.savez(tmp_path / "model.npz", **weights)
        mapping = {PATHS[k]: Key(k, transposed=False) for k in weights}
        load(layer, tmp_path / "model.npz", mapping=mapping)
        np.testing.assert_allclose(layer(X), gru(**weights), rtol=1e-4, atol=1e-5)
