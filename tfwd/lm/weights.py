"""The weights of a language model in a file that either Keras reads.

TensorFlow's checkpoints follow the objects of a model, and those of Keras 2 and Keras 3 differ; so
do the names that the two give to variables. This file is NumPy's `.npz`: the arrays in the order of
the model, from the embedding to the softmax, under names that are tfwd's own, as `lstm_1/kernel`,
and a header with the format's version and the names and shapes of all arrays. What they
are of stands in `config.json` and `vocabulary.json` beside the checkpoints, which are plain JSON.
"""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.lm.errors import UserError
from tfwd.lm.model import LanguageModel

FORMAT = "tfwd language model weights"
VERSION = 1
_HEADER = "header"


def named(model: LanguageModel) -> dict[str, Any]:
    """The model's variables by tfwd's names for them, in the order of the model.

    Example:
        >>> list(named(LanguageModel(9, embedding_dim=4, hidden_units=(4,))))
        ... # doctest: +NORMALIZE_WHITESPACE
        ['embedding/embeddings', 'lstm_1/kernel', 'lstm_1/recurrent_kernel', 'lstm_1/bias',
         'decoder/bias']
    """
    parts = {"embedding": model.embedding}
    parts |= {f"lstm_{number}": layer for number, layer in enumerate(model.lstms, 1)}
    parts["decoder"] = model.decoder
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for part, layer in [*parts.items(), ("", model)]:  # last, what a subclass has besides
        for variable in layer.weights:
            if id(variable) not in seen:  # a tied softmax has the embedding's matrix
                seen.add(id(variable))
                found[f"{part}/{_keras.variables.name(variable)}".lstrip("/")] = variable
    return found


def save(path: str | os.PathLike[str], model: LanguageModel) -> None:
    """Writes the weights of a model.

    Half-precision weights are written in float32, which has all their values: NumPy has no
    bfloat16.

    Raises:
        OSError: the file cannot be written.
    """
    arrays = {name: _array(variable) for name, variable in named(model).items()}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "weights": {name: list(array.shape) for name, array in arrays.items()},
    }
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    entries: dict[str, Any] = {_HEADER: text, **arrays}
    with open(path, "wb") as file:
        np.savez(file, **entries)


def load(path: str | os.PathLike[str], model: LanguageModel) -> None:
    """Reads what `save` wrote, on this Keras or the other one, into a model.

    The model is changed when all of the file has been read and found right, or not at all.

    Raises:
        UserError: the file is missing, cut short, no file of this kind, of a later version, or of
            a model with other weights.
    """
    try:
        with open(path, "rb") as source, np.load(source, allow_pickle=False) as file:
            if damaged := file.zip.testzip():
                raise ValueError(f"{damaged} is damaged")
            header = json.loads(file[_HEADER].tobytes()) if _HEADER in file.files else {}
            if not isinstance(header, dict) or header.get("format") != FORMAT:
                raise UserError(
                    f"{path} is no file of a language model's weights: put the right one back"
                )
            if header["version"] != VERSION:
                raise UserError(
                    f"{path} is of version {header['version']} of the format, and this tfwd reads "
                    f"version {VERSION}: read it with the tfwd that wrote it, or a later one"
                )
            _verify(path, header["weights"], named(model))
            arrays = {name: file[name] for name in header["weights"]}
            for name, shape in header["weights"].items():
                if list(arrays[name].shape) != shape:
                    raise ValueError(f"{name} is {arrays[name].shape}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} is no whole file of a language model's weights ({_reason(error)}): put one "
            "back from a copy"
        ) from error
    for name, variable in named(model).items():
        variable.assign(tf.cast(arrays[name], _keras.variables.dtype_name(variable)))


def _verify(path: Any, saved: dict[str, list[int]], variables: dict[str, Any]) -> None:
    """Raises unless the names and shapes in a file are those of a model."""
    for name in dict.fromkeys([*variables, *saved]):
        there = tuple(saved[name]) if name in saved else None
        here = tuple(variables[name].shape) if name in variables else None
        if there != here:
            raise UserError(
                f"{path} is of another model: {name} is "
                f"{there or 'not there'} in the file and {here or 'not there'} in the model"
            )


def _array(variable: Any) -> np.ndarray:
    array = variable.numpy()
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
