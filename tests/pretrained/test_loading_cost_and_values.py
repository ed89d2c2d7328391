"""Loading: work in proportion to the number of layers, and values to the last bit."""

import gc
import itertools
import re
import sys
from collections import Counter

import keras
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from stack_marks import quick_rows

from tfwd.layers import transformer
from tfwd.path_patterns import PatternIndex
from tfwd.pretrained import load, plan
from tfwd.pretrained.key_rules import find_prefix
from tfwd.pretrained.sources import base
from tfwd.pretrained.tiled_transpose import TILE

layers = keras.layers
DTYPES = {name: getattr(ml_dtypes, name, name) for name in ("float16", "bfloat16", "float32")}


def bert_file(folder, count):
    """Writes a config and a file of a small BERT with `count` layers."""
    size, wide = 4, 8
    config = {"model_type": "bert", "hidden_size": size, "num_attention_heads": 2}
    config |= {"num_hidden_layers": count, "intermediate_size": wide, "vocab_size": 10}
    config |= {"max_position_embeddings": 6, "type_vocab_size": 2}
    shapes = {"embeddings.LayerNorm.weight": (size,), "embeddings.LayerNorm.bias": (size,)}
    for name, rows in (("word", 10), ("position", 6), ("token_type", 2)):
        shapes[f"embeddings.{name}_embeddings.weight"] = (rows, size)
    for i, (name, out, into) in itertools.product(
        range(count),
        [
            *((f"attention.self.{part}", size, size) for part in ("query", "key", "value")),
            ("attention.output.dense", size, size),
            ("intermediate.dense", wide, size),
            ("output.dense", size, wide),
            ("attention.output.LayerNorm", size, None),
            ("output.LayerNorm", size, None),
        ],
    ):
        shapes[f"encoder.layer.{i}.{name}.weight"] = (out, into) if into else (out,)
        shapes[f"encoder.layer.{i}.{name}.bias"] = (out,)
    folder.mkdir()
    save_file({k: np.ones(s, "float32") for k, s in shapes.items()}, folder / "model.safetensors")
    return config, folder / "model.safetensors"


def calls(function):
    """Counts function calls, including calls of C functions.

    The count does not depend on earlier tests. A garbage collection would call their finalizers.
    And `re` forgets old expressions.
    """
    counts = Counter()
    re.purge()
    gc.collect()
    gc.disable()
    sys.setprofile(lambda frame, event, argument: counts.update([event]))
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts["call"] + counts["c_call"]


