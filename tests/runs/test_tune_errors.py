"""tfwd-tune in this process with errors: one line for each, and nothing is lost."""

import pytest
import sweep_tools
from stack_marks import SOAK_ON_KERAS_2, extended

from tfwd.lm.program import PROGRAM
from tfwd.runs.sweeps.sweep_folder import SweepFolder

pytestmark = SOAK_ON_KERAS_2

SPACE = sweep_tools.SPACE


@extended
def test_if_no_trial_comes_to_its_end_it_is_an_error_with_the_reason(run):
    more = ["--config.optimizer.name=sgd", "--config.optimizer.clip_norm=0"]
    code, _, err = run('{"optimizer.learning_rate": Choice([1e30])}', 'method="grid"', *more)
    assert code == 1
    assert err.startswith("error: no trial succeeded; the first trial: diverged at step ")
    assert err.count("\n") == 1


def test_a_full_disk_ends_the_sweep_and_the_trial_is_not_failed(run, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        code, _, err = run(SPACE, "max_trials=1")
    assert code == 1 and err.count("\n") == 1 and "No space left" in err
    assert run(SPACE, "max_trials=1")[0] == 0
    assert [row["status"] for row in sweep_tools.table(tmp_path / "sweep")] == ["done"]


def test_another_sweep_in_the_folder_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr("tfwd.lm.trainer.Trainer", sweep_tools.NoTraining)
    assert run(SPACE, "max_trials=1")[0] == 0
    before = (tmp_path / "sweep" / "trials.csv").read_bytes()
    other = '{"model.weight_dropout": Float(0, 0.6, step=0.1)}'
    code, _, err = run(other)
    assert code == 1 and err.count("\n") == 1
    assert "another sweep: space model.weight_dropout is 0 to 0.7, step 0.1 in the folder" in err
    assert "or --overwrite" in err
    code, _, err = run(SPACE, "max_trials=2", "--config.model.input_dropout=0.1")
    assert code == 1 and "model.input_dropout is 0.3 in the folder and 0.1 now" in err
    code, _, err = run(epochs=2)
    assert code == 1 and "training.epochs is 1 in the folder and 2 now" in err
    assert (tmp_path / "sweep" / "trials.csv").read_bytes() == before
    code, out, _ = run(other, "max_trials=1", "--overwrite")
    assert code == 0 and "resuming" not in out and len(sweep_tools.table(tmp_path / "sweep")) == 1


def test_a_folder_with_something_else_is_refused(run, tmp_path):
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for more in ([], ["--overwrite"]):
        code, _, err = run(SPACE, "max_trials=2", *more)
        assert code == 1 and "holds files that are not a sweep of tfwd-tune" in err
    assert (folder / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("space", "options", "message"),
    [
        ('{"model.weight_dropot": Float(0, 0.7)}', "", "did you mean model.weight_dropout?"),
        ('{"weight_dropout": Float(0, 0.7)}', "", "did you mean model.weight_dropout?"),
        ('{"model.weight_dropout": Float(0, 1)}', "", "=1.0 in the sweep: give a rate"),
        ('{"model.weight_dropout": 0.5}', "", "give Float(0, 0.7, step=0.1), Int or Choice"),
        ('{"model.weight_dropout": Float(0.7, 0)}', "", "sweep.py, line 5: Float(low=0.7"),
        ('{"data.window": Float(10, 20)}', "", "data.window=10.0 in the sweep: give"),
        ('{"model.hidden_units": Choice([(4, 5)])}', "", "no point of the sweep can be trained"),
        ("{}", "", "the sweep has no space"),
        (SPACE, 'method="gird"', "give random, grid, bayesian, hyperband (did you mean grid?)"),
        (SPACE, "max_trials=0", "max_trials=0 of the sweep: give a whole number, at least 1"),
        (SPACE, 'method="hyperband", max_trials=3', "remove max_trials"),
        (SPACE, "trials=3", "unexpected keyword argument 'trials'"),
        ('{"training.epochs": Choice([1, 2])}', 'method="hyperband"', "remove it, or use"),
        (SPACE, 'method="hyperband", factor=2, iterations=1', "draws 10 different points"),
        ('{"optimizer.kwargs.momentun": Float(0, 0.9)}', "", "adam has no such argument"),
    ],
)
def test_a_wrong_sweep_is_one_line_before_the_first_trial(run, tmp_path, space, options, message):
    code, out, err = run(space, options, epochs=4)
    assert code == 1 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep=no/such.py"], "--sweep=no/such.py: there is no such file"),
        (["--sweep="], "--sweep is missing"),
        (["--workdir="], "give a folder for the sweep"),
        (["--max_trials=0"], "max_trials"),
        (["--config.data.path=no/such/text"], "no/such/text"),
    ],
)
def test_a_wrong_command_line_is_one_line(run, arguments, message):
    code, _, err = run(SPACE, "", *arguments)
    assert code == 1 and err.count("\n") == 1 and message in err


def test_without_keras_tuner_the_extra_is_named(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run()
    assert code == 1
    words = "in a checkout of tfwd, pip install '.[tune]'"
    assert err == f"error: tfwd-tune needs keras-tuner: {words}\n"


def test_a_second_process_is_kept_out(run, tmp_path):
    folder = SweepFolder(tmp_path / "sweep", PROGRAM)
    folder.open({}, overwrite=False)
    try:
        code, _, err = run()
        assert code == 1 and "another process searches in the workdir" in err
    finally:
        folder.close()
