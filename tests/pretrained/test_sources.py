"""Sources of weights: their names and values, and errors for damaged files."""

import json
import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import save_file

from tfwd.pretrained import SourceError
from tfwd.pretrained.sources import base
from tfwd.pretrained.sources.opening import open_source

RNG = np.random.default_rng(0)
ARRAYS = {
    "a.weight": RNG.normal(size=(5, 3)).astype("float32"),
    "a.bias": RNG.normal(size=3).astype("float16"),
    "scalar": np.array(2.5),
    "ids": np.arange(4, dtype="int64"),
    "empty": np.zeros((0, 3), "float32"),
}


def safetensors(folder):
    save_file(ARRAYS, folder / "model.safetensors")
    return folder / "model.safetensors"


def sharded(folder):
    names = list(ARRAYS)
    parts = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, keys in parts.items():
        save_file({key: ARRAYS[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder / "model.safetensors.index.json"


def archive(folder):
    np.savez(folder / "weights.npz", **ARRAYS)
    return folder / "weights.npz"


def compressed(folder):
    np.savez_compressed(folder / "weights.npz", **ARRAYS)
    return folder / "weights.npz"


def checkpoint(folder):
    tf.raw_ops.SaveV2(
        prefix=str(folder / "model"),
        tensor_names=list(ARRAYS),
        shape_and_slices=[""] * len(ARRAYS),
        tensors=list(ARRAYS.values()),
    )
    return folder / "model.index"


KINDS = [safetensors, sharded, archive, compressed, checkpoint]


def read(source, key):
    blocks = [block.copy() for block in source.blocks(key)]  # the next may take its place
    assert all(len(b) for b in blocks if b.shape) or source.entries[key].shape[0] == 0
    if not blocks:
        return np.zeros(source.entries[key].shape)
    return np.concatenate([np.atleast_1d(b) for b in blocks]).reshape(source.entries[key].shape)


@pytest.mark.parametrize("block", [base.BLOCK, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_written_is_said_and_read(kind, block, tmp_path, monkeypatch):
    monkeypatch.setattr(base, "BLOCK", block)
    with open_source(kind(tmp_path)) as source:
        assert set(source.entries) == set(ARRAYS)
        for key, array in ARRAYS.items():
            entry = source.entries[key]
            assert (entry.shape, entry.dtype) == (array.shape, array.dtype.name)
            assert entry.nbytes == array.nbytes
            found = read(source, key)
            assert found.dtype == array.dtype or array.size == 0
            np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_as_the_file_in_it(kind, tmp_path):
    kind(tmp_path)
    if kind is checkpoint:
        (tmp_path / "checkpoint").write_text('model_checkpoint_path: "model"\n')
    with open_source(tmp_path) as source:
        assert set(source.entries) == set(ARRAYS)


def test_bfloat16_is_read(tmp_path):
    values = np.array([1.5, -2.0, 3.0e38], ml_dtypes.bfloat16)
    save_file({"a": values}, tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert source.entries["a"].dtype == "bfloat16"
        np.testing.assert_array_equal(read(source, "a").astype("float32"), values.astype("float32"))


def test_arrays_with_the_first_axis_fastest(tmp_path):
    array = np.asfortranarray(RNG.normal(size=(4, 3)))
    np.savez(tmp_path / "a.npz", a=array)
    with open_source(tmp_path / "a.npz") as source:
        np.testing.assert_array_equal(read(source, "a"), array)


def all_of(source):
    return {key: read(source, key) for key in source.entries}


@pytest.mark.parametrize("kind", [safetensors, archive, compressed])
def test_a_file_that_was_cut_anywhere_is_one_error(kind, tmp_path):
    path = kind(tmp_path)
    whole = path.read_bytes()
    cuts = sorted({0, 1, 7, 8, 9, len(whole) - 1, *range(0, len(whole), max(1, len(whole) // 60))})
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(SourceError, match=f"^{path} ") as caught, open_source(path) as source:
            all_of(source)
        assert "\n" not in str(caught.value)


def test_a_file_cut_in_its_data_says_where_it_ends(tmp_path):
    path = safetensors(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    said = rf"is incomplete: it ends within '.*', after {len(whole) - 1:,} of {len(whole):,} bytes"
    with pytest.raises(SourceError, match=said):
        open_source(path)


def test_a_checkpoint_that_was_cut_is_one_error(tmp_path):
    index = checkpoint(tmp_path)
    data = tmp_path / "model.data-00000-of-00001"
    for path in (index, data):
        whole = path.read_bytes()
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            with pytest.raises(SourceError, match="model "), open_source(index) as source:
                all_of(source)
        path.write_bytes(whole)


def rewritten(path, change):
    """Writes a safetensors file with another header."""
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = change(json.loads(whole[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])


def with_entry(name, **said):
    return lambda header: {**header, name: {**header[name], **said}}


@pytest.mark.parametrize(
    "change",
    [
        with_entry("a.weight", shape=[5, 4]),
        with_entry("a.weight", shape=[1 << 40, 1 << 40]),
        with_entry("a.weight", shape=[-5, 3]),
        with_entry("a.weight", data_offsets=[0, 1 << 50]),
        with_entry("a.weight", data_offsets=[4, 64]),
        with_entry("a.weight", dtype="F7"),
        with_entry("a.weight", dtype=3),
        lambda header: {**header, "more": header["a.weight"]},  # overlapping
        lambda header: {k: v for k, v in header.items() if k != "a.weight"},  # a hole
        lambda header: [],
        lambda header: b"{",
        lambda header: b"\xff\xfe",
        lambda header: json.dumps(header).encode().replace(b"a.bias", b"ids"),  # twice
    ],
)
def test_headers_that_are_wrong(change, tmp_path):
    path = safetensors(tmp_path)
    rewritten(path, change)
    said = f"^{path} is (damaged|incomplete)"
    with pytest.raises(SourceError, match=said), open_source(path) as source:
        all_of(source)


def test_a_header_that_says_that_it_is_huge(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(SourceError, match="its header has .* bytes, and the file 10"):
        open_source(path)


def test_a_folder_with_one_file_and_with_shards(tmp_path):
    """transformers reads the one file too."""
    sharded(tmp_path)
    save_file({"only": np.ones(2, "float32")}, tmp_path / "model.safetensors")
    with open_source(tmp_path) as source:
        assert list(source.entries) == ["only"]


def test_shards_that_do_not_fit_their_index(tmp_path):
    index = sharded(tmp_path)
    whole = json.loads(index.read_text())

    def write(**changes):
        index.write_text(json.dumps({"weight_map": {**whole["weight_map"], **changes}}))

    write(more="model-2.safetensors")
    with pytest.raises(SourceError, match="'more' in model-2.safetensors, which does not have"):
        open_source(index)
    write(ids="model-1.safetensors")
    with pytest.raises(SourceError, match="'ids' in model-1.safetensors, which does not"):
        open_source(index)
    fewer = {k: v for k, v in whole["weight_map"].items() if k != "ids"}
    index.write_text(json.dumps({"weight_map": fewer}))
    with pytest.raises(SourceError, match="has 'ids', which .* lists in no file"):
        open_source(index)
    write(ids="../model-2.safetensors")
    with pytest.raises(SourceError, match="'../model-2.safetensors', which is not in that"):
        open_source(index)
    for text in ("[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(SourceError, match="is not an index of shards: it has no 'weight_map'"):
            open_source(index)
    index.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(SourceError, match="'a' appears twice"):
        open_source(index)
    index.write_text(json.dumps(whole))
    os.remove(tmp_path / "model-2.safetensors")
    with pytest.raises(SourceError, match="model-2.safetensors does not exist"):
        open_source(index)


def test_links_out_of_a_folder(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    there = safetensors(tmp_path / "elsewhere")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(there)
    with pytest.raises(SourceError, match="is a link to another folder, to .*elsewhere"):
        open_source(folder)
    # The cache of the hub is made of such links.
    cache = tmp_path / "models--x"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "1").mkdir(parents=True)
    os.rename(there, cache / "blobs" / "abc")
    (cache / "snapshots" / "1" / "model.safetensors").symlink_to("../../blobs/abc")
    with open_source(cache / "snapshots" / "1") as source:
        assert set(source.entries) == set(ARRAYS)


def test_archives_that_are_wrong(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, a=np.array([{}, None], dtype=object))
    with pytest.raises(
        SourceError, match="'a' is an array of Python objects, which tfwd does not read"
    ):
        open_source(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.npy", b"no array")
    with pytest.raises(SourceError, match="a.npz is damaged"):
        open_source(path)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1048576), }"
    with zipfile.ZipFile(path, "w") as file:
        start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header) + 1)
        file.writestr("a.npy", start + header + b"\n" + bytes(16))
    with pytest.raises(SourceError, match=r"'a' should be \(1099511627776, 1048576\), but has 16"):
        open_source(path)


def test_files_of_our_programs_lose_their_header(tmp_path):
    text = np.frombuffer(json.dumps({"format": "tfwd language model weights"}).encode(), np.uint8)
    np.savez(tmp_path / "weights.npz", header=text, kernel=np.ones(3))
    with open_source(tmp_path) as source:
        assert set(source.entries) == {"kernel"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "is a pickle, which can run any program .* Convert the file"),
        ("model.pt", "is a pickle"),
        ("model.h5", "is a Keras file: read it with model.load_weights"),
        ("model.txt", "has an unknown extension: give a .safetensors"),
    ],
)
def test_files_of_other_kinds(name, message, tmp_path):
    with pytest.raises(SourceError, match="does not exist|pickle|Keras file"):
        open_source(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(SourceError, match=message):
        open_source(tmp_path / name)


def test_folders_that_cannot_be_used(tmp_path):
    with pytest.raises(SourceError, match="has no weights: give a folder with a .safetens"):
        open_source(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(SourceError, match="pytorch_model.bin is a pickle"):
        open_source(tmp_path)
    for name in "ab":
        save_file({"x": np.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(SourceError, match="several files of weights: .* one of a.saf.*, b.saf"):
        open_source(tmp_path)


def test_a_header_of_brackets(tmp_path):
    """Checks JSON whose nesting exceeds Python's recursion limit."""
    header = b"[" * 100_000
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(SourceError, match="is damaged"):
        open_source(file)
