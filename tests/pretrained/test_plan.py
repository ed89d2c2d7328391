"""Plans: all errors are reported at once, before anything is assigned."""

import difflib

import keras
import numpy as np
import pytest
from pretrained_plan_tools import MAPPING, layers, model_of, refused, rewrite, tensors_of
from safetensors.numpy import save_file

import tfwd
from tfwd.pretrained import Key, PlanError, load, plan


def test_loaded_weights(folder):
    model, tensors = model_of(), tensors_of()
    done = load(model, folder, mapping=MAPPING)
    assert [step.key for step in done.steps] == list(tensors)
    x = np.random.default_rng(3).normal(size=(2, 4)).astype("float32")
    hidden = x
    for i in "01":
        hidden = hidden @ tensors[f"enc.{i}.weight"].T + tensors[f"enc.{i}.bias"]
    np.testing.assert_allclose(model(x), hidden @ tensors["out.weight"].T, rtol=1e-5, atol=1e-5)


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
        "'layer_0/kernel' is (4, 3), so the file must have (3, 4) (transposed when it is read); "
        "but key 'enc.0.weight' is (4, 3): map to Key('enc.0.weight', transposed=False) if the "
        "file has Keras's order of axes",
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
    refused(model_of(), folder, "'head/kernel' is (3, 2), so the file must have (2, 3)")


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
    told = "but has no key for 1 of 5 variables, and their values are kept: layer_1/bias$"
    with pytest.warns(UserWarning, match=told):
        done = load(model, folder, mapping=MAPPING, strict=False)
    assert ([*done.missing], done.unexpected) == (["layer_1/bias"], ["more"])
    rewrite(folder, **{"out.weight": np.zeros((3, 2), "float32")})
    refused(model, folder, "the file must have (2, 3)", strict=False)
    load(
        model,
        folder,
        mapping={"layer_0": "enc.0"},
        strict=False,
        allow_missing=["layer_1/.*", "head/.*"],
    )


def test_a_file_without_any_key_of_the_model(folder):
    names = {"layer_0": "a", "layer_1": "b", "head": "c"}
    for mapping in (None, names):
        refused(model_of(), folder, "no variable has a key", mapping=mapping, strict=False)


def test_one_key_with_two_layouts(folder):
    """The order of the two patterns does not matter."""
    for first in (0, 1):
        both = [(r"layer_(\d)", r"enc.\1"), ("layer_0", Key("enc.0", transposed=False))]
        mapping = dict([*both[first:], *both[:first], ("layer_1", "out")])
        refused(model_of(), folder, "'layer_0/kernel' has the key 'enc.0' twice", mapping=mapping)


def test_two_keys_for_one_variable(folder):
    refused(
        model_of(),
        folder,
        "'layer_0/kernel' has two keys in the mapping, 'enc.0' and 'enc.1': let only one",
        mapping={**MAPPING, "layer_0": "enc.1"},
    )
    rewrite(folder, **{"enc.0.kernel": np.zeros((4, 3), "float32")})
    refused(
        model_of(),
        folder,
        "'layer_0/kernel' has two keys in the file, 'enc.0.weight' and 'enc.0.kernel': map the",
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
        "key 'enc.1.weight' is used by several variables, 'layer_0/kernel' and 'layer_1/kernel'",
        mapping=mapping,
    )
    load(model, folder, mapping={**mapping, r"layer_\d+": Key("enc.1", repeated=True)})
    np.testing.assert_array_equal(model.layers[0].kernel, model.layers[1].kernel)


def test_keys_with_and_without_the_prefix(folder):
    """A head beside an encoder has no prefix in files of a classifier."""
    given = tensors_of()
    named = {key if "out" in key else f"net.{key}": value for key, value in given.items()}
    save_file(named, folder / "model.safetensors")
    whole = {path: f"net.{key}" if "out" not in key else key for path, key in MAPPING.items()}
    for mapping in (MAPPING, whole):
        model = model_of()
        done = load(model, folder, mapping=mapping)
        assert {step.key for step in done.steps} == set(named)
        np.testing.assert_array_equal(model.weights[0], given["enc.0.weight"].T)
        np.testing.assert_array_equal(model.weights[-1], given["out.weight"].T)
    missing = {**MAPPING, "head": "outs"}
    refused(model_of(), folder, "no key 'net.outs.", mapping=missing)


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
    refused(model_of(), folder, "fit equally well with the prefix 'ema.' and with 'net.': give one")
    load(model_of(), folder, mapping=MAPPING, prefix="ema.", ignore="net.*")
    done = load(model_of(), folder, mapping=MAPPING, ignore=["ema.*"])  # only one copy remains
    assert done.steps[0].key == "net.enc.0.weight"


def test_ignored_keys_of_variables(folder):
    """Checks that a model with a head of another size keeps its own head."""
    rewrite(folder, **{"out.weight": np.ones((9, 7), "float32")})
    refused(model_of(), folder, "but key 'out.weight' is (9, 7)", mapping=MAPPING)
    text = "'head/kernel' is not loaded, because ignore skips its key 'out.weight'"
    refused(model_of(), folder, text, mapping=MAPPING, ignore="out.*")
    model = model_of()
    before = np.array(model.layers[-1].kernel)
    done = load(model, folder, mapping=MAPPING, ignore="out.*", allow_missing="head/.*")
    assert (len(done.steps), done.left_out) == (4, ["out.weight"])
    np.testing.assert_array_equal(model.layers[-1].kernel, before)
    np.testing.assert_array_equal(model.layers[0].kernel, tensors_of()["enc.0.weight"].T)


