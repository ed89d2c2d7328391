"""Record of the search in a folder, so that another search in this folder is rejected."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras_tuner

from tfwd.atomic_files import write_atomically

FILE = "search.json"
NO_JSON = (json.JSONDecodeError, UnicodeDecodeError)


def describe(
    oracle: keras_tuner.Oracle, method: str, seed: int, executions_per_trial: int,
    **rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """Returns all settings that affect scores, except `max_trials` and the ranges.

    The oracle checks the ranges.

    Args:
        oracle: the oracle of the search.
        method, seed, executions_per_trial: as in `tuner`.
        **rounds: settings of Hyperband's rounds, which other methods ignore.
    """
    objectives = getattr(oracle.objective, "objectives", [oracle.objective])
    return {
        "method": method,
        "objective": ", ".join(f"{each.name} ({each.direction})" for each in objectives),
        "seed": seed,
        "executions_per_trial": executions_per_trial,
        "varied": ", ".join(hp.name for hp in oracle.hyperparameters.space),
        **(rounds if method == "hyperband" else {}),
    }


def verify(folder: str, now: Mapping[str, Any]) -> None:
    """Checks that the folder holds the same search, or no search.

    Raises:
        ValueError: the folder holds another search. The message lists the differences.
    """
    state = _read(os.path.join(folder, "oracle.json"))
    if state is None:
        return
    before = _read(os.path.join(folder, FILE))
    if before is None:
        raise ValueError(
            f"{folder} holds a search without {FILE}, the file with its settings; give another "
            "directory, or overwrite=True to start again"
        )
    free = () if state.get("end_order") else ("objective",)  # there is no score yet
    different = [
        f"{name} was {before[name]} and is {value}"
        for name, value in now.items()
        if name not in free and before.get(name, value) != value
    ]
    if different:
        raise ValueError(rejection_message(folder, different))


def check_files(folder: str) -> None:
    """Checks that the paths that keras-tuner reads from a search's folder are files.

    Raises:
        ValueError: a path is not a file, for example a pipe, which would block.
    """
    names = ("oracle.json", "tuner*.json", os.path.join("trial_*", "trial.json"))
    for path in [path for name in names for path in glob.glob(os.path.join(folder, name))]:
        if not os.path.isfile(path):
            raise ValueError(f"{path} is not a file: restore it from a copy, or start again")


def rejection_message(folder: str, different: Iterable[str]) -> str:
    """Returns the error message for a folder with another search."""
    return (
        f"{folder} holds another search: {'; '.join(different)}; give another directory, or "
        "overwrite=True to start again"
    )


def write(folder: str, now: Mapping[str, Any]) -> None:
    """Writes the record in one atomic step."""
    os.makedirs(folder, exist_ok=True)
    text = json.dumps(dict(now), indent=2, default=int)  # also numbers of NumPy
    write_atomically(os.path.join(folder, FILE), text)


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(damaged_message(path, error)) from error


def damaged_message(path: str, error: Exception) -> str:
    """Returns the error message for a file that is not valid JSON."""
    words = " ".join(str(error).split())[:200]
    return f"{path} is damaged ({words}): restore a copy, or start again in another directory"
