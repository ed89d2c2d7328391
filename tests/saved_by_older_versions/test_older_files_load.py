"""Checks that files still load which were written before modules of tfwd moved.

The numbers were computed by the code that wrote the files, on one processor. So they are compared
with a tolerance, except the weights, which a file keeps bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from saved_by_older_versions import write
from stack_marks import extended
from watched_processes import Processes, finish


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """Returns the numbers that the code computed which wrote the files."""
    with np.load(write.FOLDER / "numbers.npz") as file:
        return dict(file)


def is_older_keras() -> bool:
    """Returns True if the Keras that runs is older than the Keras that wrote the files."""
    wrote = json.loads((write.FOLDER / "versions.json").read_text())["keras"]
    ours, theirs = (tuple(map(int, v.split(".")[:2])) for v in (keras.__version__, wrote))
    return ours < theirs


def assert_has(model: Any, expected: dict[str, np.ndarray]) -> None:
    """Asserts that a model has these weights, and the optimizer its variables."""
    found = write.numbers(model)
    assert set(found) == set(expected) - {"losses"}
    for name, value in expected.items():
        if name == "predictions":
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5)
        elif name != "losses":
            np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.skipif(is_older_keras(), reason="Keras does not read files of later releases")
def test_a_keras_file_loads_and_trains_on(expected: dict[str, np.ndarray]) -> None:
    model = keras.models.load_model(write.FOLDER / "model.keras")
    assert_has(model, expected)
    # Other masks would give losses that differ in the second digit.
    np.testing.assert_allclose(write.next_losses(model), expected["losses"], rtol=1e-4)


@extended
def test_a_checkpoint_fills_a_new_model(expected: dict[str, np.ndarray]) -> None:
    model = write.make_model()
    model.train_on_batch(*write.batch())  # creates the optimizer's variables and the references
    path = str(write.FOLDER / "checkpoint" / "model")
    status = tf.train.Checkpoint(model=model).read(path)
    status.assert_consumed()
    assert_has(model, expected)
    np.testing.assert_allclose(write.next_losses(model), expected["losses"], rtol=1e-4)


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a run, flat and without its speed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    flat = [{**line, **line.pop("norms", {})} for line in lines]
    return [
        {k: v for k, v in one.items() if k not in ("norms", "tokens_per_second")} for one in flat
    ]


@pytest.mark.slow
def test_a_run_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(write.FOLDER / "run", folder)
    steps = [record["step"] for record in records(folder / "run" / "metrics.jsonl")]
    with Processes() as processes:
        process = processes.python(
            write.PROGRAM,
            ["--config=config.py", "--workdir=run"],
            {**os.environ, "STOP_AT": "-1"},
            cwd=folder,
        )
        code, output = finish(process)
    assert code == 0 and f"step {write.STOPPED_AT}" in output, output
    found = records(folder / "run" / "metrics.jsonl")
    wanted = records(folder / "metrics.jsonl")
    assert len(found) == len(wanted) > len(steps)
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            is_number = isinstance(value, float)
            assert one[name] == (pytest.approx(value, rel=1e-3, abs=1e-4) if is_number else value)
