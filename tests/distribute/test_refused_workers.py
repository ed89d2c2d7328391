"""Workers that cannot train together: each ends with the same line, and nothing is written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from distribute.train_runs import arguments, run, write_corpus
from stack_marks import SLOW_ON_KERAS_2

pytestmark = SLOW_ON_KERAS_2


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    return write_corpus(tmp_path / "corpus")


def refusal(given: list[list[str]], tmp_path: Path) -> str:
    """Runs the workers, and returns the line with which all of them end."""
    ends = run(given, tmp_path / "records")
    assert [code for code, _ in ends] == [1] * len(given), ends
    lines = {output.splitlines()[-1] for _, output in ends}
    assert len(lines) == 1, lines
    assert not list(tmp_path.glob("run*"))
    return lines.pop()


def test_a_worker_with_another_config_is_refused_by_name(corpus: Path, tmp_path: Path) -> None:
    given = [
        arguments(corpus, tmp_path / "run", **{"training.epochs": epochs}) for epochs in (3, 4)
    ]
    assert refusal(given, tmp_path) == (
        "error: worker 1 has the configuration training.epochs=4, and the chief has 3"
    )


@pytest.mark.slow
def test_a_worker_with_another_text_is_refused(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    (other / "valid.txt").write_text("w1 w2 w3 w4 w5 w6\n" * 20, encoding="utf-8")
    line = refusal([arguments(path, tmp_path / "run") for path in (corpus, other)], tmp_path)
    assert line.startswith("error: worker 1 has the data with the hash ")


@pytest.mark.slow
def test_a_missing_text_on_one_worker(corpus: Path, tmp_path: Path) -> None:
    line = refusal(
        [arguments(path, tmp_path / "run") for path in (corpus, tmp_path / "nothing")], tmp_path
    )
    assert "nothing" in line


@pytest.mark.slow
def test_a_batch_that_the_workers_do_not_divide(corpus: Path, tmp_path: Path) -> None:
    given = arguments(corpus, tmp_path / "run", **{"data.batch_size": 5})
    assert refusal([given] * 2, tmp_path) == (
        "error: data.batch_size=5: 2 workers cannot divide it evenly; give 4 or 6"
    )


@pytest.mark.slow
def test_a_workdir_that_is_not_shared(corpus: Path, tmp_path: Path) -> None:
    line = refusal([arguments(corpus, tmp_path / f"run{n}") for n in range(2)], tmp_path)
    assert line.startswith("error: worker 1 has no file that the chief has written to the workdir")
