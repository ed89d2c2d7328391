"""Opens a source of weights. The path determines its kind."""

from __future__ import annotations

import glob
import os

import tensorflow as tf

from tfwd.pretrained.sources.base import Source, SourceError
from tfwd.pretrained.sources.npz_files import ArchiveSource
from tfwd.pretrained.sources.safetensors_files import (
    INDEX,
    SafetensorsSource,
    ShardedSource,
    check_inside,
)
from tfwd.pretrained.sources.tensorflow_checkpoints import CheckpointSource

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CONVERT = (
    "is a pickle, which can run any program when it is read. tfwd does not read pickles. Convert "
    "the file with PyTorch: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
    "'model.safetensors')"
)


def open_source(path: str | os.PathLike[str]) -> Source:
    """Opens a source of weights. Reads only names, shapes and dtypes.

    Args:
        path: Path of a `.safetensors` file, of the `.safetensors.index.json` of several such files,
            of an `.npz` file, of a TensorFlow checkpoint (with or without `.index`), of a folder
            with one of these, or of a SavedModel.

    Raises:
        SourceError: If the path does not exist, or cannot be read.
    """
    path = os.fspath(path)
    if os.path.isdir(path):
        path = _in_folder(path)
    if path.endswith(INDEX):
        return ShardedSource(path)
    if path.endswith(".safetensors"):
        return SafetensorsSource(path)
    if path.endswith(".npz"):
        return ArchiveSource(path)
    if path.endswith(PICKLES) and not os.path.exists(f"{path}.index"):
        raise SourceError(f"{path} {CONVERT}")
    if path.endswith((".h5", ".keras")):
        raise SourceError(f"{path} is a Keras file: read it with model.load_weights")
    prefix = path.removesuffix(".index")
    if os.path.exists(f"{prefix}.index"):
        return CheckpointSource(prefix)
    if not os.path.exists(path):
        raise SourceError(f"{path} does not exist{hub_hint(path)}")
    raise SourceError(
        f"{path} has an unknown extension: give a .safetensors, .safetensors.index.json or .npz "
        "file, or a checkpoint's .index"
    )


def hub_hint(path: str) -> str:
    """Returns the hint for a missing path that looks like the name of a model on the hub."""
    if path.count("/") > 1 or path.startswith((".", "/", "~")) or "." in os.path.basename(path):
        return ""
    return (
        ". tfwd reads only folders and files, and loads nothing from the network: download a "
        f"model of the Hugging Face hub with hf download {path} --local-dir FOLDER"
    )


def _in_folder(folder: str) -> str:
    """Returns the path of the weights in a folder. Raises a `SourceError` if none fits."""
    for name in ("model.safetensors", f"model{INDEX}"):  # the order of Hugging Face's transformers
        path = os.path.join(folder, name)
        if os.path.exists(path):
            check_inside(path)
            return path
    for pattern in (f"*{INDEX}", "*.safetensors", "*.npz"):
        found = sorted(glob.glob(os.path.join(glob.escape(folder), pattern)))
        if len(found) > 1:
            names = ", ".join(os.path.basename(one) for one in found)
            raise SourceError(
                f"{folder} has several files of weights: give the path of one of {names}"
            )
        if found:
            check_inside(found[0])
            return found[0]
    saved_model = os.path.join(folder, "variables", "variables.index")
    if os.path.exists(saved_model):
        return saved_model
    if checkpoint := tf.train.latest_checkpoint(folder):
        return f"{checkpoint}.index"
    if pickled := [name for name in sorted(os.listdir(folder)) if name.endswith(PICKLES)]:
        raise SourceError(f"{os.path.join(folder, pickled[0])} {CONVERT}")
    raise SourceError(
        f"{folder} has no weights: give a folder with a .safetensors or .npz file, or with a "
        "TensorFlow checkpoint"
    )
