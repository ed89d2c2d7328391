"""Loading weights of a published model: peak memory above the model, time, and growth.

    python benchmarks/pretrained_load.py

The weights are random, in BERT-large's shapes (1.25 GiB), in one file and in five shards. tfwd,
Hugging Face's transformers (PyTorch) and keras-hub's converter create the model and load its
weights. `load_file` of safetensors returns only arrays.

Each weight is summed once after it is loaded, because transformers maps the file and reads it only
when weights are used.

Memory is the peak of a call in a separate process, minus the bytes of the weights (see
common/peak_memory.py). Pages of a mapped file count as long as they stay in the process. Times are
CPU times of calls in turn in one process, with the file in the system's cache. CPU time depends
less on other programs on the machine.

The growth of the time with the layers is measured on narrow layers. Their names take more time than
their numbers. Compiled regular expressions are deleted before each call, as before a first call.
"""

from __future__ import annotations

import gc
import json
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common import measure, peak_memory
from common.measure import Row, Spread

MIB = 1 << 20
OURS, FILL = "tfwd", "tfwd, into an existing model"
TORCH, HUB, ARRAYS = "transformers", "keras-hub", "load_file"
SINGLE, SHARDS = "one file", "five shards"
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
LAYERS = (6, 12, 24, 48, 96)
NARROW = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
AT_MOST = 3.0  # times the time of load_file
LARGEST = CONFIG["vocab_size"] * CONFIG["hidden_size"] * 4  # bytes of the word embeddings
MORE = 64 * MIB


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors of a `BertModel` with a config, by name."""
    width, wide = config["hidden_size"], config["intermediate_size"]
    found: dict[str, tuple[int, ...]] = {}

    def norm(name: str) -> None:
        found[f"{name}.weight"] = found[f"{name}.bias"] = (width,)

    def dense(name: str, into: int, out: int) -> None:
        found[f"{name}.weight"], found[f"{name}.bias"] = (out, into), (out,)

    found["embeddings.word_embeddings.weight"] = (config["vocab_size"], width)
    found["embeddings.position_embeddings.weight"] = (config["max_position_embeddings"], width)
    found["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], width)
    norm("embeddings.LayerNorm")
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            dense(f"{layer}.attention.{part}", width, width)
        norm(f"{layer}.attention.output.LayerNorm")
        dense(f"{layer}.intermediate.dense", width, wide)
        dense(f"{layer}.output.dense", wide, width)
        norm(f"{layer}.output.LayerNorm")
    dense("pooler.dense", width, width)
    return found


def write(folder: Path, files: int, config: Mapping[str, Any] = CONFIG) -> int:
    """Writes a model in a number of files, and returns the bytes of its weights."""
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    there, size, weight_map = list(shapes(config).items()), 0, {}
    share = -(-len(there) // files)
    for i in range(files):
        name = "model.safetensors"
        if files > 1:
            name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        tensors = {}
        for key, shape in there[i * share : (i + 1) * share]:
            tensors[key] = rng.standard_normal(shape, "float32")
            tensors[key] *= 0.02
            weight_map[key] = name
            size += tensors[key].nbytes
        save_file(tensors, folder / name, metadata={"format": "pt"})
    if files > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return size


def ours(folder: str) -> Callable[[], Any]:
    """Returns a call that creates a model with `from_pretrained`."""
    measure.equal_threads()
    from tfwd.layers import transformer

    return lambda: _summed(transformer.Bert.from_pretrained(folder, add_pooler=True))


def fill(folder: str) -> Callable[[], Any]:
    """Returns a call that loads the weights into a built model."""
    measure.equal_threads()
    import tfwd
    from tfwd.layers import transformer

    model = transformer.Bert.from_pretrained(folder, add_pooler=True, load_weights=False)
    mapping = transformer.mapping(folder, "")

    def load() -> Any:
        tfwd.pretrained.load(model, folder, mapping=mapping)
        return _summed(model)

    return load


def torch(folder: str) -> Callable[[], Any]:
    """Returns a call of Hugging Face's loader for PyTorch."""
    import transformers

    measure.equal_threads()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    def load() -> Any:
        model = transformers.BertModel.from_pretrained(folder)
        return model, [parameter.sum().item() for parameter in model.parameters()]

    return load


def hub(folder: str) -> Callable[[], Any]:
    """Returns a call of keras-hub's converter."""
    measure.equal_threads()
    import keras_hub

    return lambda: _summed(keras_hub.models.BertBackbone.from_preset(folder))


def arrays(folder: str) -> Callable[[], Any]:
    """Returns a call that reads all tensors as NumPy arrays."""
    from safetensors.numpy import load_file

    def read() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            found |= load_file(path)
        return found, [array.sum() for array in found.values()]

    return read


def _summed(model: Any) -> Any:
    import tensorflow as tf

    return model, [tf.reduce_sum(weight.value).numpy() for weight in model.weights]


SIDES = {OURS: ours, FILL: fill, TORCH: torch, HUB: hub, ARRAYS: arrays}
PRELOAD = ("tensorflow", "keras", "tfwd.layers.transformer")


def once(way: str, folder: str) -> Callable[[], list[int]]:
    """Returns a function that measures the peak of the first call, in a child process."""
    call = SIDES[way](folder)
    kept: list[Any] = []  # holds the model, as a user's program does
    return lambda: peak_memory.peaks(lambda: kept.append(call()), 1, warmup=0)


