"""Loading in three processes, of which only the chief has the files.

The oracles are the arrays that the tests wrote, and the reader of safetensors. The processes run
all scenarios once, because TensorFlow needs seconds to load.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file
from watched_processes import Processes, finish

from tfwd.runs.workers.local_workers import free_ports

PROGRAM = Path(__file__).with_name("load_program.py")
PUBLISHED = PROGRAM.parents[1] / "layers" / "transformer" / "published" / "bert"
RUN_FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
WORKERS = 3
LOADED = ("safetensors", "shards", "npz", "checkpoint", "in_scope", "after_scope", "narrower")
LARGE = 8 << 20  # numbers in each of three tensors
# Variables that a scenario does not load: NumPy's files have no bfloat16, and TensorFlow makes no
# variables of these dtypes in the scope.
WITHOUT = {"npz": {"bfloat16"}, "in_scope": {"bfloat16", "int8", "uint8"}}
# A part of the error of each scenario, which is the same on all workers.
ERRORS = {
    "warned": ("UserWarning", "chief/infinite.safetensors was loaded, but 1 of 12 numbers"),
    "not_there": ("SourceError", "chief/nowhere.safetensors does not exist"),
    "no_config": ("ValueError", "chief/nowhere does not exist"),
    "cut_off": ("SourceError", "chief/cut_off.safetensors is incomplete"),
    "no_safetensors": ("SourceError", "chief/text.safetensors is damaged"),
    "bad_checksum": ("SourceError", "chief/bad_checksum.npz is damaged"),
    "missing_key": ("PlanError", "'second/bias' has no key 'second/bias' in the file"),
    "unexpected_key": ("PlanError", "key 'third/bias' belongs to no variable"),
    "other_shape": ("PlanError", "'second/bias' is (2,); but key"),
    "all_nan": ("PlanError", "key 'first/kernel', for 'first/kernel', has no finite number"),
    "bad_pattern": ("ValueError", "'[', for keys, is not a regular expression"),
    "changed": ("PlanError", "changing.safetensors has changed since the plan was made"),
    "other_model": ("PlanError", "worker 1: "),
    "other_arguments": ("PlanError", "worker 2: "),
    "not_built": ("ValueError", "worker 1: 'dense' has no weights yet"),
    "no_memory": ("MemoryError", "worker 1: no memory for a tensor"),
}


def special(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Returns random bits of a dtype: NaN of all kinds, both zeros, and infinity among others."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    size = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 256, size * kind.itemsize, np.uint8)
    if kind == np.bool_:
        raw &= 1
    values = raw.view(kind)
    if kind.kind in "fV":
        ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0]).astype(kind)
        values[: len(ends)] = ends
        bits = values.view(f"u{kind.itemsize}")
        bits[len(ends)] = ends[4:5].view(bits.dtype)[0] | bits.dtype.type(5)  # NaN, with more bits
    return values.reshape(shape)


def several() -> dict[str, np.ndarray]:
    shapes = {
        # More than a block of a source and than a message, and no multiple of four bytes.
        **{"float16_large": (2_200_001,), "float32_large": (1031, 1117), "float32": (7, 3)},
        **{"float64": (5, 2), "bfloat16": (13,), "int8": (7,), "uint8": (5,), "int32": (3, 3)},
        **{"int64": (9,), "bool": (11,), "float32_0": (0, 4), "float64_0": (4, 0)},
    }
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        dtype = name.partition("_")[0]
        small = np.zeros(shape, dtype) if 0 in shape else special(dtype, shape, seed)
        found[name] = small
    found["float32_1"] = np.array(-0.0, "float32")
    return found


def dense() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {"first/kernel": (3, 4), "first/bias": (4,), "second/kernel": (4, 2)}
    shapes |= {"second/bias": (2,)}
    shapes |= {f"norm/{name}": (4,) for name in ("gamma", "beta", "moving_mean")}
    shapes |= {"norm/moving_variance": (4,)}
    found = {name: rng.normal(size=shape).astype("float32") for name, shape in shapes.items()}
    found["first/bias"][0] = -0.0
    return found


def write(folder: Path) -> None:
    """Writes the files that only the chief has."""
    folder.mkdir()
    all_kinds, model = several(), dense()
    shapes = {name: array.shape for name, array in all_kinds.items()}
    (folder.parent / "several.json").write_text(json.dumps(shapes), encoding="utf-8")
    save_file(all_kinds, folder / "several.safetensors")
    (folder / "shards").mkdir()
    parts = [dict(list(all_kinds.items())[i::2]) for i in range(2)]
    names = {}
    for number, part in enumerate(parts):
        save_file(part, folder / "shards" / f"{number}.safetensors")
        names |= dict.fromkeys(part, f"{number}.safetensors")
    index = folder / "shards" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    # NumPy's files may have columns first, or the other order of bytes.
    plain = {name: array for name, array in all_kinds.items() if name != "bfloat16"}
    plain["float32_large"] = np.asfortranarray(plain["float32_large"])
    plain["int32"] = plain["int32"].astype(">i4")
    np.savez(folder / "several.npz", **plain)
    checkpoint = tf.train.Checkpoint(**{k: tf.Variable(v) for k, v in all_kinds.items()})
    (folder / "checkpoint").mkdir()
    checkpoint.write(str(folder / "checkpoint" / "all"))
    save_file(model, folder / "dense.safetensors")
    shutil.copytree(PUBLISHED, folder / "bert")
    arrays = load_file(PUBLISHED / "model.safetensors")
    without = {name: array for name, array in arrays.items() if "pooler" not in name}
    assert len(without) < len(arrays)
    (folder / "bert" / "model.safetensors").unlink()
    save_file(without, folder / "bert" / "model.safetensors")
    np.savez(folder / "mixout.npz", **{k: v for k, v in model.items() if "first" in k})

    save_file({f"float32_{i}": np.full(LARGE, i, "f4") for i in range(3)}, folder / "l.safetensors")

    infinite = {name: array.copy() for name, array in model.items()}
    infinite["first/kernel"][1, 1] = np.inf
    save_file(infinite, folder / "infinite.safetensors")
    whole = (folder / "dense.safetensors").read_bytes()
    (folder / "cut_off.safetensors").write_bytes(whole[:-9])
    (folder / "text.safetensors").write_text("no header", encoding="utf-8")
    file = folder / "bad_checksum.npz"
    np.savez(file, **model)
    damaged = bytearray(file.read_bytes())
    at = damaged.index(model["second/bias"].tobytes())
    damaged[at] ^= 1
    file.write_bytes(damaged)
    rest = {name: array for name, array in model.items() if name != "second/bias"}
    save_file(rest, folder / "missing_key.safetensors")
    save_file({**model, "third/bias": np.ones(2)}, folder / "unexpected_key.safetensors")
    save_file({**rest, "second/bias": np.ones(3, "f4")}, folder / "other_shape.safetensors")
    nothing = {**model, "first/kernel": np.full((3, 4), np.nan, "f4")}
    save_file(nothing, folder / "all_nan.safetensors")


def run(folder: Path, scenarios: list[str], **variables: str) -> list[tuple[int, str]]:
    """Runs the program in each worker. Returns the exit codes and outputs."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(WORKERS)]
    with Processes() as processes:
        running = []
        for index in range(WORKERS):
            task = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            files = folder / ("chief" if index == 0 else f"nothing_{index}")
            arguments = [str(PROGRAM), str(files), str(folder / f"out_{index}"), *scenarios]
            environment = {"TF_CONFIG": json.dumps(task), **variables}
            running.append(processes.python(RUN_FILE, arguments, environment))
        return [finish(process) for process in running]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with the files of the chief and the results of all workers."""
    folder = tmp_path_factory.mktemp("load")
    write(folder / "chief")
    ends = run(folder, [*LOADED, "bert", "mixout", "memory", *ERRORS, "again"])
    assert [code for code, _ in ends] == [0] * WORKERS, ends
    return folder


def loaded(folder: Path, scenario: str) -> list[dict[str, bytes]]:
    """Returns the bytes that each worker has after a scenario, by the numbers and names."""
    found = []
    for index in range(WORKERS):
        errors = json.loads((folder / f"out_{index}.json").read_text("utf-8"))
        assert scenario not in errors, errors[scenario]
        with np.load(folder / f"out_{index}_{scenario}.npz") as file:
            found.append({name: file[name].tobytes() for name in file.files})
    return found


def by_name(weights: dict[str, bytes]) -> dict[str, bytes]:
    return {name.partition(" ")[2]: content for name, content in weights.items()}


@pytest.mark.parametrize("scenario", ["safetensors", "shards", "npz", "checkpoint", "in_scope"])
def test_all_workers_have_the_bits_of_the_file(folder: Path, scenario: str) -> None:
    expected = {name: array.tobytes() for name, array in several().items()}
    for worker in loaded(folder, scenario):
        found = by_name(worker)
        for name in expected.keys() - WITHOUT.get(scenario, set()):
            assert found[name] == expected[name], name


@pytest.mark.parametrize("scenario", ["after_scope", "again"])
def test_a_model_that_was_made_in_the_scope(folder: Path, scenario: str) -> None:
    """Checks a load outside the scope, and one more after all the failures."""
    arrays = load_file(folder / "chief" / "dense.safetensors")
    for worker in loaded(folder, scenario):
        assert sorted(worker.values()) == sorted(array.tobytes() for array in arrays.values())


def test_a_narrower_dtype(folder: Path) -> None:
    arrays = load_file(folder / "chief" / "dense.safetensors")
    dtypes = {name: "float32" if "norm" in name else "float16" for name in arrays}
    expected = sorted(array.astype(dtypes[name]).tobytes() for name, array in arrays.items())
    for worker in loaded(folder, "narrower"):
        assert sorted(worker.values()) == expected


def test_a_published_model_and_its_config(folder: Path) -> None:
    """Checks also the pooler, which is not in the file, and which each worker would draw."""
    first, *others = loaded(folder, "bert")
    assert all(worker == first for worker in others)
    arrays = load_file(PUBLISHED / "model.safetensors")
    words = arrays["embeddings.word_embeddings.weight"]
    kernel = arrays["encoder.layer.0.intermediate.dense.weight"].T
    assert {words.tobytes(), kernel.tobytes()} <= set(first.values())
    assert len({content for content in first.values() if any(content)}) > 20  # drawn or loaded


def test_the_memory_of_a_load(folder: Path) -> None:
    """Checks that a load needs the weights and less than one tensor, and messages of 4 MiB."""
    for worker in loaded(folder, "memory"):
        traced, longest = (np.frombuffer(worker[name], "int64")[0] for name in ("traced", "sent"))
        assert 3 * 4 * LARGE <= traced <= 4 * 4 * LARGE
        assert 1 << 20 <= longest <= 4 << 20


def test_references_of_mixout(folder: Path) -> None:
    kernel = dense()["first/kernel"].tobytes()
    for worker in loaded(folder, "mixout"):
        assert worker == {"plan": kernel, "layer": kernel}


@pytest.mark.parametrize("scenario", ERRORS)
def test_an_error_is_the_same_on_all_workers(folder: Path, scenario: str) -> None:
    kind, part = ERRORS[scenario]
    errors = [
        json.loads((folder / f"out_{index}.json").read_text("utf-8")).get(scenario)
        for index in range(WORKERS)
    ]
    assert errors[0] is not None
    assert errors[0][0] == kind and part in errors[0][1], errors[0]
    assert errors == [errors[0]] * WORKERS
    assert "nothing_" not in errors[0][1]  # the path of another worker


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["the chief", "another worker"])
def test_a_killed_worker_ends_the_load_on_all(victim: int, tmp_path: Path) -> None:
    write(tmp_path / "chief")
    ends = run(tmp_path, ["killed"], KILLED=str(victim))
    assert ends[victim][0] == -signal.SIGKILL
    others = [index for index in range(WORKERS) if index != victim]
    errors = [
        json.loads((tmp_path / f"out_{index}.json").read_text("utf-8"))["killed"]
        for index in others
    ]
    assert errors == [errors[0]] * len(others)
    assert errors[0][0] == "UnavailableError"
    assert errors[0][1].startswith("another worker ended or cannot be reached"), errors[0]
