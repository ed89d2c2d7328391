"""`fit` in two processes: the losses and weights of one process on both workers, and callbacks.

The oracle is the same program without workers: Keras's own `fit` in one process. The two processes
run all scenarios once, because TensorFlow needs seconds to load.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import extended, needs_keras3
from watched_processes import Processes, clusters, finish

import tfwd
from tfwd.runs.workers.local_workers import free_ports

pytestmark = needs_keras3("the errors that tfwd.distribute.scope repairs")

PROGRAM = Path(__file__).with_name("fit_program.py")
# Python's code that runs the file of its first argument, with the further arguments.
RUN_FILE = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"


def start(
    processes: Processes,
    folder: Path,
    out: Path,
    cluster: dict[str, Any] | None = None,
    scenarios: Sequence[str] = (),
    **variables: str,
) -> subprocess.Popen[str]:
    environment = variables if cluster is None else {"TF_CONFIG": json.dumps(cluster), **variables}
    return processes.python(
        RUN_FILE, [str(PROGRAM), str(folder), str(out), *scenarios], environment
    )


QUICK = ("plain", "callbacks", "wrapped", "not_finite")
EXTENDED = ("several_steps", "in_place", "own_masks", "moments", "averaging", "images")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of the scenarios of `make test`."""
    return run_scenarios(tmp_path_factory.mktemp("fit"), QUICK)


