"""A small model, its file of weights, and the check of a refused plan."""

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

from tfwd.pretrained import PlanError, load

layers = keras.layers
MAPPING = {r"layer_(\d+)": r"enc.\1", "head": "out"}


def model_of(width=3, dtype="float32"):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(width, name="layer_0", dtype=dtype),
            layers.Dense(width, name="layer_1", dtype=dtype),
            layers.Dense(2, use_bias=False, name="head", dtype=dtype),
        ],
        name="net",
    )


def tensors_of(width=3, dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = {
        "enc.0.weight": (width, 4),
        "enc.0.bias": (width,),
        "enc.1.weight": (width, width),
        "enc.1.bias": (width,),
        "out.weight": (2, width),
    }
    return {key: rng.normal(size=shape).astype(dtype) for key, shape in shapes.items()}


def rewrite(folder, drop=(), **more):
    kept = {k: v for k, v in {**tensors_of(), **more}.items() if k not in drop}
    save_file(kept, folder / "model.safetensors")


def refused(model, folder, *messages, **options):
    """Asserts that the error has each message, and that the model did not change."""
    before = [w.numpy() for w in model.weights]
    with pytest.raises(PlanError) as caught:
        load(model, folder, **{"mapping": MAPPING, **options})
    for message in messages:
        assert message in str(caught.value), str(caught.value)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    return str(caught.value)
