"""Numbers of a file in a variable of another dtype: rounded, too large, too small, not finite."""

import keras
import numpy as np
import pytest
from pretrained_plan_tools import MAPPING, layers, model_of, refused, rewrite, tensors_of
from safetensors.numpy import save_file
from stack_marks import needs_keras3

from tfwd.pretrained import Key, PlanError, load, plan
from tfwd.pretrained.number_checks import count_non_finite


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_other_dtypes_become_the_variables(folder, dtype):
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {key: value.astype(kind) for key, value in tensors_of().items()}
    save_file(tensors, folder / "model.safetensors")
    model = model_of()
    load(model, folder, mapping=MAPPING)
    expected = tensors["enc.0.weight"].astype("float32").T
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), expected)


def test_numbers_that_are_too_large(folder):
    tensors = tensors_of()
    tensors["enc.1.weight"][1, 2] = -7e4
    save_file(tensors, folder / "model.safetensors")
    model = model_of(dtype="float16")
    refused(
        model, folder, "'layer_1/kernel' is float16, and key 'enc.1.weight' reaches 7e+04, which is"
    )
    plan(model, folder, mapping=MAPPING).apply(allow_overflow=True)
    assert np.isneginf(model.layers[1].kernel.numpy()[2, 1])
    load(model_of(dtype="bfloat16"), folder, mapping=MAPPING)


def test_integers_are_no_floats(folder):
    rewrite(folder, **{"enc.0.bias": np.zeros(3, "int32")})
    refused(model_of(), folder, "'layer_0/bias' is float32, and key 'enc.0.bias' is int32")


def test_special_numbers_stay_as_they_are(folder):
    bits = np.array([0x7FC12345, 0x80000000, 0xFF800000], np.uint32)
    rewrite(folder, **{"enc.0.bias": bits.view(np.float32)})
    model = model_of()
    with pytest.warns(UserWarning, match="was loaded, but 2 of 3 numbers of 'enc.0.bias' are not"):
        load(model, folder, mapping=MAPPING)
    found = model.layers[0].bias.numpy().view(np.uint32)
    np.testing.assert_array_equal(found, bits)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(folder, dtype, value):
    """Checks that a warning names some; a tensor of nothing else is an error."""
    import ml_dtypes

    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    tensors = {key: array.astype(kind) for key, array in tensors_of().items()}
    tensors["enc.1.weight"][1, 2] = tensors["out.weight"][0, 0] = value
    save_file(tensors, folder / "model.safetensors")
    model = model_of(dtype="float64" if dtype == "float64" else "float32")
    told = "1 of 9 numbers of 'enc.1.weight' are not finite; 1 of 6 numbers of 'out.weight' are not"
    with pytest.warns(UserWarning, match=told):
        load(model, folder, mapping=MAPPING)
    tensors["enc.1.weight"][:] = value
    save_file(tensors, folder / "model.safetensors")
    refused(model, folder, "key 'enc.1.weight', for 'layer_1/kernel', has no finite number: get")


def test_large_numbers_are_finite(folder):
    """Checks large numbers, also if their sum is not finite."""
    rewrite(folder, **{"enc.1.weight": np.full((3, 3), 3e38, "float32")})
    load(model_of(), folder, mapping=MAPPING)


def test_numbers_that_become_zero(folder):
    tensors = tensors_of()
    tensors["enc.1.weight"][0, 1] = 1e-9
    save_file(tensors, folder / "model.safetensors")
    with pytest.warns(UserWarning, match="1 of 9 numbers of 'enc.1.weight' become 0 in float16"):
        load(model_of(dtype="float16"), folder, mapping=MAPPING)
    load(model_of(), folder, mapping=MAPPING)
    tensors["enc.1.weight"][:] = 1e-9
    save_file(tensors, folder / "model.safetensors")
    said = "'layer_1/kernel' is float16, in which all numbers of key 'enc.1.weight' are 0"
    refused(model_of(dtype="float16"), folder, said)
    rewrite(folder, **{"enc.1.weight": np.zeros((3, 3), "float32")})  # the same as before
    load(model_of(dtype="float16"), folder, mapping=MAPPING)


def test_first_numbers_that_are_not_finite_do_not_decide(tmp_path):
    """Checks tensors of several blocks, from each kind of source."""
    values = np.full((64, 32), np.nan, "float32")
    values[-1, -1] = 1.0
    model = keras.Sequential([keras.Input((64,)), layers.Dense(32, use_bias=False, name="d")])
    save_file({"d/kernel": values}, tmp_path / "w.safetensors")
    np.savez(tmp_path / "w.npz", **{"d/kernel": values})
    for name in ("w.safetensors", "w.npz"):
        with pytest.warns(UserWarning, match="2,047 of 2,048 numbers of 'd/kernel' are not finite"):
            load(model, tmp_path / name)


@pytest.mark.parametrize(
    ("number", "count"), [(1.12109375, 0), (np.inf, 3), (np.nan, 3), (65504.0, 0)]
)
@pytest.mark.parametrize("order", ["<", ">"])
def test_half_precision_numbers_of_either_byte_order(order, number, count):
    block = np.full([3], number, f"{order}f2")
    assert count_non_finite(block) == count


class Complex(layers.Layer):
    """A layer with a complex matrix."""

    def build(self, shape):
        self.w = self.add_weight(name="w", shape=(3, 5), dtype="complex128", initializer="zeros")

    def call(self, x):
        return x


def test_a_complex_matrix_that_is_transposed(tmp_path):
    layer = Complex(name="l")
    layer(np.ones((2, 3), "float32"))
    value = np.random.default_rng(1).normal(size=(5, 3)) + 1j
    np.savez(tmp_path / "w.npz", w=value)
    load(layer, tmp_path / "w.npz", mapping={"w": Key("w", transposed=True)})
    np.testing.assert_array_equal(layer.weights[0], value.T)


@needs_keras3("quantize")
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_quantized_layer(dtype, folder):
    """Its kernel has scales, which no file of PyTorch has in this form."""
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    model = model_of()
    load(model, folder, mapping=MAPPING)
    expected = model(x)
    for layer in model.layers:
        layer.quantize("int8")
    np.testing.assert_allclose(model(x), expected, atol=0.1)
    if dtype == "int8":
        rewrite(folder, **{"enc.0.weight": np.ones((3, 4), dtype)})
    before = model.layers[0].get_weights()
    with pytest.raises(PlanError, match=r"'layer_0/kernel' is quantized to int8: load the weights"):
        load(model, folder, mapping=MAPPING, allow_missing=".*_scale")
    for found, value in zip(model.layers[0].get_weights(), before, strict=True):
        np.testing.assert_array_equal(found, value)