@pytest.fixture(scope="module")
def extended_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns the results of the other scenarios."""
    return run_scenarios(tmp_path_factory.mktemp("fit"), EXTENDED)


def run_scenarios(folder: Path, scenarios: Sequence[str]) -> dict[str, Any]:
    """Runs the program alone, and in two processes. Returns the results of each process."""
    with Processes() as processes:
        alone = start(processes, folder / "alone", folder / "alone.json", None, scenarios)
        runs = {"alone": alone}
        for index, cluster in enumerate(clusters()):
            name = f"worker_{index}"
            out = folder / f"{name}.json"
            runs[name] = start(processes, folder / "workers", out, cluster, scenarios)
        for name, process in runs.items():
            code, output = finish(process)
            assert code == 0, f"{name}: {output}"
    found = {name: json.loads((folder / f"{name}.json").read_text("utf-8")) for name in runs}
    return {**found, "folder": folder / "workers"}


def assert_same(one: Any, other: Any, what: str = "") -> None:
    """Asserts that two structures have equal numbers up to the order of sums."""
    if isinstance(one, dict):
        assert sorted(one) == sorted(other), what
        for key in one:
            assert_same(one[key], other[key], f"{what}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), what
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{what}/{number}")
    elif isinstance(one, str):
        assert one == other, what
    else:
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=what)


@pytest.mark.parametrize("scenario", ["plain", "callbacks", "wrapped"])
def test_two_workers_train_as_one_process(results: dict[str, Any], scenario: str) -> None:
    assert_same(results["alone"][scenario], results["worker_0"][scenario])


@extended
@pytest.mark.parametrize("scenario", ["several_steps", "in_place", "moments", "averaging"])
def test_other_training_is_as_in_one_process(
    extended_results: dict[str, Any], scenario: str
) -> None:
    assert_same(extended_results["alone"][scenario], extended_results["worker_0"][scenario])


@pytest.mark.parametrize("found", ["results", pytest.param("extended_results", marks=extended)])
def test_workers_have_the_same_bits(found: str, request: pytest.FixtureRequest) -> None:
    results = request.getfixturevalue(found)
    # Texts of JSON have all digits of a number.
    assert json.dumps(results["worker_0"]) == json.dumps(results["worker_1"])


def assert_losses_fall(result: dict[str, Any]) -> None:
    losses = result["history"]["loss"]
    assert losses[-1] < losses[0]


def test_the_scenarios_train(results: dict[str, Any]) -> None:
    """Checks the oracle: losses fall, and masks are drawn."""
    assert_losses_fall(results["alone"]["plain"])
    assert results["alone"]["wrapped"]["calls"] == [6, 6]


@extended
def test_the_other_scenarios_train(extended_results: dict[str, Any]) -> None:
    """Checks the oracle: losses fall, and averaging begins."""
    for scenario in ("several_steps", "moments"):
        assert_losses_fall(extended_results["alone"][scenario])
    assert extended_results["alone"]["averaging"]["triggered"]


@extended
def test_a_program_as_in_the_guide_of_tensorflow(extended_results: dict[str, Any]) -> None:
    found = extended_results["worker_0"]["images"]
    assert found["loss"][-1] < 0.5 * found["loss"][0] and found["accuracy"][-1] > 0.9
    assert found["loaded"] == found["weights"] == found["restored"]
    assert (extended_results["folder"] / "images" / "model.keras").is_file()


@extended
def test_replicas_draw_their_own_masks_by_default(extended_results: dict[str, Any]) -> None:
    alone, workers = (extended_results[name]["own_masks"] for name in ("alone", "worker_0"))
    difference = max(
        np.abs(np.subtract(a, b)).max()
        for a, b in zip(alone["weights"], workers["weights"], strict=True)
    )
    assert difference > 1e-3


def test_training_resumes_from_the_backup(results: dict[str, Any]) -> None:
    found = results["worker_0"]["callbacks"]
    assert found["resumed_epochs"] == 2
    assert_same(found["weights"], found["straight"])


def test_only_the_chief_writes(results: dict[str, Any]) -> None:
    folder = results["folder"] / "callbacks"
    assert sorted(path.name for path in folder.iterdir()) == [
        "backup",
        "best.keras",
        *(f"epoch-{epoch}.weights.h5" for epoch in range(1, 5)),
        "log.csv",
        "logs",
    ]
    assert sorted(path.name for path in (folder / "backup").iterdir()) == [
        "latest.weights.h5",
        "training_metadata.json",
    ]
    # Two fits, of two epochs each after the backup. A second writer would double the lines.
    assert len((folder / "log.csv").read_text("utf-8").splitlines()) == 3
    for part in ("train", "validation"):
        assert len(list((folder / "logs" / part).glob("events*"))) == 2


@extended
def test_only_the_chief_writes_moments(extended_results: dict[str, Any]) -> None:
    folder = extended_results["folder"] / "moments"
    assert len(list((folder / "moments").glob("events*"))) == 1
    assert (folder / "moments.png").is_file()


def test_the_saved_model_has_the_weights(results: dict[str, Any]) -> None:
    folder = results["folder"] / "callbacks"
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]
    )
    model.load_weights(folder / "epoch-4.weights.h5")
    expected = results["worker_0"]["callbacks"]["weights"]
    for weight, values in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight.ravel(), np.asarray(values, weight.dtype))
    assert keras.saving.load_model(folder / "best.keras").count_params() == model.count_params()


def test_a_bad_batch_of_one_worker_is_skipped_on_all(results: dict[str, Any]) -> None:
    for worker in ("worker_0", "worker_1"):
        found = results[worker]["not_finite"]
        assert found["skipped"] == 1
        (sentence,) = found["sentences"]
        # 5 of the 40 numbers in the worker's half of the batch of 16 rows.
        assert sentence.startswith("data 'x': 12.50 % non-finite elements (5 NaN"), sentence
        assert "worker 1" in sentence
        assert_same(found["weights"], found["without_the_batch"])


def test_scope_refuses_other_objects() -> None:
    refused = pytest.raises(TypeError, match="expects a tf.distribute.Strategy, got str")
    with refused, tfwd.distribute.scope("mirrored"):  # type: ignore[arg-type]
        pass


def test_scope_of_one_device_changes_nothing() -> None:
    before = keras.callbacks.BackupAndRestore.on_train_begin
    strategy = tf.distribute.get_strategy()
    with tfwd.distribute.scope(strategy) as opened:
        assert opened is strategy
        assert tfwd.distribute.is_chief()
    assert keras.callbacks.BackupAndRestore.on_train_begin is before


@pytest.mark.slow
def test_the_program_of_the_guide_runs_in_two_terminals(tmp_path: Path) -> None:
    program = PROGRAM.parents[2] / "docs" / "fit_on_two_workers.py"
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with Processes() as processes:
        both = [
            processes.python(RUN_FILE, [str(program), index, *addresses], cwd=tmp_path)
            for index in ("0", "1")
        ]
        ends = [finish(process) for process in both]
    assert [code for code, _ in ends] == [0, 0], ends
    losses = [output.splitlines()[-1] for _, output in ends]
    assert losses[0].startswith("loss ") and losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1], ids=["the chief", "another worker"])
def test_a_killed_worker_ends_the_others_and_training_resumes(victim: int, tmp_path: Path) -> None:
    def both(folder: str, **variables: str) -> list[tuple[int, str]]:
        with Processes() as processes:
            running = [
                start(
                    processes,
                    tmp_path / folder,
                    tmp_path / f"{folder}_{index}.json",
                    cluster,
                    ["killed"],
                    **variables,
                )
                for index, cluster in enumerate(clusters())
            ]
            return [finish(process) for process in running]

    assert [code for code, _ in both("undisturbed")] == [0, 0]
    ends = both("disturbed", KILLED=str(victim))
    assert ends[victim][0] == -signal.SIGKILL
    code, output = ends[1 - victim]
    assert code not in (0, -signal.SIGKILL) and "UnavailableError" in output, output
    again = both("disturbed")
    assert [code for code, _ in again] == [0, 0], again
    for index in range(2):
        expected, found = (
            json.loads((tmp_path / f"{folder}_{index}.json").read_text("utf-8"))["killed"]
            for folder in ("undisturbed", "disturbed")
        )
        assert found["epochs"] == 2  # two of the four epochs were done before
        assert found["weights"] == expected["weights"]