@quick_rows("True")
@pytest.mark.parametrize("part", [False, True])
def test_the_work_grows_with_the_number_of_layers(part, tmp_path):
    """Checks that 24 layers need as many calls per variable as 6, also for a part of the layers."""
    by_layers = {}
    for count in (2, 6, 24):  # the first fills caches
        config, file = bert_file(tmp_path / str(count), count)
        if part:
            wanted = range(count // 2)
            layer = transformer.TransformerStack.from_config(config, layers=wanted)
        else:
            layer = transformer.Bert.from_config(config)
        layer.build(layer.any_input_shape())
        ignore = r"embeddings\..*" if part else ()
        found = []
        made = calls(lambda: found.append(plan(layer, file, ignore=ignore)))  # noqa: B023
        assert found[0].problems() == []
        by_layers[count] = made / len(found[0].steps)
    assert by_layers[24] <= 1.1 * by_layers[6]


def test_expressions_are_found_as_by_trying_each():
    pieces = ["a", ".", r"\.", "/", "*", "?", "|", "(", ")", r"\d", "[./]", "{2}", r"\|", "$"]
    expressions = []
    for pattern in map("".join, itertools.product(pieces, repeat=3)):
        try:
            expressions.append(re.compile(pattern))
        except re.error:
            continue
    expressions += [re.compile(r"A/a", re.I), re.compile("a / a", re.X), re.compile("(?i)A")]
    index = PatternIndex(expressions)
    texts = ["".join(t) for n in (1, 2, 3) for t in itertools.product("a./1|", repeat=n)]
    for text in texts:
        found = sorted(i for i, match in index.matches(text) if match.group() == text)
        assert found == [i for i, e in enumerate(expressions) if e.fullmatch(text)], text


def test_prefixes_are_found_as_by_trying_each():
    rng = np.random.default_rng(0)
    for _ in range(200):
        names = ["".join(rng.choice(list("ab./"), size=rng.integers(1, 6))) for _ in range(12)]
        keys, wanted = names[:6], [set(names[i : i + 2]) for i in range(3, 11, 2)]
        ends = {key[:i] for key in keys for i in range(len(key)) if not i or key[i - 1] in "./"}
        fits = {p: sum(any(p + n in keys for n in group) for group in wanted) for p in ends}
        most = max(fits.values())
        expected = sorted(p for p, count in fits.items() if count == most and most)
        assert find_prefix(wanted, keys) == expected


def bits(values):
    values = np.ascontiguousarray(values)
    return values.shape, values.view(f"u{values.dtype.itemsize}").tolist()


def loaded_kernel(layer, inputs, weight, folder):
    """Returns the bits of a layer's kernel, by `load` and by `value_of`, which must agree."""
    model = keras.Sequential([keras.Input(inputs), layer])
    save_file({"x.weight": weight}, folder / "model.safetensors")
    done = load(model, folder, mapping={layer.name: "x"})
    found = bits(layer.kernel.numpy())
    assert bits(done.value_of(layer.kernel)) == found
    return found


def special(shape, dtype):
    """Returns random numbers, with both zeros and the smallest number among them."""
    values = np.random.default_rng(0).normal(size=shape).astype(DTYPES[dtype])
    values.reshape(-1)[:3] = np.array([0.0, -0.0, 1e-45 if dtype == "float32" else 6e-8])[
        : values.size
    ]
    return values


SHAPES = [(1, 1), (1, 7), (5, 1), (3, 5), (TILE - 1, TILE + 1), (2 * TILE + 3, 7), (2, 2 * TILE)]


@pytest.mark.parametrize("block", [1, 600, 1 << 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_the_transpose_to_the_last_bit(dtype, block, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", block)
    tensors = {f"d.{i}.weight": special(shape, dtype) for i, shape in enumerate(SHAPES)}
    save_file(tensors, tmp_path / "model.safetensors")
    inputs = [keras.Input((into,)) for _, into in SHAPES]
    outputs = [
        layers.Dense(out, use_bias=False, name=f"d_{i}", dtype=dtype)(inputs[i])
        for i, (out, _) in enumerate(SHAPES)
    ]
    model = keras.Model(inputs, outputs)
    load(model, tmp_path, mapping={r"d_(\d+)": r"d.\1"})
    for i, there in enumerate(tensors.values()):
        assert bits(model.get_layer(f"d_{i}").kernel.numpy()) == bits(there.T)


@pytest.mark.parametrize("there", DTYPES)
@pytest.mark.parametrize("here", DTYPES)
def test_a_kernel_in_another_dtype_is_the_cast_transpose(there, here, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", 600)
    weight = np.random.default_rng(1).normal(size=(TILE + 2, 9)).astype(DTYPES[there])
    layer = layers.Dense(TILE + 2, use_bias=False, name="d", dtype=here)
    expected = bits(weight.T.astype(DTYPES[here]))
    assert loaded_kernel(layer, (9,), weight, tmp_path) == expected


@pytest.mark.parametrize("block", [100, 1 << 20])
@pytest.mark.parametrize("sizes", [(3, 3), (1, 1), (2, 9)])
def test_convolutions_to_the_last_bit(sizes, block, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", block)
    weight = special((5, 4, *sizes), "float32")
    layer = layers.Conv2D(5, sizes, use_bias=False, name="c")
    expected = bits(weight.transpose(2, 3, 1, 0))
    assert loaded_kernel(layer, (9, 9, 4), weight, tmp_path) == expected


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    ("equation", "inputs", "shape", "split", "axes"),
    [
        ("abc,cde->abde", (3, 4), (3, 2, 3), (2, 3, 4), (2, 0, 1)),  # heads of queries
        ("abcd,cde->abe", (3, 2, 3), (3, 5), (5, 2, 3), (1, 2, 0)),  # heads to outputs
        ("abc,dce->abde", (3, 4), (3, 2, 3), (2, 3, 4), (0, 2, 1)),  # inputs between them
        ("abc,dec->abde", (3, 4), (3, 2, 3), (2, 3, 4), (0, 1, 2)),  # as it is
    ],
)
def test_kernels_of_heads_to_the_last_bit(
    equation, inputs, shape, split, axes, block, tmp_path, monkeypatch
):
    monkeypatch.setattr(base, "BLOCK", block)
    outputs = int(np.prod(split[:1] if shape[-1] == 5 else split[:2]))
    weight = special((outputs, int(np.prod(split)) // outputs), "float32")
    layer = layers.EinsumDense(equation, (None, *shape[1:]), name="e")
    expected = bits(weight.reshape(split).transpose(axes))
    assert loaded_kernel(layer, inputs, weight, tmp_path) == expected


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
@pytest.mark.parametrize("block", [1, 64, 1 << 20])
def test_tables_as_they_are(suffix, block, tmp_path, monkeypatch):
    """Checks tables that are read straight into their memory where the file's format allows it."""
    monkeypatch.setattr(base, "BLOCK", block)
    table = special((13, 3), "float32")
    model = keras.Sequential([keras.Input((2,)), layers.Embedding(13, 3, name="w")])
    file = str(tmp_path / f"f.{suffix}")
    if suffix == "npz":
        np.savez(file, **{"w.weight": table})
    else:
        save_file({"w.weight": table}, file)
    load(model, file, mapping={"w": "w"})
    assert bits(model.layers[0].embeddings.numpy()) == bits(table)


def test_loaded_statistics_of_a_normalization_are_used(tmp_path):
    """Checks a layer that computes with constants, also in a function that `predict` traced."""
    inner = keras.Sequential([keras.Input((3,)), layers.Normalization(name="n")], name="inner")
    model = keras.Sequential([keras.Input((3,)), inner])
    x = np.array([[1.0, 2.0, 5.0]], "float32")
    np.testing.assert_array_equal(model.predict(x, verbose=0), x)  # the mean 0, the variance 1
    mean, variance = np.array([1, 4, 1], "float32"), np.array([4, 16, 1], "float32")
    save_file({"n.mean": mean, "n.variance": variance}, tmp_path / "model.safetensors")
    load(model, tmp_path, mapping={"n": "n"}, allow_missing="inner/n/count")
    expected = [[0.0, -0.5, 4.0]]
    np.testing.assert_allclose(model(x), expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    np.testing.assert_allclose(inner.predict(x, verbose=0), expected, atol=1e-6)