def above(found: Any, size: int) -> float | str:
    """Returns the MiB of a peak above the weights, or a text with the reason if it is missing."""
    return found if isinstance(found, str) else (found[0] - size) / MIB


def by_memory(folders: dict[str, str], size: int) -> list[Row]:
    """Measures the peaks above the weights. The ratio is to the largest tensor plus 64 MiB."""
    # keras-hub's converter does not read shards from a disk.
    cases = {
        (way, files): (way, folder)
        for files, folder in folders.items()
        for way in SIDES
        if not (files == SHARDS and way == HUB)
    }
    named = {f"{way}, {files}": case for (way, files), case in cases.items()}
    found = peak_memory.in_children(once, named, steps=None, at_once=1, preload=PRELOAD)
    rows = []
    for files in folders:
        found_here = {
            way: above(found[f"{way}, {files}"], 0 if way == FILL else size)
            for way in SIDES
            if f"{way}, {files}" in found
        }
        for way in (OURS, FILL):
            mine = found_here[way]
            if isinstance(mine, str):
                measure.CONSOLE.print(f"without {way}: {mine}", style="red")
                continue
            rows.append(
                Row(
                    f"memory above the weights, {files}: {way}",
                    Spread.of([mine * MIB / (LARGEST + MORE)]),
                    "over the largest tensor + 64 MiB",
                    mine,
                    {w: v for w, v in found_here.items() if w not in (OURS, FILL)},
                    "MiB",
                    at_most=1.0,
                )
            )
    return rows


def by_time(folders: dict[str, str], seconds: float) -> list[Row]:
    """Measures the time, and returns rows for the single file and for the shards."""
    rows = []
    for files, folder in folders.items():
        made = {
            way: measure.attempt(lambda way=way, folder=folder: SIDES[way](folder), way)
            for way in (OURS, TORCH, HUB, ARRAYS)
            if not (files == SHARDS and way == HUB)
        }
        calls = {way: _freed(call) for way, call in made.items() if call is not None}
        found = measure.alternate(
            calls,
            warmup=1,
            least=5,
            seconds=seconds,
            title=f"load from {files}",
            clock=time.process_time,
        )
        for way in (TORCH, HUB, ARRAYS):
            if way not in found:
                continue
            goal = {ARRAYS: {"at_most": AT_MOST}, TORCH: {"no_more": 1.0}}.get(way, {})
            claim = f"CPU time to load a model from {files}: tfwd over {way}"
            rows.append(measure.time_over(claim, found, OURS, way, **goal))
    return rows


def by_layers(place: Path, seconds: float) -> list[Row]:
    """Measures each number of layers, and returns a row for each and a row for the growth."""
    calls = {}
    for count in LAYERS:
        folder = place / f"layers_{count}"
        write(folder, 1, {**CONFIG, **NARROW, "num_hidden_layers": count})
        calls[f"{OURS}, {count}"] = _forgotten(fill(str(folder)))
        calls[f"{ARRAYS}, {count}"] = arrays(str(folder))
    found = measure.alternate(
        calls, least=5, seconds=seconds, title="layers", clock=time.process_time
    )
    least = {name: min(times) for name, times in found.items()}
    ours, theirs = ([least[f"{way}, {count}"] for count in LAYERS] for way in (OURS, ARRAYS))
    rows = [
        Row(
            f"CPU time to load {count} narrow layers into a model, per layer",
            Spread.of([mine / count / (ours[0] / LAYERS[0])]),
            f"per layer, over the time per layer of {LAYERS[0]} layers",
            1e3 * mine / count,
            {ARRAYS: 1e3 * other / count},
        )
        for count, mine, other in zip(LAYERS, ours, theirs, strict=True)
    ]
    growth = measure.exponents(LAYERS, ours)
    claim = f"growth of the time with the layers, {LAYERS[0]} to {LAYERS[-1]}"
    peers: dict[str, float | str] = {ARRAYS: measure.exponents(LAYERS, theirs).median}
    return [*rows, Row(claim, growth, "exponent", growth.median, peers, "", at_most=1.1)]


def _forgotten(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a call that first deletes compiled regular expressions, as before a first call."""

    def run() -> None:
        re.purge()
        call()

    return run


def _freed(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns a call that collects garbage afterwards."""

    def run() -> None:
        call()
        gc.collect()

    return run


def processor() -> str:
    """Returns the processor's name as the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in named.items()}
    family = f", family {named['cpu family']}" if "cpu family" in named else ""
    return named.get("model name", platform.processor() or platform.machine()) + family


def main() -> None:
    """Measures, and reports."""
    seconds = measure.parser(__doc__, seconds=20.0, of="each kind").parse_args().seconds
    with tempfile.TemporaryDirectory() as place:
        folders = {SINGLE: f"{place}/single", SHARDS: f"{place}/shards"}
        size = write(Path(folders[SINGLE]), 1)
        write(Path(folders[SHARDS]), 5)
        rows = by_memory(folders, size) + by_time(folders, seconds)
        rows += by_layers(Path(place), seconds)
    measure.report("pretrained_load", rows, method=peak_memory.method_text(), processor=processor())


if __name__ == "__main__":
    main()
