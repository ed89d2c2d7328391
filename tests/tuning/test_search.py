"""A search over a custom model: messages, errors and sums."""

import keras
import keras_tuner
import numpy as np
import pytest
from stack_marks import extended

from tfwd import tuning
from tfwd.tuning import progress_reporter, stopwatch, trial_failure_reasons

X = np.ones((4, 3), "float32")
DATA = {"validation_data": (X, X[:, :1]), "verbose": 0}
SPACE = {"kernel": tuning.Choice([0.0, 0.5])}


def make_model():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    return model


def make(folder, hypermodel=None, objective="val_loss", method="grid", **options):
    hypermodel = hypermodel or tuning.rates(make_model, SPACE)
    return tuning.tuner(hypermodel, objective, method=method, directory=folder, **options)


def broken(hp):
    rate = hp.Choice("rate", [0.1, 0.2])
    if hp.values.get("ready"):
        raise RuntimeError(f"nothing works at {rate}")
    return make_model()


def test_if_every_trial_fails_each_reason_is_printed_and_it_is_an_error(tmp_path, capsys):
    tuner = make(tmp_path / "sweep", tuning.rates(broken, SPACE))
    tuner.oracle.hyperparameters.Fixed("ready", True)
    with pytest.raises(RuntimeError, match="none of the 4 finished trials.*: nothing works at 0.1"):
        tuner.search(X, X[:, :1], **DATA)
    lines = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if "failed: " in line]
    assert len(failed) == 4
    for line in failed:
        assert "dropout/kernel=" in line and "RuntimeError: nothing works at 0." in line
    for best in (tuner.get_best_hyperparameters, tuner.get_best_models):
        with pytest.raises(RuntimeError, match="none of the 4 finished trials succeeded"):
            best()
    assert tuner.oracle.get_best_trials(3) == []
    # The chief of a shared search has a worker's traceback from the trial's folder alone.
    trial = tuner.oracle.trials["0000"]
    trial.message = None
    progress_reporter.TrialReporter(tuner.oracle, tuner.get_trial_dir).ended(trial)
    assert "RuntimeError: nothing works at 0.1" in capsys.readouterr().out


def test_an_objective_that_is_not_in_the_logs_is_an_error_at_once(tmp_path):
    epochs = []

    class Count(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            epochs.append(epoch)

    with pytest.raises(ValueError, match="'val_loss' .* have loss; .* validation_data=") as no_data:
        make(tmp_path / "a").search(X, X[:, :1], epochs=3, verbose=0, callbacks=[Count()])
    assert not isinstance(no_data.value, KeyError) and epochs == [0]
    objective = keras_tuner.Objective("val_acc", "max")
    with pytest.raises(ValueError, match="'val_acc' .* have loss, val_loss; give `tuner` one"):
        make(tmp_path / "b", objective=objective).search(X, X[:, :1], **DATA)
    tuner = make(tmp_path / "b")  # there is no score yet: another objective is no mixture
    tuner.search(X, X[:, :1], **DATA)
    assert {trial.status for trial in tuner.oracle.trials.values()} == {"COMPLETED"}


@extended
def test_a_model_that_measures_after_fit_is_not_asked_too_early(tmp_path):
    class Own(keras_tuner.HyperModel):
        def build(self, hp):
            hp.Choice("rate", [0.1, 0.2])
            return make_model()

        def fit(self, hp, model, *args, **kwargs):
            model.fit(*args, **kwargs)
            return {"mine": hp["rate"]}

    tuner = make(tmp_path, Own(), keras_tuner.Objective("mine", "max"))
    tuner.search(X, X[:, :1], verbose=0)
    assert tuner.get_best_hyperparameters()[0]["rate"] == 0.2


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ({"dropout": {"kernel": tuning.Float(0, 1.5)}}, r"dropout\['kernel'\] has the value 1\.5"),
        ({"dropout": {"kernel": tuning.Float(-0.5, 0.5)}}, r"value -0.5 \(-0.5 to 0.5\)"),
        ({"noise": {"kernel": tuning.Float(-1, 0)}}, r"noise\['kernel'\] has the value -1.0"),
        ({"dropout": {"kernel": tuning.Choice([0.5, 1.5])}}, "has the value 1.5"),
        ({"dropout": {"kernel": 2}}, "has the value 2"),
        ({"dropout": {"kernel": "0.5"}}, "give a number, Float"),
    ],
)
def test_both_ends_of_each_range_are_checked_before_a_trial(rates, message):
    with pytest.raises(ValueError, match=message):
        tuning.rates(make_model, **rates)


def test_another_search_in_the_directory_is_refused_and_what_differs_is_listed(tmp_path):
    first = make(tmp_path, method="random", max_trials=1)
    first.search(X, X[:, :1], epochs=np.int64(1), **DATA)
    for options, difference in (
        ({"method": "grid"}, "method was random and is grid"),
        ({"objective": "loss"}, r"objective was val_loss \(min\) and is loss \(min\)"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"executions_per_trial": 2}, "executions_per_trial was 1 and is 2"),
    ):
        with pytest.raises(ValueError, match=f"another search: {difference}; give another dir"):
            make(tmp_path, **{"method": "random", "max_trials": 1, **options})
    tuner = make(tmp_path, method="random", max_trials=2, max_epochs=5)
    with pytest.raises(ValueError, match="epochs was 1 and is 2"):
        tuner.search(X, X[:, :1], epochs=2, **DATA)
    tuner.search(X, X[:, :1], **DATA)
    assert len(tuner.oracle.trials) == 2
    tuner = make(tmp_path, method="grid", seed=3, overwrite=True)
    assert not tuner.oracle.trials


