"""Biases of PyTorch's recurrent layers, which are two tensors, and one variable of Keras."""

import keras
import numpy as np
import pytest
from flattened_images import saved

from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
X = RNG.normal(size=(2, 4, 5)).astype("float32")


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gru(weights, biases):
    """Returns the last state of PyTorch's GRU. Its gates are reset, update and new."""
    h = np.zeros((2, 3))
    for t in range(4):
        given = np.split(X[:, t] @ weights["r.weight_ih_l0"].T + biases[0], 3, 1)
        kept = np.split(h @ weights["r.weight_hh_l0"].T + biases[1], 3, 1)
        reset, update = sigmoid(given[0] + kept[0]), sigmoid(given[1] + kept[1])
        h = (1 - update) * np.tanh(given[2] + reset * kept[2]) + update * h
    return h


def kernels(units):
    return {
        "r.weight_ih_l0": RNG.normal(size=(units, 5)),
        "r.weight_hh_l0": RNG.normal(size=(units, 3)),
    }


def mapping(bias):
    names = {"kernel": "r.weight_ih_l0", "recurrent_kernel": "r.weight_hh_l0"}
    return {**{f"(.*/)?{name}": key for name, key in names.items()}, "(.*/)?bias": bias}


@pytest.mark.parametrize("kind", ["LSTM", "SimpleRNN", "GRU"])
@pytest.mark.parametrize("which", ["bias_ih_l0", "bias_hh_l0"])
def test_one_of_two_biases_is_refused(kind, which, tmp_path):
    layer = getattr(layers, kind)(3, name="r")
    layer(X)
    shape = layer.weights[2].shape
    units = shape[-1]
    file = saved(tmp_path, kernels(units), {f"r.{which}": RNG.normal(size=shape)})
    with pytest.raises(PlanError, match="PyTorch has two biases, bias_ih and bias_hh: "):
        load(layer, file, mapping=mapping(f"r.{which}"))


@pytest.mark.parametrize("which", ["bias_ih_l0", "bias_hh_l0"])
def test_half_of_a_sum_is_refused_beside_the_other_half(which, tmp_path):
    """Checks that `transposed=False` alone, without the sum, is no answer to the error."""
    layer = layers.LSTM(3, name="r")
    layer(X)
    halves = {f"r.bias_{k}_l0": RNG.normal(size=12) for k in ("ih", "hh")}
    file, key = saved(tmp_path, kernels(12), halves), Key(f"r.{which}", transposed=False)
    with pytest.raises(PlanError, match=r"as 'r.bias_l0', and map to Key\('r.bias_l0', trans"):
        load(layer, file, mapping=mapping(key), ignore=halves.keys() - {f"r.{which}"})
    file = saved(tmp_path, kernels(12), halves, {"r.bias_l0": sum(halves.values())})
    key = Key("r.bias_l0", transposed=False)
    load(layer, file, mapping=mapping(key), ignore="r.bias_[ih]h.*")
    np.testing.assert_allclose(layer.weights[2], sum(halves.values()), rtol=1e-6)


def test_a_sum_of_biases_is_loaded(tmp_path):
    layer, weights, bias = layers.LSTM(3, name="r"), kernels(12), RNG.normal(size=12)
    layer(X)
    file = saved(tmp_path, weights, {"r.bias": bias})
    load(layer, file, mapping=mapping("r.bias"))
    np.testing.assert_allclose(layer.weights[2], bias, rtol=1e-6)


def test_the_gates_of_a_stacked_bias(tmp_path):
    """Checks that the order of gates must be Keras's, and said to be so."""
    layer, weights, biases = layers.GRU(3, name="r"), kernels(9), RNG.normal(size=(2, 9))
    layer(X)
    file = saved(tmp_path, weights, {"r.bias": biases})
    for bias in ("r.bias", Key("r.bias", transposed=True)):
        with pytest.raises(PlanError, match="gates in the order update, reset, new"):
            load(layer, file, mapping=mapping(bias))
    exchanged = np.concatenate([biases[:, 3:6], biases[:, :3], biases[:, 6:]], 1)
    file = saved(tmp_path, weights, {"r.bias": exchanged})
    load(layer, file, mapping=mapping(Key("r.bias", transposed=False)))
    np.testing.assert_allclose(layer(X), gru(weights, biases), rtol=1e-4, atol=1e-5)


def test_a_file_in_keras_style(tmp_path):
    layer = layers.GRU(3, name="r")
    layer(X)
    given = [RNG.normal(size=weight.shape) for weight in layer.weights]
    names = ("r.kernel", "r.recurrent_kernel", "r.bias")
    keys = dict(zip(("kernel", "recurrent_kernel", "bias"), names, strict=True))
    load(
        layer,
        saved(tmp_path, dict(zip(names, given, strict=True))),
        mapping={f"(.*/)?{name}": key for name, key in keys.items()},
    )
    for variable, value in zip(layer.weights, given, strict=True):
        np.testing.assert_allclose(variable, value, rtol=1e-6)


def test_weights_of_older_programs_for_tensorflow(tmp_path):
    """Checks that a square kernel with the name `weights` is not transposed."""
    layer, kernel = layers.Dense(4, name="fc"), RNG.normal(size=(4, 4)).astype("float32")
    layer(np.zeros((1, 4), "float32"))
    path = tmp_path / "old.npz"
    np.savez(path, **{"fc/weights": kernel, "fc/biases": np.zeros(4, "float32")})
    load(layer, path, mapping={"(.*/)?kernel": "fc/weights", "(.*/)?bias": "fc/biases"})
    np.testing.assert_array_equal(layer.kernel, kernel)
