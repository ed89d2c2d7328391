"""A program that the tests of loading start once per worker. It writes what it loaded.

Arguments: the folder of the weights, the file for the results, and the scenarios. Only the chief is
given a folder that exists.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfwd
from tfwd import layers
from tfwd.layers import transformer
from tfwd.pretrained import assign

LIMIT = 30  # seconds for a scenario. A worker that waits longer ends with a traceback.
INDEX = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


class Several(keras.layers.Layer):
    """A layer with a weight of each dtype."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
        super().__init__(**options)
        self.shapes = shapes

    def build(self, input_shape: Any = None) -> None:
        for name, shape in self.shapes.items():
            self.add_weight(
                name=name,
                shape=shape,
                dtype=name.partition("_")[0],
                initializer="zeros",
                trainable=False,
            )
        self.built = True

    def call(self, inputs: Any) -> Any:
        return inputs


def several(folder: Path, dtypes: tuple[str, ...] = ()) -> keras.layers.Layer:
    """Returns a layer with the shapes in the file `several.json`, which all workers have.

    Args:
        folder: the folder of the weights.
        dtypes: the dtypes of the weights; all by default.
    """
    shapes = json.loads((folder.parent / "several.json").read_text("utf-8"))
    kept = {
        name: tuple(shape)
        for name, shape in shapes.items()
        if not dtypes or name.partition("_")[0] in dtypes
    }
    layer = Several(kept, name="several")
    layer.build()
    return layer


def dense(rows: int = 4, dtype: str = "float32") -> keras.Model:
    parts = [
        keras.layers.Dense(rows, name="first", dtype=dtype),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dense(2, name="second", dtype=dtype),
    ]
    return keras.Sequential([keras.Input((3,)), *parts], name="dense")


def bits(model: Any) -> dict[str, np.ndarray]:
    """Returns the bytes of this worker's copy of each weight."""
    found = {}
    for number, weight in enumerate(model.weights):
        held = getattr(weight, "_value", getattr(weight, "_variable", weight))
        (local,) = getattr(held, "values", (held,))
        name = weight.name.partition(":")[0].rpartition("/")[2]
        found[f"{number} {name}"] = np.ascontiguousarray(local.numpy()).reshape(-1).view(np.uint8)
    return found


def file_of(name: str, **options: Any) -> Callable[[Any, Path], Any]:
    """Returns the scenario that loads a file of weights of each dtype.

    The layer is made outside the scope, where it may have dtypes that TensorFlow does not send.
    """

    def scenario(strategy: Any, folder: Path) -> Any:
        layer = several(folder)
        with tfwd.distribute.scope(strategy):
            tfwd.pretrained.load(layer, folder / name, **options)
        return bits(layer)

    return scenario


def in_scope(strategy: Any, folder: Path) -> Any:
    dtypes = ("bool", "float16", "float32", "float64", "int32", "int64")
    with tfwd.distribute.scope(strategy):
        layer = several(folder, dtypes)
        tfwd.pretrained.load(
            layer, folder / "several.safetensors", ignore=["bfloat16", "int8", "uint8"]
        )
    return bits(layer)


def after_scope(strategy: Any, folder: Path) -> Any:
    with tfwd.distribute.scope(strategy):
        model = dense()
    tfwd.pretrained.load(model, folder / "dense.safetensors")
    return bits(model)


def narrower(strategy: Any, folder: Path) -> Any:
    with tfwd.distribute.scope(strategy):
        model = dense(dtype="float16")
    tfwd.pretrained.load(model, folder / "dense.safetensors")
    return bits(model)


def bert(strategy: Any, folder: Path) -> Any:
    with tfwd.distribute.scope(strategy):
        model = transformer.Bert.from_pretrained(
            folder / "bert", add_pooler=True, allow_missing="pooler/.*"
        )
    return bits(model)


def mixout(strategy: Any, folder: Path) -> Any:
    with tfwd.distribute.scope(strategy):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="first")])
        source = folder / "mixout.npz"
        plan = tfwd.pretrained.plan(model, source)
        of_plan = plan.value_of(model.layers[-1].kernel)
        layer = layers.Mixout(keras.layers.Dense(4, name="first"), 0.5, towards=str(source))
        layer.build((None, 3))
    (held,) = layer.references.all()
    (local,) = getattr(held, "values", (held,))
    return {"plan": of_plan.view(np.uint8).ravel(), "layer": local.numpy().view(np.uint8).ravel()}


def memory(strategy: Any, folder: Path) -> Any:
    """Returns the largest memory of arrays, which becomes the weights' own, and of a message."""
    layer = Several({f"float32_{i}": (8 << 20,) for i in range(3)}, name="large")
    layer.build()
    own, sizes = tfwd._keras.Lockstep._sum, []

    def counted(self: Any, words: np.ndarray) -> np.ndarray:
        sizes.append(words.nbytes)
        return own(self, words)

    tfwd._keras.Lockstep._sum = counted
    tracemalloc.start()
    try:
        with tfwd.distribute.scope(strategy):
            tfwd.pretrained.load(layer, folder / "l.safetensors")
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        tfwd._keras.Lockstep._sum = own
    return {"traced": np.int64(traced), "sent": np.int64(max(sizes))}


