"""Files of weights for both versions of Keras: NumPy's `.npz`, with a header.

TensorFlow's checkpoints depend on the objects of a model, which differ between Keras 2 and Keras 3.
The names of variables differ too. This file therefore stores the arrays in the order of the model,
under names that the program defines. A header has the format's version, and the names and shapes of
all arrays. The run's other files, which are plain JSON, describe the model.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained import SourceError
from tfwd.pretrained.sources.npz_files import ArchiveSource
from tfwd.runs.errors import UserError, reason
from tfwd.runs.storage.file_access import check_readable

VERSION = 1
_HEADER = "header"


def save(path: str | os.PathLike[str], variables: Mapping[str, Any], model_name: str) -> None:
    """Writes the weights of a model.

    Half-precision weights are written in float32 without loss, because NumPy has no bfloat16.

    Args:
        path: path of the file.
        variables: the model's variables, by name.
        model_name: str. The kind of model, such as "language model".

    Raises:
        OSError: the file cannot be written.
    """
    arrays = {name: _array(variable) for name, variable in variables.items()}
    header = {
        "format": _format(model_name),
        "version": VERSION,
        "weights": {name: list(array.shape) for name, array in arrays.items()},
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    entries: dict[str, Any] = {_HEADER: text, **arrays}
    with open(path, "wb") as file:
        np.savez(file, **entries)


def load(path: str | os.PathLike[str], variables: Mapping[str, Any], model_name: str) -> None:
    """Reads a file of `save` into a model's variables. Either version of Keras may have written it.

    The variables change only after the whole file has been read and checked.

    Args:
        path: path of the file.
        variables, model_name: as in `save`.

    Raises:
        UserError: the file is missing, cut off, of another kind, of a later version, or belongs to
            a model with other weights.
    """
    check_readable(path)
    try:
        with contextlib.closing(ArchiveSource(os.fspath(path))) as file:
            header = file.header
            if header.get("format") != _format(model_name):
                raise UserError(
                    f"{path} is not a file of a {model_name}'s weights: restore the right file"
                )
            if header["version"] != VERSION:
                raise UserError(
                    f"{path} is of version {header['version']} of the format, and this tfwd reads "
                    f"version {VERSION}: use the tfwd that wrote the file, or a later version"
                )
            _verify(path, header["weights"], variables)
            arrays = {name: file.read(name) for name in header["weights"]}
            for name, shape in header["weights"].items():
                if list(arrays[name].shape) != shape:
                    raise ValueError(f"{name} is {arrays[name].shape}")
    except (SourceError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a complete file of a {model_name}'s weights ({reason(error)}): "
            "restore it from a copy"
        ) from error
    for name, variable in variables.items():
        variable.assign(tf.cast(arrays[name], _keras.variables.dtype_name(variable)))


def _verify(path: Any, saved: dict[str, list[int]], variables: Mapping[str, Any]) -> None:
    """Raises a `UserError` unless the file and the model have the same names and shapes."""
    for name in dict.fromkeys([*variables, *saved]):
        in_file = tuple(saved[name]) if name in saved else None
        in_model = tuple(variables[name].shape) if name in variables else None
        if in_file != in_model:
            raise UserError(
                f"{path} is of another model: {name} is "
                f"{in_file or 'missing'} in the file and {in_model or 'missing'} in the model"
            )


def _format(model_name: str) -> str:
    return f"tfwd {model_name} weights"


def _array(variable: Any) -> np.ndarray:
    array = variable.numpy()
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