def test_of_two_keys_one_is_ignored(folder):
    copy = tensors_of()["enc.0.bias"] + 1
    rewrite(folder, **{"enc.0.beta": copy})
    mapping = {**MAPPING, "layer_0/bias": Key("enc.0.bias", copies=("enc.0.beta",))}
    del mapping[next(iter(MAPPING))]
    mapping |= {"layer_0/kernel": "enc.0.weight", "layer_1": "enc.1"}
    refused(model_of(), folder, "keys 'enc.0.bias' and 'enc.0.beta' differ", mapping=mapping)
    model = model_of()
    load(model, folder, mapping=mapping, ignore=r"enc\.0\.bias")
    np.testing.assert_array_equal(model.layers[0].bias, copy)


def test_copies_are_absent_or_equal(folder):
    mapping = {**MAPPING, "head": Key("out", copies=("tied.weight",))}
    load(model_of(), folder, mapping=mapping)
    rewrite(folder, **{"tied.weight": tensors_of()["out.weight"]})
    load(model_of(), folder, mapping=mapping)
    rewrite(folder, drop=["out.weight"], **{"tied.weight": tensors_of()["out.weight"]})
    load(model_of(), folder, mapping=mapping)
    rewrite(folder, **{"tied.weight": tensors_of()["out.weight"] * 2})
    refused(model_of(), folder, "keys 'out.weight' and 'tied.weight' differ", mapping=mapping)


def test_a_copy_of_a_kernel_beside_a_bias(tmp_path):
    """Checks that the copy `tied.weight` of a layer is not compared with the layer's bias."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="head")])
    kernel, bias = np.arange(6.0).reshape(3, 2), np.ones(3)
    tensors = {"out.weight": kernel, "out.bias": bias, "tied.weight": kernel}
    tensors = {key: value.astype("float32") for key, value in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    load(model, tmp_path, mapping={"head": Key("out", copies=("tied.weight",))})
    np.testing.assert_array_equal(model.layers[0].kernel, kernel.T)
    np.testing.assert_array_equal(model.layers[0].bias, bias)
    save_file(
        {**tensors, "tied.weight": 2 * tensors["tied.weight"]}, tmp_path / "model.safetensors"
    )
    refused(
        model,
        tmp_path,
        "keys 'out.weight' and 'tied.weight' differ",
        mapping={"head": Key("out", copies=("tied.weight",))},
    )


def test_without_a_mapping_keys_are_paths(folder):
    model = model_of()
    names = {target: value.numpy() for target, value in zip(
        ["layer_0/kernel", "layer_0/bias", "layer_1/kernel", "layer_1/bias", "head/kernel"],
        model_of(3).weights, strict=True)}  # fmt: skip
    np.savez(folder / "w.npz", **{key: value + 1 for key, value in names.items()})
    load(model, folder / "w.npz")
    for weight, value in zip(model.weights, names.values(), strict=True):
        np.testing.assert_array_equal(weight.numpy(), value + 1)


def test_keys_that_name_a_group_that_is_not_there(folder):
    for mapping, said in (
        ({"head": r"out.\1"}, r"mapping\['head'\]='out...1': invalid group.*The pattern has 0 gr"),
        ({r"layer_(\d+)": r"enc.\2"}, "The pattern has 1 group, and a key may refer only to"),
        ({"nothing": r"\g<name>"}, "The pattern has 0 groups"),
        ({"head": Key("out", copies=(r"tied.\1",))}, r"='tied...1': invalid group"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(model_of(), folder, mapping=mapping)


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


@pytest.mark.parametrize(
    ("flattened", "error"),
    [(30, TypeError), ((5.0, 2, 3), TypeError), ("ab", TypeError), ((5, 0), ValueError)],
)
def test_shapes_of_a_key(flattened, error):
    with pytest.raises(error, match=r"Key\('f', flattened=.*: give "):
        Key("f", flattened=flattened)
    assert Key("f", flattened=np.array([5, 2, 3])).flattened == (5, 2, 3)


def test_paths_in_a_model_with_the_name_of_its_layer(tmp_path):
    """Only a layer of tfwd that replaces another one has its name, so only it is left out."""
    inner = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="fc")], name="fc")
    model = keras.Sequential([keras.Input((2,)), inner, keras.layers.Dense(1, name="head")])
    kernel = np.arange(6.0, dtype="float32").reshape(3, 2)
    file = tmp_path / "model.safetensors"
    save_file({"fc.weight": kernel, "fc.bias": np.zeros(3, "float32")}, file)
    paths = ["fc/fc/kernel", "fc/fc/bias"]
    for each in (
        model,
        tfwd.parametrize(model, {"fc/fc/kernel": tfwd.parametrizations.Dropout(0.5)}),
    ):
        found = plan(each, file, {"fc/fc": "fc"}, allow_missing="head/.*")
        assert [step.target.path for step in found.steps] == paths
        found.apply()
        np.testing.assert_array_equal(each.weights[0].numpy(), kernel.T)
    found = plan(inner, file, {"/fc": "fc"})
    assert [step.target.path for step in found.steps] == ["fc/kernel", "fc/bias"]
