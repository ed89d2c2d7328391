"""Checks that all workers train the same model on the same data into the same folder."""

from __future__ import annotations

import hashlib
import json
import platform
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ml_collections
import numpy as np

import tfwd
from tfwd import _keras
from tfwd.runs.errors import UserError
from tfwd.runs.interfaces import Data
from tfwd.runs.settings import config as configs
from tfwd.runs.settings.validators import shown
from tfwd.runs.workers.worker_group import Workers

PATHS = ("data.path", "model.pretrained")


def check_batch_size(key: str, batch_size: int, workers: Workers) -> None:
    """Raises a `UserError` if the workers cannot divide the rows of a batch evenly."""
    if batch_size % workers.count:
        lower = batch_size - batch_size % workers.count
        near = [str(size) for size in (lower, lower + workers.count) if size]
        raise UserError(
            f"{key}={batch_size}: {workers.count} workers cannot divide it evenly; give "
            f"{' or '.join(near)}"
        )


def check_versions(workers: Workers) -> None:
    """Raises a `UserError` on all workers if one has other versions than the chief."""
    own = {
        "tfwd": tfwd.__version__,
        **_keras.VERSIONS,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    _compare(workers, own, lambda name: f"{name} ")


def check_config(workers: Workers, config: ml_collections.ConfigDict) -> None:
    """Raises a `UserError` on all workers if one has another configuration than the chief.

    Paths may differ between machines. The contents of the files are compared by `check_data`.
    """
    own = {
        key: shown(configs.get(config, key))
        for key in configs.flat_keys(config)
        if key not in PATHS
    }
    _compare(workers, own, lambda key: f"the configuration {key}=")


def check_data(workers: Workers, data: Data) -> None:
    """Raises a `UserError` on all workers if one has other data than the chief."""
    if workers.count == 1:  # a hash of all data takes time
        return
    own = {
        "data with the hash": data.fingerprint(),
        "vocabulary with the hash": data.vocabulary.fingerprint(),
    }
    _compare(workers, own, lambda name: f"the {name} ")


def check_folder(workers: Workers, folder: Path) -> None:
    """Raises a `UserError` on all workers if one does not see the chief's folder.

    Each worker reads the checkpoints that the chief has written.
    """
    if workers.count == 1:
        return
    name = workers.from_chief(f".workers-{uuid.uuid4().hex[:8]}")
    try:
        workers.together(lambda: _touch(folder / name) if workers.is_chief else None)
        seen = workers.is_chief or (folder / name).exists()
        _raise_first(
            workers,
            ""
            if seen
            else f"no file that the chief has written to the workdir {folder}: give a folder that "
            "all workers share",
        )
    finally:
        if workers.is_chief:
            (folder / name).unlink(missing_ok=True)


def copy_chief_weights(
    workers: Workers, variables: Iterable[Any], say: Callable[[str], object]
) -> None:
    """Assigns the chief's values to the variables of all workers, if the values differ.

    Initial values may differ in their last bits between processors.
    """
    if workers.count == 1:
        return
    variables = list(variables)
    different = _different(workers, variables)
    for number in different:
        value = np.asarray(_keras.variables.value(variables[number]))
        _keras.variables.assign(variables[number], workers.from_chief(value))
    if different:
        say(
            f"{len(different)} initial weights differed between the workers; now all workers have "
            "the chief's values"
        )


def check_weights(workers: Workers, variables: Iterable[Any]) -> None:
    """Raises a `UserError` on all workers if they have read different weights."""
    if workers.count > 1 and _different(workers, list(variables)):
        raise UserError(
            "the workers have read different weights: give a --workdir that all workers share"
        )


def _different(workers: Workers, variables: list[Any]) -> list[int]:
    """Returns the numbers of the variables whose bits differ between the workers."""
    values = (np.asarray(_keras.variables.value(variable)) for variable in variables)
    digests = [hashlib.sha256(value.tobytes()).hexdigest() for value in values]
    everyone = [json.loads(text) for text in workers.gather(json.dumps(digests).encode())]
    return [n for n, found in enumerate(zip(*everyone, strict=True)) if len(set(found)) > 1]


def _touch(path: Path) -> None:
    try:
        path.touch()
    except OSError as error:
        raise UserError(f"cannot write the workdir {path.parent}: {error.strerror}") from error


def _compare(workers: Workers, own: dict[str, str], name: Callable[[str], str]) -> None:
    chief = workers.from_chief(own)
    absent = "not given"
    different = [
        f"{name(key)}{own.get(key, absent)}, and the chief has {chief.get(key, absent)}"
        for key in dict.fromkeys([*chief, *own])
        if own.get(key) != chief.get(key)
    ]
    _raise_first(workers, "; ".join(different))


def _raise_first(workers: Workers, problem: str) -> None:
    """Raises the first worker's problem on all workers."""
    for index, text in enumerate(workers.gather(problem.encode())):
        if text:
            raise UserError(f"worker {index} has {text.decode()}")
