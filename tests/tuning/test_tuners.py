"""Sweeps over a custom Keras model: the README's example, promotions, stops, failures."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from stack_marks import IS_KERAS_2, SLOW_ON_KERAS_2, extended, quick_rows

import tfwd
from tfwd import _keras, tuning
from tfwd import parametrizations as P
from tfwd.tuning import chief_and_workers
from tfwd.tuning.trial_callbacks import FullState

pytestmark = SLOW_ON_KERAS_2

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 5, 3)).astype("float32")
Y = X.sum((1, 2))[:, None]
DATA = {"validation_data": (X, Y), "verbose": 0, "batch_size": 8, "shuffle": False}


def make_model():
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            keras.layers.Flatten(),
            keras.layers.Dense(3, "tanh", name="hidden"),
            keras.layers.Dense(1, name="out"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def test_the_example_of_the_readme(tmp_path):
    x, y = X, Y
    hypermodel = tuning.rates(make_model, dropout={"hidden/kernel": tuning.Float(0, 0.7, step=0.1)})
    tuner = tuning.tuner(hypermodel, "val_loss", max_trials=3, directory=tmp_path / "rates")
    tuner.search(x, y, validation_data=(x, y), epochs=2, verbose=0)
    best = tuner.get_best_hyperparameters()[0].values
    assert 0 <= best["dropout/hidden/kernel"] <= 0.7
    trials = tuner.oracle.trials.values()
    assert [trial.status for trial in trials] == ["COMPLETED"] * 3
    assert len({trial.hyperparameters["dropout/hidden/kernel"] for trial in trials}) == 3
    assert best is tuner.oracle.get_best_trials()[0].hyperparameters.values
    model = tuner.get_best_models()[0]
    assert isinstance(model.get_layer("hidden"), tfwd.layers.Parametrized)
    score = min(trial.score for trial in trials)
    assert model.evaluate(x, y, verbose=0) == pytest.approx(score, rel=1e-5)


class Unbuilt(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="unbuilt")
        self.out = keras.layers.Dense(1, name="out")

    def call(self, x):
        return self.out(keras.ops.sum(x, 1))


@pytest.mark.parametrize("build", [False, True])
def test_a_subclassed_model(build: bool, tmp_path):
    def make():
        model = Unbuilt()
        model.compile("sgd", "mse")
        if build:
            model(X[:1])
        return model

    hypermodel = tuning.rates(make, {"out/kernel": tuning.Choice([0.25, 0.5])})
    options = {"method": "grid", "directory": tmp_path / "sweep"}
    if not build and not IS_KERAS_2:  # whose backups wait for the weights
        with pytest.raises(ValueError, match="'unbuilt' has no weights when .*build the model"):
            tuning.tuner(hypermodel, **options)
        return
    tuner = tuning.tuner(hypermodel, **options)
    tuner.search(X, Y, **DATA)
    scores = [trial.score for trial in tuner.oracle.get_best_trials(2)]
    assert len(scores) == 2 and 0 < scores[0] < scores[1]


def test_rates_makes_what_parametrize_makes():
    dropout = {"hidden/kernel": tuning.Choice([0.5]), "out/kernel": 0.25}
    noise = {"hidden/kernel": tuning.Choice([0.1])}
    hypermodel = tuning.rates(lambda hp: make_model(), dropout, noise)
    hp = tuning.search_space.keras_tuner.HyperParameters()
    model = hypermodel.build(hp)
    assert set(hp.values) == {"dropout/hidden/kernel", "noise/hidden/kernel"}
    hidden = model.get_layer("hidden")  # the dropout around the noise
    (drop,), (noise,) = (each.parametrizations.values() for each in (hidden, hidden.layer))
    assert repr(drop) == repr(P.Dropout(0.5)) and repr(noise) == repr(P.GaussianNoise(0.1))
    assert [type(layer).__name__ for layer in model.layers] == ["Flatten", *["Parametrized"] * 2]
    assert _keras.training.is_compiled(model)


def test_a_weight_that_two_patterns_match_has_noise_and_dropout():
    model = tuning.rates(make_model, {"kernel": 0.5}, {"hidden/kernel": 0.1}).build(
        tuning.search_space.keras_tuner.HyperParameters()
    )
    hidden = model.get_layer("hidden")
    (effective,) = hidden.effective_weights(0).values()
    raw = keras.ops.convert_to_tensor(hidden.weights[0])
    kept = effective != 0
    assert 0.2 < np.mean(kept) < 0.8
    assert np.all(np.abs(effective - 2 * raw)[kept] > 0)  # 2 w + 2 noise where it is kept
    assert isinstance(model.get_layer("out").layer, keras.layers.Dense)


@quick_rows("oracle.json")
@pytest.mark.parametrize("file", ["oracle.json", "trial_0/trial.json"])
def test_a_damaged_file_is_named(tmp_path, file):
    rates = tuning.rates(make_model, {"hidden/kernel": tuning.Choice([0.1, 0.2])})
    tuner = tuning.tuner(rates, max_trials=1, directory=tmp_path / "a")
    tuner.search(X, Y, epochs=1, **DATA)
    path = tmp_path / "a" / file
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match="oracle.json.* is damaged"):
        tuning.tuner(rates, max_trials=2, directory=tmp_path / "a")


@extended
def test_a_smaller_space_in_the_directory_is_refused(tmp_path):
    both = {"hidden/kernel": tuning.Choice([0.1, 0.2]), "out/kernel": tuning.Choice([0.1, 0.2])}
    tuner = tuning.tuner(tuning.rates(make_model, both), max_trials=1, directory=tmp_path / "a")
    tuner.search(X, Y, epochs=1, **DATA)
    del both["out/kernel"]
    with pytest.raises(ValueError, match="varied was dropout/hidden/kernel, dropout/out/kernel"):
        tuning.tuner(tuning.rates(make_model, both), max_trials=2, directory=tmp_path / "a")


def test_rates_of_a_subclassed_model_trains():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, name="dense")

        def call(self, inputs):
            return self.dense(inputs)

    def make():
        model = Own()
        model(X[:1, 0])
        model.compile("sgd", "mse")
        return model

    model = tuning.rates(make, {"kernel": 0.5}).build(
        tuning.search_space.keras_tuner.HyperParameters()
    )
    assert _keras.training.is_compiled(model)
    model.fit(X[:, 0], Y, verbose=0)


def test_errors_of_rates():
    shown = r"(<(keras\.src\.engine\.sequential\.)?Sequential|None)"  # Keras 2, Keras 3, None
    for model in (make_model(), None):
        with pytest.raises(ValueError, match=f"make_model must be a function .* got {shown}"):
            tuning.rates(model, dropout={"kernel": 0.5})
    with pytest.raises(ValueError, match="give rates to try"):
        tuning.rates(make_model)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    hypermodel = tuning.rates(lambda: plain, {"kernel": 0.5})
    with pytest.raises(ValueError, match="must make a compiled Keras model"):
        hypermodel.build(tuning.search_space.keras_tuner.HyperParameters())


def make_averaged():
    model = make_model()  # with averages, that a promotion has to carry over
    model.compile(keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.9), "mse")
    return model


@pytest.mark.slow
def test_a_promotion_resumes_with_the_same_results(tmp_path):
    """Checks weights, moments, averages and draws bit for bit against one run of all epochs."""
    hypermodel = tuning.rates(
        make_averaged, {"hidden/kernel": tuning.Float(0.2, 0.7), "out/kernel": 0.2}
    )
    tuner = tuning.tuner(
        hypermodel, method="hyperband", max_epochs=2, factor=2, directory=tmp_path / "sweep", seed=3
    )
    for number in range(9):  # a kill during a copy leaves one of them
        for name in ("state-0.new", ".state-0.new"):
            (tmp_path / "sweep" / f"trial_000{number}" / name / "part").mkdir(parents=True)
    tuner.search(X, Y, **DATA)
    promoted = [
        trial
        for trial in tuner.oracle.trials.values()
        if "tuner/trial_id" in trial.hyperparameters.values
    ]
    assert promoted and {trial.status for trial in promoted} == {"COMPLETED"}
    trial = promoted[-1]
    epochs = trial.hyperparameters["tuner/epochs"]
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    straight, state = hypermodel.build(trial.hyperparameters), FullState(str(tmp_path / "straight"))
    history = straight.fit(X, Y, epochs=epochs, callbacks=[state], **DATA).history
    assert trial.score == min(history["val_loss"])
    models = []
    for folder in (tmp_path / "sweep" / f"trial_{trial.trial_id}" / "state-0", state.backup_dir):
        keras.backend.clear_session()
        model = hypermodel.build(trial.hyperparameters)
        model.optimizer.build(model.trainable_variables)
        kept = FullState(str(folder))
        kept.set_model(model)
        kept.on_train_begin()  # reads it
        models.append(model)
    variables = [[*model.weights, *model.optimizer.variables] for model in models]
    assert any("average" in _keras.variables.path(variable) for variable in variables[0])
    for ours, theirs in zip(*variables, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=_keras.variables.path(ours))
    for name in ("hidden", "out"):
        ours, theirs = (model.get_layer(name) for model in models)
        assert int(ours.calls) == int(theirs.calls) == 3 * epochs


@extended
def test_full_state_keeps_the_history_of_a_run_that_was_stopped(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise InterruptedError

    hypermodel = tuning.rates(make_model, {"hidden/kernel": 0.5})

    def fit(folder, *more):
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model, state = hypermodel.build(None), FullState(str(folder))
        model.fit(X, Y, epochs=4, callbacks=[state, *more], **DATA)
        return state.history()

    with pytest.raises(InterruptedError):
        fit(tmp_path / "parts", Stop())
    assert fit(tmp_path / "parts") == fit(tmp_path / "whole")
    assert len(fit(tmp_path / "whole")["val_loss"]) == 4  # nothing is left to train


def test_trials_that_diverge_or_crash_fail_and_the_search_continues(tmp_path):
    def make(hp):
        what = hp.Choice("what", ["fine", "diverges", "crashes", "infinite"])
        if what == "crashes" and hp.values.get("ready"):
            raise RuntimeError("out of everything")
        model = keras.Sequential([keras.Input((5, 3)), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        rate = {"diverges": 1e30, "infinite": 1e12}.get(what, 0.01)
        model.compile(keras.optimizers.SGD(rate), "mse")
        return model

    hypermodel = tuning.rates(make, {"kernel": 0.1})
    tuner = tuning.tuner(hypermodel, method="grid", directory=tmp_path)
    tuner.oracle.hyperparameters.Fixed("ready", True)
    tuner.search(X, Y, epochs=4, **DATA)
    found = {t.hyperparameters["what"]: t for t in tuner.oracle.trials.values()}
    assert {what: trial.status for what, trial in found.items()} == {
        "fine": "COMPLETED",
        "diverges": "FAILED",
        "crashes": "FAILED",
        "infinite": "FAILED",
    }
    assert "val_loss is not finite in at least one epoch" in found["diverges"].message
    assert "out of everything" in found["crashes"].message
    assert tuner.get_best_hyperparameters()[0]["what"] == "fine"


@extended
def test_seeds_of_the_runs_are_fixed_and_differ(tmp_path):
    seen = []

    class See(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            seen.append(float(self.model.get_layer("hidden").layer.get_weights()[0].sum()))

    hypermodel = tuning.rates(make_model, {"hidden/kernel": tuning.Choice([0.2, 0.4])})
    tuner = tuning.tuner(hypermodel, method="grid", executions_per_trial=2, directory=tmp_path)
    tuner.search(X, Y, epochs=1, callbacks=[See()], **DATA)
    assert seen[:2] == seen[2:] and seen[0] != seen[1]


def test_roles(monkeypatch):
    for name in ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT"):
        monkeypatch.delenv(f"KERASTUNER_{name}", raising=False)
    assert chief_and_workers.role() == chief_and_workers.ALONE
    monkeypatch.setenv("KERASTUNER_TUNER_ID", "chief")
    assert chief_and_workers.role() == chief_and_workers.ALONE
    monkeypatch.setenv("KERASTUNER_ORACLE_IP", "127.0.0.1")
    with pytest.raises(ValueError, match="KERASTUNER_ORACLE_PORT must be set too"):
        chief_and_workers.role()
    monkeypatch.setenv("KERASTUNER_ORACLE_PORT", "8000")
    assert chief_and_workers.role() == chief_and_workers.CHIEF
    monkeypatch.setenv("KERASTUNER_TUNER_ID", "worker1")
    assert chief_and_workers.role() == chief_and_workers.WORKER


@pytest.mark.slow
def test_without_keras_tuner_the_extra_is_named(tmp_path):
    (tmp_path / "keras_tuner.py").write_text(
        "raise ModuleNotFoundError('no', name='keras_tuner')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "import tfwd; import tfwd.tuning"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip().endswith(
        "ImportError: tfwd.tuning needs keras-tuner: in a checkout of tfwd, pip install '.[tune]'"
    )
