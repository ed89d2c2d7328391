"""Stores the state of parametrizations that were added in place.

The files of such a model equal the plain model's files. So seeds, training-call counters and the
references of Mixout are saved in a separate file. `keras.callbacks.BackupAndRestore` and
`tf.train.Checkpoint` store them too.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from typing import Any

import keras
import numpy as np

from tfwd import _keras
from tfwd.atomic_files import write_atomically
from tfwd.layers._substitution.in_place import installation
from tfwd.layers._substitution.in_place.parametrization_in_place import InPlace

_VERSION = 1
_CONTENTS = "contents"


def save_state(model: keras.Layer, path: str | os.PathLike[str]) -> None:
    """Saves the state of parametrizations that `tfwd.parametrize(..., in_place=True)` added.

    The state is the seed, the training-call counter, and the references of Mixout. Training resumes
    with the same draws if the model's own files and this file are loaded.

    Args:
        model: Model or layer with such parametrizations, in itself or in layers inside.
        path: Path of the file, in NumPy's format `.npz`. It is written in one step, and replaces an
            existing file.

    Raises:
        ValueError: If the model has no such parametrization. A model with tfwd's wrappers keeps its
            state in its own files.
        OSError: If the file cannot be written. An existing file is not changed.

    Example:
        >>> import keras, pathlib, tempfile, tfwd
        >>> from tfwd import parametrizations as P
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> _ = tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
        >>> file = pathlib.Path(tempfile.mkdtemp(), "state.npz")
        >>> tfwd.save_state(model, file)
        >>> tfwd.load_state(model, file)
    """
    content = io.BytesIO()
    arrays: dict[str, Any] = _arrays(_added(model))
    np.savez(content, **arrays)
    write_atomically(path, content.getvalue())


def load_state(model: keras.Layer, path: str | os.PathLike[str]) -> None:
    """Loads a state that `tfwd.save_state` saved. First parametrize the model in the same way.

    Args:
        model: Model or layer. It must have the same parametrized weights, and the same classes of
            parametrizations, as the saved model. Rates and names of layers may differ.
        path: Path of the file.

    Raises:
        ValueError: If the file is not a complete file of `save_state`, or belongs to a model with
            other parametrized weights or other classes of parametrizations. Nothing is loaded then.
        FileNotFoundError: If the file does not exist.
    """
    added = _added(model)
    where = f"'{os.fspath(path)}'"
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        contents = _contents(arrays)
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{where} is not a complete file of tfwd.save_state: it has another format, or it is "
            "damaged. Use another copy. (Weights are in the model's own files: model.load_weights)"
        ) from error
    _check(where, model, added, contents)
    _load(added, arrays)


def _added(model: keras.Layer) -> list[InPlace]:
    added = installation.inside(model)
    if not added:
        raise ValueError(
            f"'{model.name}' has no parametrizations in place: call tfwd.parametrize(..., "
            "in_place=True) first. A model with tfwd's wrappers saves its state in its own files"
        )
    return added


def _arrays(added: list[InPlace]) -> dict[str, np.ndarray]:
    contents = {"version": _VERSION, "parametrizations": [_described(one) for one in added]}
    arrays = {_CONTENTS: np.asarray(json.dumps(contents))}
    for number, one in enumerate(added):
        parts: dict[str, dict[str, Any]] = {"draws": {}, "references": {}}
        one.draws.save_own_variables(parts["draws"])
        if one.references is not None:
            one.references.save_own_variables(parts["references"])
        for part, values in parts.items():
            arrays |= {f"{number}/{part}/{k}": np.asarray(v) for k, v in values.items()}
    return arrays


def _contents(arrays: dict[str, np.ndarray]) -> list[Any]:
    contents = json.loads(str(arrays[_CONTENTS]))
    if contents["version"] != _VERSION:
        raise ValueError(f"version {contents['version']}, expected {_VERSION}")
    return contents["parametrizations"]


def _described(one: InPlace) -> list[list[Any]]:
    """Returns position, shape, name and kind of parametrization of each weight.

    Names of layers differ between processes.
    """
    return [
        [
            target.position,
            list(target.variable.shape),
            _keras.variables.name(target.variable),
            " then ".join(type(element).__name__ for element in parametrization.elements()),
        ]
        for target, parametrization in one.targeted
    ]


def _check(where: str, model: keras.Layer, added: list[InPlace], contents: list[Any]) -> None:
    """Raises a ValueError if a state belongs to another model."""
    what = f"{where} does not have the state of model '{model.name}'"
    remedy = "Call tfwd.parametrize in the same way as before the file was saved"
    if len(contents) != len(added):
        raise ValueError(
            f"{what}: its state is of {len(contents)} calls of tfwd.parametrize, and the model had "
            f"{len(added)} calls. {remedy}"
        )
    for one, saved in zip(added, contents, strict=True):
        here = _described(one)
        if here == saved:
            continue
        if len(here) != len(saved):
            raise ValueError(
                f"{what}: it has {len(saved)} parametrized weights ({_listed(saved)}), the model "
                f"has {len(here)} ({_listed(here)}). {remedy}"
            )
        found = next(i for i in range(len(here)) if here[i] != saved[i])
        raise ValueError(
            f"{what}: it has {_listed(saved[found : found + 1])}, where the model has "
            f"'{one.targeted[found][0].name}', {_listed(here[found : found + 1])}. {remedy}"
        )


def _listed(weights: list[list[Any]]) -> str:
    return ", ".join(
        f"'{name}' of shape {tuple(shape)} at position {position} with {kind}"
        for position, shape, name, kind in weights
    )


def _load(added: list[InPlace], arrays: dict[str, np.ndarray]) -> None:
    for number, one in enumerate(added):
        parts: dict[str, dict[str, np.ndarray]] = {"draws": {}, "references": {}}
        for part, values in parts.items():
            start = f"{number}/{part}/"
            values |= {k.removeprefix(start): v for k, v in arrays.items() if k.startswith(start)}
        one.draws.load_own_variables(parts["draws"])
        if one.references is not None:
            one.references.load_own_variables(parts["references"])


def state_for_backup(model: keras.Layer) -> dict[str, np.ndarray]:
    """Returns the state as arrays by name, or an empty dict if there is none."""
    added = installation.inside(model)
    return _arrays(added) if added else {}


def restore_backup(model: keras.Layer, arrays: dict[str, np.ndarray], where: str) -> None:
    """Loads the state of a backup.

    Raises:
        ValueError: If the backup has no state, or has the state of another model.
    """
    added = installation.inside(model)
    if not added:
        return
    if not arrays:
        raise ValueError(
            f"the backup in '{where}' was made without parametrizations in place, but "
            f"'{model.name}' has parametrizations in place: delete the backup, or resume without "
            "tfwd.parametrize"
        )
    _check(f"the backup in '{where}'", model, added, _contents(arrays))
    _load(added, arrays)


_keras.training.extend_backups(state_for_backup, restore_backup)
