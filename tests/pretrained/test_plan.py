"""Plans: all errors are reported at once, before anything is assigned."""

import difflib
import tracemalloc

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

import tfwd
from tfwd import _keras, parametrizations
from tfwd.pretrained import Key, PlanError, load, plan

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


@pytest.fixture
def folder(tmp_path):
    save_file(tensors_of(), tmp_path / "model.safetensors")
    return tmp_path


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


def test_loaded_weights(folder):
    model, tensors = model_of(), tensors_of()
    done = load(model, folder, mapping=MAPPING)
    assert [step.key for step in done.steps] == list(tensors)
    x = np.random.default_rng(3).normal(size=(2, 4)).astype("float32")
    hidden = x
    for i in "01":
        hidden = hidden @ tensors[f"enc.{i}.weight"].T + tensors[f"enc.{i}.bias"]
    np.testing.assert_allclose(model(x), hidden @ tensors["out.weight"].T, rtol=1e-5)


def test_a_plan_reads_nothing(folder, monkeypatch):
    from tfwd.pretrained.sources.safetensors_files import SafetensorsSource

    monkeypatch.setattr(SafetensorsSource, "blocks", lambda *args: pytest.fail("it was read"))
    found = plan(model_of(), folder, mapping=MAPPING)
    assert (len(found.steps), found.problems()) == (5, [])


def test_all_errors_come_at_once(folder):
    rewrite(
        folder,
        drop=["enc.1.bias"],
        **{"enc.0.weight": np.zeros((4, 3), "float32"), "enc.2.bias": np.zeros(3)},
        more=np.zeros(1),
    )
    refused(
        model_of(),
        folder,
        "'layer_0/kernel' is (4, 3), for which the file must have (3, 4) (transposed when it is "
        "read); but there 'enc.0.weight' is (4, 3): if the file has it in Keras's order, map to "
        "Key('enc.0.weight', transposed=False)",
        "'layer_1/bias' has no key 'enc.1.bias' in the file; nearest: enc.",
        "key 'more' belongs to no variable",
        "key 'enc.2.bias' belongs to no variable",
        "mapping: 'hed' matches no variable and no layer; nearest: head",
        "ignore: 'morr' matches no key; nearest: more",
        "allow_missing: 'layer_7/.*' matches no variable",
        mapping={**MAPPING, "hed": "out"},
        ignore=["morr"],
        allow_missing=["layer_7/.*"],
    )


def test_hints_do_not_grow_with_the_square_of_the_layers(tmp_path, monkeypatch):
    """Wrong names are compared with all names, so only those that a message shows are."""
    own, asked = difflib.get_close_matches, []

    def counted(word, *args, **kwargs):
        asked.append(word)
        return own(word, *args, **kwargs)

    monkeypatch.setattr(difflib, "get_close_matches", counted)
    counts = []
    for number in (12, 48):
        tensors = {f"part.{i}.kernl": np.zeros((2, 2), "float32") for i in range(number)}
        save_file(tensors, tmp_path / "model.safetensors")
        inputs = keras.Input((2,))
        parts = [layers.Dense(2, use_bias=False, name=f"part_{i}") for i in range(number)]
        model = keras.Model(inputs, [part(inputs) for part in parts])
        wrong = {f"prat_{i}": f"part.{i}" for i in range(number)}
        asked.clear()
        made = plan(
            model,
            tmp_path,
            mapping={r"part_(\d+)": r"part.\1", **wrong},
            ignore=list(wrong),
            allow_missing=list(wrong),
        )
        with pytest.raises(PlanError) as caught:
            made.check()
        counts.append(len(asked))
        said = str(caught.value)
        assert "no key 'part.3.weight' in the file; nearest: part.3.kernl" in said
        assert "'prat_3' matches no variable and no layer; nearest: part_3" in said
        assert said.count("; nearest: ") == 30  # ten of each kind
        assert len(made.problems()) == 5 * number
    assert counts[0] == counts[1] == 50


def test_a_mapping_that_fits_nothing_of_a_layer_without_a_path(folder):
    layer = layers.Dense(2, use_bias=False)
    layer.build((None, 3))
    refused(
        layer,
        folder,
        "'zzz' matches no variable and no layer; there are kernel",
        mapping={"zzz": "out"},
    )


def test_as_many_elements_in_another_shape(folder):
    rewrite(folder, **{"out.weight": np.zeros((3, 2), "float32")})
    refused(model_of(), folder, "'head/kernel' is (3, 2), for which the file must have (2, 3)")


def test_buffers_of_indices_are_no_weights(folder):
    rewrite(folder, **{"enc.position_ids": np.arange(4)[None]})
    assert load(model_of(), folder, mapping=MAPPING).left_out == ["enc.position_ids"]
    rewrite(folder, **{"enc.position_ids": np.arange(4.0)[None]})
    refused(model_of(), folder, "key 'enc.position_ids' belongs to no variable")


def test_missing_and_unexpected_as_is_said(folder):
    rewrite(folder, drop=["enc.1.bias"], more=np.zeros(1))
    model = model_of()
    bias = model.layers[1].bias.numpy()
    done = load(model, folder, mapping=MAPPING, ignore="mo.*", allow_missing="layer_1/bias")
    assert ([*done.missing], done.left_out) == (["layer_1/bias"], ["more"])
    np.testing.assert_array_equal(model.layers[1].bias, bias)
    done = load(model, folder, mapping=MAPPING, strict=False)
    assert ([*done.missing], done.unexpected) == (["layer_1/bias"], ["more"])
    rewrite(folder, **{"out.weight": np.zeros((3, 2), "float32")})
    refused(model, folder, "the file must have (2, 3)", strict=False)


