"""Patterns for paths that begin with `/`, which must match the full path."""

import re

import keras
import numpy as np
import pytest
from flattened_images import saved

import tfwd
from tfwd import parametrizations as P
from tfwd.path_patterns import PatternIndex, matches
from tfwd.pretrained import PlanError, load

RNG = np.random.default_rng(1)
layers = keras.layers
PATHS = ("conv1/kernel", "block/conv1/kernel", "block/conv10/kernel", "conv1", "kernel")
PATTERNS = (
    *("conv1/kernel", "/conv1/kernel", "/.*kernel", "/[^/]*", "/conv1", ".conv1", "/", ".*"),
    *("/?kernel", "/block|kernel", "(/conv1)"),
)


def matched(pattern, path):
    """Returns True as `re` says for the full path after a `/`, or for each part of the path."""
    if pattern.startswith("/"):
        return re.fullmatch(pattern, "/" + path) is not None
    starts = [0] + [i + 1 for i, character in enumerate(path) if character == "/"]
    return any(re.fullmatch(pattern, path[start:]) for start in starts)


@pytest.mark.parametrize("path", PATHS)
def test_both_searches_agree_with_a_search_of_each_part(path):
    expressions = [re.compile(pattern) for pattern in PATTERNS]
    expected = [matched(pattern, path) for pattern in PATTERNS]
    assert [matches(expression, path) for expression in expressions] == expected
    found = {i for i, _ in PatternIndex(expressions).path_matches(path)}
    assert [i in found for i in range(len(PATTERNS))] == expected


def block_and_first():
    """Returns a model with a layer `conv1` at the root and one inside the layer `layer1_0`."""
    block = keras.Sequential([layers.Conv2D(3, 1, name="conv1")], name="layer1_0")
    return keras.Sequential([keras.Input((4, 4, 3)), layers.Conv2D(3, 1, name="conv1"), block])


def test_names_of_a_residual_network(tmp_path):
    names = ("conv1", "layer1.0.conv1")
    weights = {f"{name}.weight": RNG.normal(size=(3, 3, 1, 1)) for name in names}
    weights |= {f"{name}.bias": RNG.normal(size=3) for name in names}
    file, model = saved(tmp_path, weights), block_and_first()
    block = {r"layer(\d)_(\d)/conv(\d)": r"layer\1.\2.conv\3"}
    with pytest.raises(PlanError, match="begins with '/' matches only full paths"):
        load(model, file, mapping={"conv1": "conv1", **block})
    load(model, file, mapping={"/conv1": "conv1", **block})
    for layer, name in zip((model.layers[0], model.layers[1].layers[0]), names, strict=True):
        expected = weights[f"{name}.weight"][:, :, 0, 0].T
        np.testing.assert_allclose(layer.kernel[0, 0], expected, rtol=1e-6)
        np.testing.assert_allclose(layer.bias, weights[f"{name}.bias"], rtol=1e-6)


def test_weight_dropout_of_the_first_layer_only():
    pattern = "/sequential[^/]*/conv1/kernel"
    model = tfwd.parametrize(block_and_first(), {pattern: P.Dropout(0.5)})
    first, block = model.layers[-2:]
    inner = block.layers[-1]
    assert (type(first).__name__, type(inner).__name__) == ("Parametrized", "Conv2D")


def test_a_pattern_for_a_layer_of_layers(tmp_path):
    """Checks that the error names a layer inside, because keys belong to layers with weights."""
    file = saved(tmp_path, {"conv1.weight": np.zeros((3, 3, 1, 1)), "conv1.bias": np.zeros(3)})
    with pytest.raises(PlanError, match="matches layers whose weights are in other layers: map "):
        load(block_and_first(), file, mapping={"/conv1": "conv1", r"layer(\d)_0": r"layer\1.0"})


def test_a_file_with_other_names_and_no_mapping(tmp_path):
    file = saved(tmp_path, {"conv.weight": np.zeros((3, 3, 1, 1))})
    with pytest.raises(PlanError, match="no mapping was given, so each key must be the path"):
        load(block_and_first(), file)


def test_a_hint_names_keys_that_are_not_used(tmp_path):
    """Checks the hint for `block.conv2`. The most similar key is used, so it is not the answer."""
    keys = ("block.conv1.weight", "block.conv1.bias", "block.down.weight")
    file = saved(
        tmp_path, {key: RNG.normal(size=(3, 3, 1, 1)[: 4 - 3 * ("bias" in key)]) for key in keys}
    )
    mapping = {"/conv1": "block.conv1", "layer1_0/conv1": "block.conv2"}
    with pytest.raises(
        PlanError, match=r"no key 'block.conv2.weight' in the file; nearest: block.down"
    ):
        load(block_and_first(), file, mapping=mapping)
