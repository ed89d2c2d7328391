"""Tests of the runner on scripts of a few lines, of its page, and of every script's --help."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from stack_marks import quick_rows

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
MAIN = 'if __name__ == "__main__":\n    '
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if "__main__" in path.read_text("utf-8"))


def script(folder: Path, name: str, body: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(MAIN + body + "\n")
    return path


def test_helpers_and_the_runner_are_no_benchmarks(tmp_path: Path) -> None:
    script(tmp_path, "one", "pass")
    script(tmp_path, "run_all", "pass")
    (tmp_path / "helper.py").write_text("x = 1\n")
    run_all = importlib.import_module("run_all")
    assert [path.name for path in run_all.scripts(tmp_path)] == ["one.py"]
    assert {"step_memory_dense", "lm_step_time"} <= {path.stem for path in run_all.scripts()}


def test_every_end_of_a_script_is_told_apart(tmp_path: Path) -> None:
    run = importlib.import_module("run_all").run
    good = run(script(tmp_path, "good", "print('words'); print('{\"benchmark\": \"good\"}')"))
    assert (good.line, good.problem) == ({"benchmark": "good"}, "")
    assert run(script(tmp_path, "bad", "raise SystemExit(3)")).problem == "failed with status 3"
    assert "line of JSON" in run(script(tmp_path, "mute", "print('words')")).problem
    endless = run(script(tmp_path, "endless", "import time; time.sleep(60)"), limit=0.5)
    assert endless.problem == "stopped after 0.5 s" and endless.line is None


def test_page_has_rows_problems_other_figures_and_plots(tmp_path: Path) -> None:
    run_all, measure = (importlib.import_module(name) for name in ("run_all", "common.measure"))
    row = measure.Row(
        "step",
        measure.Spread(0.651, 0.6, 0.7),
        "time over naive",
        12.34,
        {"naive": 19.0, "PyTorch": "not installed"},
        at_most=0.7,
    )
    outcomes = [
        run_all.Outcome("a", 1.0, {"benchmark": "a", "rows": [row.to_json()]}),
        run_all.Outcome("b", 1.0, None, "failed with status 1"),
        run_all.Outcome("c", 1.0, {"benchmark": "c", "figure": 42}),
    ]
    page = run_all.markdown(outcomes, [tmp_path / "plots" / "x_y.png"], tmp_path / "results.md")
    assert (
        "| step | at most 0.70 | 12.3 ms | naive 19.0 ms, PyTorch not installed "
        "| 0.65 (time over naive) | 0.60 to 0.70 | yes |"
    ) in page
    assert "1 of 1 figures are reached." in page
    assert "- `b`: failed with status 1" in page
    assert '"figure": 42' in page
    assert "![x y](plots/x_y.png)" in page


@quick_rows("mask_and_noise_draws", "weight_drop_lstm_time")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_explain_themselves(path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path), "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    first = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").splitlines()[0]
    assert first and first in done.stdout