def test_two_keys_for_one_variable(folder):
    refused(
        model_of(),
        folder,
        "'layer_0/kernel' is given two keys by the mapping: 'enc.0' and 'enc.1'",
        mapping={**MAPPING, "layer_0": "enc.1"},
    )
    rewrite(folder, **{"enc.0.kernel": np.zeros((4, 3), "float32")})
    refused(
        model_of(),
        folder,
        "'layer_0/kernel' has two keys in the file: 'enc.0.weight' and 'enc.0.kernel'",
    )


def test_one_key_for_two_variables(folder):
    mapping = {r"layer_\d+": "enc.1", "head": "out"}
    model = keras.Sequential(
        [
            keras.Input((3,)),
            layers.Dense(3, name="layer_0"),
            layers.Dense(3, name="layer_1"),
            layers.Dense(2, use_bias=False, name="head"),
        ]
    )
    rewrite(folder, drop=["enc.0.weight", "enc.0.bias"])
    refused(
        model,
        folder,
        "key 'enc.1.weight' is taken twice, by 'layer_0/kernel' and 'layer_1/kernel'",
        mapping=mapping,
    )
    load(model, folder, mapping={**mapping, r"layer_\d+": Key("enc.1", repeated=True)})
    np.testing.assert_array_equal(model.layers[0].kernel, model.layers[1].kernel)


def test_prefixes(folder):
    under = {f"net.{key}": value for key, value in tensors_of().items()}
    save_file({**under, "head.x": np.zeros(1)}, folder / "model.safetensors")
    done = load(model_of(), folder, mapping=MAPPING, ignore="head.x")
    assert done.steps[0].key == "net.enc.0.weight"
    load(model_of(), folder, mapping=MAPPING, prefix="net.", ignore="head.x")
    wrong = "prefix='nett.': no key begins with it; the keys are found with prefix='net.'"
    said = refused(model_of(), folder, wrong, prefix="nett.", ignore="head.x")
    assert said.count("\n- ") == 1
    both = {**under, **{f"ema.{key}": value for key, value in tensors_of().items()}}
    save_file(both, folder / "model.safetensors")
    refused(model_of(), folder, "fit as well with the prefix 'ema.' as with 'net.': give one")
    load(model_of(), folder, mapping=MAPPING, prefix="ema.", ignore="net.*")


def test_copies_are_absent_or_equal(folder):
    mapping = {**MAPPING, "head": Key("out", copies=("tied.weight",))}
    load(model_of(), folder, mapping=mapping)
    rewrite(folder, **{"tied.weight": tensors_of()["out.weight"]})
    load(model_of(), folder, mapping=mapping)
    rewrite(folder, drop=["out.weight"], **{"tied.weight": tensors_of()["out.weight"]})
    load(model_of(), folder, mapping=mapping)
    rewrite(folder, **{"tied.weight": tensors_of()["out.weight"] * 2})
    refused(model_of(), folder, "keys 'out.weight' and 'tied.weight' differ", mapping=mapping)


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


def test_without_a_mapping_keys_are_paths(folder):
    model = model_of()
    names = {target: value.numpy() for target, value in zip(
        ["layer_0/kernel", "layer_0/bias", "layer_1/kernel", "layer_1/bias", "head/kernel"],
        model_of(3).weights, strict=True)}  # fmt: skip
    np.savez(folder / "w.npz", **{key: value + 1 for key, value in names.items()})
    load(model, folder / "w.npz")
    for weight, value in zip(model.weights, names.values(), strict=True):
        np.testing.assert_array_equal(weight.numpy(), value + 1)


def test_models_that_are_not_built(folder):
    model = keras.Sequential([layers.Dense(3)])
    with pytest.raises(ValueError, match="has no weights yet: build it, or call it on a batch"):
        plan(model, folder)
    with pytest.raises(TypeError, match="give a key's name, or a tfwd.pretrained.Key"):
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
        "key 'enc.1.weight' is gone",
        "key 'enc.1.bias' was float32 (3,) and is float32 (4,)",
        "key 'out.weight' was float32 (2, 3) and is float16 (2, 3)",
        "key 'more' is new",
    ):
        assert said in str(caught.value)
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    rewrite(folder)
    made.apply()


def test_keys_that_name_a_group_that_is_not_there(folder):
    for mapping, said in (
        ({"head": r"out.\1"}, r"mapping\['head'\]='out...1': invalid group.*the pattern has 0 gr"),
        ({r"layer_(\d+)": r"enc.\2"}, "the pattern has 1 groups, and a key may name these"),
        ({"nothing": r"\g<name>"}, "the pattern has 0 groups"),
        ({"head": Key("out", copies=(r"tied.\1",))}, r"='tied...1': invalid group"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(model_of(), folder, mapping=mapping)


def test_mirrored_variables(folder):
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = model_of()
    load(model, folder, mapping=MAPPING)
    for replica in strategy.experimental_local_results(
        _keras.variables.tf_variable(model.layers[0].kernel)
    ):
        np.testing.assert_array_equal(replica.numpy(), tensors_of()["enc.0.weight"].T)


def test_the_table(folder):
    rewrite(folder, more=np.zeros(1))
    text = str(plan(model_of(), folder, mapping=MAPPING, ignore="more"))
    lines = text.splitlines()
    assert max(map(len, lines[1:])) <= 100
    assert lines[0].endswith("model.safetensors: 5 variables, 132 B, all float32")
    assert [word.strip() for word in lines[2].split("  ") if word] == [
        "layer_0/kernel", "enc.0.weight", "transposed", "48 B",
    ]  # fmt: skip
    assert lines[-2:] == ["left out (1):", "  more"]