def warned(strategy: Any, folder: Path) -> Any:
    with tfwd.distribute.scope(strategy):
        model = dense()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tfwd.pretrained.load(model, folder / "infinite.safetensors")
    raise UserWarning(" ".join(str(each.message) for each in caught))


def wrong(name: str, **options: Any) -> Callable[[Any, Path], Any]:
    """Returns a scenario in which a file cannot be loaded."""

    def scenario(strategy: Any, folder: Path) -> Any:
        model = dense()
        with tfwd.distribute.scope(strategy):
            tfwd.pretrained.load(model, folder / name, **options)

    return scenario


def no_config(strategy: Any, folder: Path) -> Any:
    with tfwd.distribute.scope(strategy):
        transformer.Bert.from_pretrained(folder / "nowhere")


def changed(strategy: Any, folder: Path) -> Any:
    model = dense()
    with tfwd.distribute.scope(strategy):
        file = folder / "changing.safetensors"
        if INDEX == 0:
            shutil.copy(folder / "dense.safetensors", file)
        plan = tfwd.pretrained.plan(model, file)
        if INDEX == 0:
            shutil.copy(folder / "other_shape.safetensors", file)
        plan.apply()


def other_model(strategy: Any, folder: Path) -> Any:
    model = dense(rows=5 if INDEX == 1 else 4)
    with tfwd.distribute.scope(strategy):
        tfwd.pretrained.load(model, folder / "dense.safetensors")


def other_arguments(strategy: Any, folder: Path) -> Any:
    model = dense()
    with tfwd.distribute.scope(strategy):
        plan = tfwd.pretrained.plan(model, folder / "dense.safetensors")
        plan.apply(allow_overflow=INDEX == 2)


def not_built(strategy: Any, folder: Path) -> Any:
    model = dense() if INDEX != 1 else keras.Sequential([keras.layers.Dense(2)], name="dense")
    with tfwd.distribute.scope(strategy):
        tfwd.pretrained.load(model, folder / "dense.safetensors")


def no_memory(strategy: Any, folder: Path) -> Any:
    """Lets the third assignment of worker 1 fail."""
    own, calls = assign._tensor, []

    def tensor(values: np.ndarray) -> tf.Tensor:
        calls.append(1)
        if INDEX == 1 and len(calls) == 3:
            raise MemoryError("no memory for a tensor")
        return own(values)

    assign._tensor = tensor
    model = dense()
    try:
        with tfwd.distribute.scope(strategy):
            tfwd.pretrained.load(model, folder / "dense.safetensors")
    finally:
        assign._tensor = own


def killed(strategy: Any, folder: Path) -> Any:
    """Sends a worker SIGKILL in the middle of the tensors."""
    own, calls = assign.read_value, []
    victim = int(os.environ["KILLED"])

    def read(*arguments: Any) -> np.ndarray:
        calls.append(1)
        if victim == INDEX and len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*arguments)

    assign.read_value = read
    with tfwd.distribute.scope(strategy):
        model = dense()
        tfwd.pretrained.load(model, folder / "dense.safetensors")


SCENARIOS: dict[str, Callable[[Any, Path], Any]] = {
    "safetensors": file_of("several.safetensors"),
    "shards": file_of("shards"),
    "npz": file_of("several.npz", allow_missing="bfloat16"),
    "checkpoint": file_of("checkpoint/all"),
    "in_scope": in_scope,
    "after_scope": after_scope,
    "narrower": narrower,
    "bert": bert,
    "mixout": mixout,
    "memory": memory,
    "warned": warned,
    "not_there": wrong("nowhere.safetensors"),
    "no_config": no_config,
    "cut_off": wrong("cut_off.safetensors"),
    "no_safetensors": wrong("text.safetensors"),
    "bad_checksum": wrong("bad_checksum.npz"),
    "missing_key": wrong("missing_key.safetensors"),
    "unexpected_key": wrong("unexpected_key.safetensors"),
    "other_shape": wrong("other_shape.safetensors"),
    "all_nan": wrong("all_nan.safetensors"),
    "bad_pattern": wrong("dense.safetensors", ignore="["),
    "changed": changed,
    "other_model": other_model,
    "other_arguments": other_arguments,
    "not_built": not_built,
    "no_memory": no_memory,
    "again": after_scope,
    "killed": killed,
}


def main() -> None:
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    errors: dict[str, list[str]] = {}
    for name in sys.argv[3:]:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        keras.utils.set_random_seed(INDEX)  # other values than the chief's before loading
        try:
            found = SCENARIOS[name](strategy, folder)
            np.savez(f"{out}_{name}.npz", **found)
        except Exception as error:
            errors[name] = [type(error).__name__, str(error)]
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    Path(f"{out}.json").write_text(json.dumps(errors), encoding="utf-8")


if __name__ == "__main__":
    main()