def test_hyperbands_own_numbers_are_part_of_the_search(tmp_path):
    wide = tuning.rates(make_model, {"kernel": tuning.Float(0, 0.7)})
    options = {"method": "hyperband", "factor": 2}
    tuner = make(tmp_path, wide, max_epochs=2, **options)
    with pytest.raises(ValueError, match="epochs=7: Hyperband chooses .* give max_epochs"):
        tuner.search(X, X[:, :1], epochs=7, **DATA)
    tuner.on_search_begin()  # as after a stop before the first trial
    tuning.search_record.write(tuner.project_dir, tuner._described)
    with pytest.raises(ValueError, match="max_epochs was 2 and is 4; factor was 2 and is 3"):
        make(tmp_path, wide, method="hyperband", max_epochs=4, factor=3)
    make(tmp_path, wide, max_epochs=2, **options)


def test_a_directory_of_an_unknown_search_is_refused(tmp_path):
    make(tmp_path).search(X, X[:, :1], **DATA)
    (tmp_path / "search.json").unlink()
    with pytest.raises(ValueError, match="holds a search without search.json"):
        make(tmp_path)


@extended
def test_a_line_before_and_one_after_each_trial(tmp_path, capsys):
    make(tmp_path, max_trials=2).search(X, X[:, :1], validation_data=DATA["validation_data"])
    out = capsys.readouterr().out
    assert "Epoch 1" not in out.splitlines()[0]  # and Keras's own bar is there
    lines = [line for line in out.splitlines() if line.startswith("trial ")]
    assert lines[0] == "trial 0 (of 2): dropout/kernel=0"
    assert lines[2] == "trial 1 (of 2): dropout/kernel=0.5"
    for number, line in enumerate(lines[1::2]):
        assert line.startswith(f"trial {number} (of 2): val_loss ")
        assert "; best so far " in line and line.endswith("]")
    assert len(lines) == 4 and "val_loss: " in out
    make(tmp_path / "quiet").search(X, X[:, :1], **DATA)
    assert capsys.readouterr().out == ""
    make(tmp_path, max_trials=2).search(X, X[:, :1])
    assert capsys.readouterr().out == f"resuming in {tmp_path}: 2 trials are done\n"


@extended
def test_the_time_of_a_trial_that_was_stopped_counts_all_its_parts(tmp_path, capsys):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path).search(X, X[:, :1], epochs=2, callbacks=[Stop()], **DATA)
    path = tmp_path / "trial_0000" / "state-0" / stopwatch.FILE
    assert 0 < float(path.read_text()) < 3600
    path.write_text("3600\n")
    capsys.readouterr()
    make(tmp_path).search(X, X[:, :1], epochs=2, **{**DATA, "verbose": 2})
    ended = [line for line in capsys.readouterr().out.splitlines() if "best so far" in line]
    assert ended[0].startswith("trial 0000: ") and "[1:00:" in ended[0]
    assert "[0:00:" in ended[1] and float(path.read_text()) > 3600


def test_the_stopwatch_writes_seldom_and_adds_up(tmp_path):
    now = [0.0]
    watch = stopwatch.Stopwatch(tmp_path / "run-0", lambda: now[0])
    for now[0] in (1.0, 4.0):
        watch.tick()
    assert stopwatch.spent(tmp_path) == 0
    now[0] = 6.0
    watch.tick()
    assert stopwatch.spent(tmp_path) == 6
    again = stopwatch.Stopwatch(tmp_path / "run-0", lambda: now[0])
    now[0] = 8.0
    again.save()
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / stopwatch.FILE).write_text("2.5\n")
    assert stopwatch.spent(tmp_path) == 10.5


KERAS = """Traceback (most recent call last):
  File "a.py", line 1, in f
    g()
    ^^^
ValueError: Exception encountered when calling LSTM.call().

\x1b[1mshapes do not fit\x1b[0m

Arguments received by LSTM.call():
  • inputs=1
"""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (KERAS, "ValueError: shapes do not fit"),
        ("Traceback\nValueError: too bad", "ValueError: too bad"),
        ("tensorflow.python.errors_impl.InvalidArgumentError: no", "InvalidArgumentError: no"),
        ("its worker was lost 3 times", "its worker was lost 3 times"),
        ("", ""),
        (None, ""),
    ],
)
def test_the_reason_is_one_line_that_says_something(message, reason):
    assert trial_failure_reasons.one_line(message) == reason


def test_a_worker_does_not_remove_what_its_chief_has_begun(tmp_path, monkeypatch):
    make(tmp_path).search(X, X[:, :1], **DATA)
    monkeypatch.setattr("tfwd.tuning.keras_model_tuner.role", lambda: "worker")
    make(tmp_path, overwrite=True)  # all processes are given one script
    assert (tmp_path / "oracle.json").exists() and (tmp_path / "trial_0000").exists()
