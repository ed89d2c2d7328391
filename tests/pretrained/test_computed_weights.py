"""Tensors from which PyTorch computes a weight: spectral and weight normalization, and pruning.

The oracle is the norm of NumPy. In PyTorch the layer multiplies by `original / sigma`, also in
evaluation, so a model with `original` as its kernel would be another model.
"""

import keras
import numpy as np
import pytest
from flattened_images import saved, sequential
from stack_marks import needs_keras3

from tfwd.layers import Parametrized
from tfwd.parametrizations import WeightNorm
from tfwd.pretrained import Key, PlanError, load

RNG = np.random.default_rng(0)
layers = keras.layers
X = RNG.normal(size=(2, 4)).astype("float32")
W, U, V = RNG.normal(size=(3, 4)), RNG.normal(size=3), RNG.normal(size=4)

FILES = {
    "spectral_norm": {"f.weight_orig": W, "f.weight_u": U, "f.weight_v": V},
    "spectral normalization as a parametrization": {
        "f.parametrizations.weight.original": W,
        "f.parametrizations.weight.0._u": U,
        "f.parametrizations.weight.0._v": V,
    },
    "pruning": {"f.weight_orig": W, "f.weight_mask": W > 0},
    "weight_norm": {"f.weight_v": W, "f.weight_g": U[:, np.newaxis]},
    "weight normalization as a parametrization": {
        "f.parametrizations.weight.original1": W,
        "f.parametrizations.weight.original0": U[:, np.newaxis],
    },
    "a function without tensors": {"f.parametrizations.weight.original": W},
}


@pytest.mark.parametrize("kind", FILES)
def test_a_tensor_that_is_no_weight(kind, tmp_path):
    model = sequential(keras.Input((4,)), layers.Dense(3, use_bias=False, name="f"))
    key, *others = FILES[kind]
    before = model.get_weights()
    with pytest.raises(PlanError, match=f"computes the weight from '{key}'.*torch.nn.utils") as e:
        load(model, saved(tmp_path, FILES[kind]), mapping={"f/kernel": key}, ignore=others)
    assert not others or others[0] in str(e.value)
    np.testing.assert_array_equal(model.get_weights(), before)


@needs_keras3("SpectralNormalization")
@pytest.mark.parametrize("kind", [kind for kind in FILES if "spectral" in kind])
def test_spectral_normalization_in_both_libraries(kind, tmp_path):
    """Keras divides by the spectral norm in training only, and keeps the result."""
    dense = layers.SpectralNormalization(layers.Dense(3, use_bias=False, name="f"), name="s")
    model = sequential(keras.Input((4,)), dense)
    w, u, _ = FILES[kind]
    folder = saved(tmp_path, {w: W, u: U[np.newaxis]})
    with pytest.raises(PlanError, match=f"computes the weight from '{w}' and '{u}'"):
        load(model, folder, mapping={"s/f/kernel": w, "s/vector_u": u})


@pytest.mark.parametrize("kind", [kind for kind in FILES if "weight" in kind])
def test_weight_normalization_that_the_model_computes(kind, tmp_path):
    model = sequential(
        keras.Input((4,)),
        Parametrized(layers.Dense(3, use_bias=False), {"kernel": WeightNorm(gain=True)}, name="f"),
    )
    v, g = FILES[kind]
    load(model, saved(tmp_path, FILES[kind]), mapping={".*/kernel": v, ".*gain": g})
    weight = W / np.linalg.norm(W, axis=1, keepdims=True) * U[:, np.newaxis]
    np.testing.assert_allclose(model(X), X @ weight.T, rtol=1e-4, atol=1e-5)


class Symmetric(layers.Layer):
    """A user's layer with the function of the parametrization in its call."""

    def build(self, shape):
        self.original = self.add_weight(name="original", shape=(shape[-1], shape[-1]))

    def call(self, x):
        return x @ (self.original + keras.ops.transpose(self.original))


def test_a_function_that_a_users_layer_computes(tmp_path):
    w = RNG.normal(size=(4, 4))
    model = sequential(keras.Input((4,)), Symmetric(name="f"))
    key = "f.parametrizations.weight.original"
    load(model, saved(tmp_path, {key: w}), mapping={"f/original": Key(key, transposed=True)})
    np.testing.assert_allclose(model(X), X @ (w + w.T), rtol=1e-4, atol=1e-5)


@needs_keras3("SpectralNormalization")
def test_a_spectral_normalization_with_the_computed_weight(tmp_path):
    """Checks the advice of the error, behind a flattened image `[2, 3, 4]`."""
    image = RNG.normal(size=(2, 2, 3, 4)).astype("float32")
    convolution = layers.Conv2D(4, 1, use_bias=False, name="c")
    dense = layers.SpectralNormalization(layers.Dense(5, use_bias=False, name="f"), name="s")
    model = sequential(keras.Input((2, 3, 4)), convolution, layers.Flatten(), dense)
    c, w, u = RNG.normal(size=(4, 4, 1, 1)), RNG.normal(size=(5, 24)), RNG.normal(size=(1, 5))
    folder = saved(tmp_path, {"c.weight": c, "f.weight": w / np.linalg.norm(w, 2), "u": u})
    load(model, folder, mapping={"c": "c", "s/f": "f", "s/vector_u": "u"})
    flat = np.einsum("nhwi,oi->nohw", image, c[..., 0, 0]).reshape(2, 24)
    expected = flat @ w.T / np.linalg.norm(w, 2)
    np.testing.assert_allclose(model(image), expected, rtol=1e-4, atol=1e-5)


def test_the_copy_of_weight_dropout(tmp_path):
    """AWD-LSTM of PyTorch has its weight beside the copy that its last step dropped."""
    model = sequential(keras.Input((3, 4)), layers.LSTM(2, use_bias=False, name="r"))
    raw = RNG.normal(size=(8, 2))
    stored = {"r.module.weight_ih_l0": RNG.normal(size=(8, 4)), "r.weight_hh_l0_raw": raw}
    stored["r.module.weight_hh_l0"] = raw * (RNG.uniform(size=raw.shape) < 0.5)
    folder, kernel = saved(tmp_path, stored), {"r/.*/kernel": "r.module.weight_ih_l0"}
    recurrent = {"r/.*/recurrent_kernel": "r.module.weight_hh_l0"}
    with pytest.raises(PlanError, match="is the dropped copy of 'r.weight_hh_l0_raw'"):
        load(model, folder, mapping=kernel | recurrent, ignore=".*_raw")
    recurrent = {"r/.*/recurrent_kernel": "r.weight_hh_l0_raw"}
    load(model, folder, mapping=kernel | recurrent, ignore="r.module.weight_hh_l0")
    np.testing.assert_allclose(model.layers[0].cell.recurrent_kernel, raw.T, rtol=1e-6)
