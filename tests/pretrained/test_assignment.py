"""The assignment of a plan: each variable once, tensor by tensor, and nothing after an error."""

import tracemalloc

import keras
import numpy as np
import pytest
from pretrained_plan_tools import MAPPING, layers, model_of, rewrite, tensors_of
from replicas import two_replicas
from safetensors.numpy import save_file

import tfwd
from tfwd import _keras, parametrizations
from tfwd.pretrained import PlanError, load, plan


def test_wrapped_layers_are_as_plain_ones(folder):
    model = model_of()
    wrapped = tfwd.parametrize(model, {".*kernel": parametrizations.Dropout(0.5)})
    load(wrapped, folder, mapping=MAPPING)
    plain = model_of()
    load(plain, folder, mapping=MAPPING)
    x = np.ones((2, 4), "float32")
    np.testing.assert_array_equal(wrapped(x), plain(x))


def test_each_variable_is_assigned_once_and_only_the_file_is_read(folder, monkeypatch):
    from tfwd.pretrained.sources.safetensors_files import SafetensorsSource

    own, seen = SafetensorsSource.blocks, []

    def blocks(self, key, into=None):
        seen.append(key)
        return own(self, key, into)

    monkeypatch.setattr(SafetensorsSource, "blocks", blocks)
    load(model_of(), folder, mapping=MAPPING)
    assert seen == list(tensors_of())


def test_one_tensor_at_a_time_is_held(tmp_path):
    size = 512 * 1024 * 4
    shapes = {f"part.{i}.weight": (1024, 512) for i in range(8)}
    tensors = {key: np.ones(shape, "float32") for key, shape in shapes.items()}
    save_file(tensors, tmp_path / "f.safetensors")
    layers = [keras.layers.Dense(1024, use_bias=False, name=f"part_{i}") for i in range(8)]
    inputs = keras.Input((512,))
    model = keras.Model(inputs, [layer(inputs) for layer in layers])
    tracemalloc.start()
    try:
        load(model, tmp_path / "f.safetensors", mapping={r"part_(\d+)": r"part.\1"})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * size + 1.5 * size  # the model's file, and a part of one tensor
    assert all(np.asarray(layer.kernel).all() for layer in layers)


def test_blocks_are_put_where_they_belong(folder, monkeypatch):
    from tfwd.pretrained.sources import base

    whole, parts = model_of(), model_of()
    load(whole, folder, mapping=MAPPING)
    monkeypatch.setattr(base, "BLOCK", 8)
    load(parts, folder, mapping=MAPPING)
    for ours, theirs in zip(parts.weights, whole.weights, strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(3)

    def call(self, x):
        return self.inner(x)


def test_models_that_are_not_built(folder):
    model = keras.Sequential([layers.Dense(3)])
    subclassed = Subclassed()
    subclassed.built = True  # as on Keras 3 after `build`, which does not build its layers
    for each in (model, subclassed):
        with pytest.raises(ValueError, match="has no weights yet: call it on a batch"):
            plan(each, folder)
    with pytest.raises(TypeError, match="give a str or a tfwd.pretrained.Key"):
        plan(model_of(), folder, mapping={"layer_0": 3})
    with pytest.raises(ValueError, match=r"mapping='\(' is not a regular expression"):
        plan(model_of(), folder, mapping={"(": "a"})


def test_the_file_changes_after_the_plan(folder):
    """Checks that names, shapes and dtypes are read again before the first variable is assigned."""
    model = model_of()
    before = [w.numpy() for w in model.weights]
    made = plan(model, folder, mapping=MAPPING)
    changed = {"enc.1.bias": np.zeros(4, "float32"), "out.weight": np.zeros((2, 3), "float16")}
    rewrite(folder, drop=["enc.1.weight"], **changed, more=np.zeros(1))
    with pytest.raises(PlanError, match="has changed since the plan was made; nothing") as caught:
        made.apply()
    for said in (
        "key 'enc.1.weight' was removed",
        "key 'enc.1.bias' was float32 (3,) and is float32 (4,)",
        "key 'out.weight' was float32 (2, 3) and is float16 (2, 3)",
        "key 'more' was added",
    ):
        assert said in str(caught.value)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    rewrite(folder)
    made.apply()


def test_mirrored_variables(folder):
    strategy = two_replicas()
    with strategy.scope():
        model = model_of()
    load(model, folder, mapping=MAPPING)
    for replica in strategy.experimental_local_results(
        _keras.variables.tf_variable(model.layers[0].kernel)
    ):
        np.testing.assert_array_equal(replica.numpy(), tensors_of()["enc.0.weight"].T)
