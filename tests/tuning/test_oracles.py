"""The oracles without a model: stops at every moment, lost workers, failed trials."""

import json
import shutil

import keras_tuner
import pytest

from tfwd.tuning.fault_tolerant_oracle import LOSSES_ALLOWED
from tfwd.tuning.oracles import METHODS, make_oracle
from tfwd.tuning.search_space import Float, Int, hyperparameters

SPACE = {"rate": Float(0, 0.3, step=0.1), "units": Int(1, 3)}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Watched:
    def __init__(self):
        self.events = []

    def began(self, trial):
        self.events.append(("began", trial.trial_id))

    def ended(self, trial):
        self.events.append(("ended", trial.trial_id, trial.status))

    def lost(self, trial, worker):
        self.events.append(("lost", trial.trial_id, worker))


def make(folder, method="random", timeout=None, clock=None, watcher=None, space=SPACE, **options):
    options = {"max_trials": 6, "max_epochs": 4, "factor": 2, **options}
    objective = keras_tuner.Objective("loss", "min")
    oracle = make_oracle(
        method,
        objective,
        hyperparameters(space),
        worker_timeout=timeout,
        watcher=watcher,
        **options,
    )
    oracle._clock = clock or oracle._clock
    oracle._set_project_dir(str(folder), "sweep")
    if (folder / "sweep" / "oracle.json").exists():
        oracle.reload()
    return oracle


def loss_of(trial):
    values = trial.hyperparameters.values
    return (values["rate"] - 0.2) ** 2 + values["units"] / 10 + 1 / values.get("tuner/epochs", 1)


def end(oracle, trial, status="COMPLETED"):
    if status == "COMPLETED":
        oracle.update_trial(trial.trial_id, {"loss": loss_of(trial)})
    trial.status = status
    oracle.end_trial(trial)


def run(oracle, stop_after=None, worker="one"):
    """Runs trials to the end, or stops within one, and returns (number, values)."""
    done = []
    while (trial := oracle.create_trial(worker)).status == "RUNNING":
        if stop_after is not None and len(done) >= stop_after:
            return done
        end(oracle, trial)
        done.append((trial.trial_id, trial.hyperparameters.values))
    assert trial.status == "STOPPED"
    return done


@pytest.mark.parametrize("method", ["random", "grid", "hyperband"])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_sweep_that_was_stopped_is_the_sweep_that_was_not(tmp_path, method, stop):
    options = {} if method == "random" else {"max_trials": None}
    whole = run(make(tmp_path / "whole", method, **options))
    first = run(make(tmp_path / "parts", method, **options), stop_after=stop)
    rest = run(make(tmp_path / "parts", method, **options))
    assert len(first) == stop and first + rest == whole
    if method == "grid":
        assert len({tuple(values.items()) for _, values in whole}) == len(whole) == 12
    again = make(tmp_path / "parts", method, **options)
    assert run(again) == [] and len(again.trials) == len(whole)


def test_a_grid_has_a_point_for_each_worker(tmp_path):
    oracle = make(tmp_path, "grid", max_trials=None)
    running = [oracle.create_trial(f"worker {n}") for n in range(5)]
    assert [trial.status for trial in running] == ["RUNNING"] * 5
    found = []
    while running:  # those that began last end first
        trial = running.pop()
        end(oracle, trial)
        found.append(tuple(trial.hyperparameters.values.items()))
        following = oracle.create_trial("another")
        if following.status == "RUNNING":
            running.append(following)
    assert len(set(found)) == len(found) == 12


def test_the_same_seed_gives_the_same_trials_and_zero_is_a_seed(tmp_path):
    found = [run(make(tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1))]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("file", ["oracle.json", "trial_2/trial.json"])
def test_a_kill_while_a_file_is_written_leaves_the_old_one(tmp_path, file):
    run(make(tmp_path), stop_after=2)
    path = tmp_path / "sweep" / file
    (path.parent / f"{path.name}.new").write_text('{"half')
    assert len(run(make(tmp_path))) == 4


def test_a_trial_that_the_state_does_not_know_is_dropped(tmp_path):
    run(make(tmp_path), stop_after=2)
    unknown = tmp_path / "sweep" / "trial_3"
    shutil.copytree(tmp_path / "sweep" / "trial_2", unknown)
    state = json.loads((unknown / "trial.json").read_text())
    (unknown / "trial.json").write_text(json.dumps({**state, "trial_id": "3"}))
    oracle = make(tmp_path)
    assert set(oracle.trials) == {"0", "1", "2"}
    assert [name for name, _ in run(oracle)] == ["2", "3", "4", "5"]


def test_another_space_is_refused(tmp_path):
    run(make(tmp_path), stop_after=1)
    with pytest.raises(ValueError, match=r"another search: rate was 0.0 \| 0.1 .* and is 0.0 \| "):
        make(tmp_path, space={**SPACE, "rate": Float(0, 0.5, step=0.1)})
    with pytest.raises(ValueError, match="search: noise was not varied and is 0 to 1;"):
        make(tmp_path, space={**SPACE, "noise": Float(0, 1)})


def test_failed_trials_do_not_end_the_search(tmp_path):
    oracle = make(tmp_path)
    for _ in range(6):  # keras-tuner itself gives up after the third
        trial = oracle.create_trial("one")
        assert trial.status == "RUNNING"
        end(oracle, trial, "INVALID")
    assert oracle.create_trial("one").status == "STOPPED"
    assert {trial.status for trial in oracle.trials.values()} == {"FAILED"}


def test_a_lost_workers_trial_goes_to_another_one(tmp_path):
    clock, watched = Clock(), Watched()
    oracle = make(tmp_path, timeout=10, clock=clock, watcher=watched, max_trials=2)
    mine, theirs = oracle.create_trial("one"), oracle.create_trial("two")
    clock.now = 6
    oracle.get_trial(mine.trial_id)  # a sign of life; `two` gives none
    clock.now = 12
    end(oracle, mine)
    again = oracle.create_trial("one")
    assert again.trial_id == theirs.trial_id and again.status == "RUNNING"
    assert ("lost", theirs.trial_id, "two") in watched.events
    end(oracle, again)
    assert oracle.create_trial("one").status == "STOPPED"
    assert oracle.tuner_ids == set() and not oracle.ongoing_trials
    assert oracle.end_order == [mine.trial_id, theirs.trial_id]


def test_nobody_is_sent_home_while_a_trial_may_have_to_be_taken_over(tmp_path):
    clock = Clock()
    oracle = make(tmp_path, timeout=10, clock=clock, max_trials=2)
    mine, theirs = oracle.create_trial("one"), oracle.create_trial("two")
    end(oracle, mine)
    assert oracle.create_trial("one").status == "IDLE"  # keras-tuner alone says STOPPED here
    assert "one" in oracle.tuner_ids
    clock.now = 20
    assert oracle.create_trial("one").trial_id == theirs.trial_id


def test_who_waits_and_dies_is_forgotten(tmp_path):
    clock = Clock()
    oracle = make(tmp_path, timeout=10, clock=clock, max_trials=1)
    trial = oracle.create_trial("one")
    assert oracle.create_trial("two").status == "IDLE"
    clock.now = 20
    oracle.get_trial(trial.trial_id)
    oracle.release_trials_of_lost_workers()
    assert oracle.tuner_ids == {"one"}


def test_a_worker_that_comes_back_too_late_changes_nothing(tmp_path):
    clock, watched = Clock(), Watched()
    oracle = make(tmp_path, timeout=10, clock=clock, watcher=watched, max_trials=1)
    slow = oracle.create_trial("one")
    late = keras_tuner.engine.trial.Trial.from_proto(slow.to_proto())
    clock.now = 20
    end(oracle, oracle.create_trial("two"))
    score = oracle.trials["0"].score
    late.status = "FAILED"
    oracle.end_trial(late)
    assert oracle.trials["0"].status == "COMPLETED" and oracle.trials["0"].score == score
    assert oracle.end_order == ["0"] and watched.events.count(("ended", "0", "COMPLETED")) == 1


def test_a_result_that_comes_while_the_trial_waits_is_taken(tmp_path):
    clock = Clock()
    oracle = make(tmp_path, timeout=10, clock=clock, max_trials=1)
    trial = oracle.create_trial("one")
    clock.now = 20
    oracle.release_trials_of_lost_workers()
    end(oracle, trial)
    assert oracle.create_trial("two").status == "STOPPED" and oracle.end_order == ["0"]


def test_a_trial_that_loses_every_worker_is_failed(tmp_path):
    clock = Clock()
    oracle = make(tmp_path, timeout=10, clock=clock, max_trials=1)
    for number in range(LOSSES_ALLOWED):
        assert oracle.create_trial(f"worker{number}").trial_id == "0"
        clock.now += 20
    assert oracle.create_trial("last").status == "STOPPED"
    assert oracle.trials["0"].status == "FAILED"
    assert oracle.trials["0"].message == f"its worker was lost {LOSSES_ALLOWED} times"


def test_a_chief_that_is_started_again_waits_for_its_workers(tmp_path):
    clock = Clock()
    first = make(tmp_path, timeout=10, clock=clock, max_trials=2)
    mine, theirs = first.create_trial("one"), first.create_trial("two")
    clock.now = 100
    oracle = make(tmp_path, timeout=10, clock=clock, max_trials=2)
    assert oracle.create_trial("three").status == "IDLE"
    end(oracle, oracle.get_trial(mine.trial_id))  # `one` has gone on all the time
    clock.now = 120
    assert oracle.create_trial("three").trial_id == theirs.trial_id


def test_a_disk_that_is_full_is_remembered_and_not_raised(tmp_path, monkeypatch):
    """Checks that the error waits: raised inside keras-tuner, it would leave its lock taken."""
    oracle = make(tmp_path)
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError(28, "full")))
    trial = oracle.create_trial("one")
    assert trial.status == "RUNNING" and oracle.failure.errno == 28


def test_methods():
    assert set(METHODS) == {"random", "grid", "bayesian", "hyperband"}
    with pytest.raises(ValueError, match="method 'gird': give random, grid"):
        make_oracle("gird", "val_loss")


def test_hyperband_over_too_few_points_is_refused(tmp_path):
    """Checks a space with too few points: keras-tuner would stop after the first short trials."""
    with pytest.raises(ValueError, match="draws 10 different points and the space has 6"):
        make(tmp_path, "hyperband", space={"rate": Float(0, 0.5, step=0.1)})
    make(tmp_path, "hyperband", space={"rate": Float(0, 0.5)})


@pytest.mark.slow
def test_bayesian_search_finds_the_bottom_of_a_bowl(tmp_path):
    pytest.importorskip("sklearn")
    space = {"rate": Float(0, 1), "units": Int(1, 3)}
    oracle = make(tmp_path, "bayesian", space=space, max_trials=14)
    run(oracle)
    late = [oracle.trials[name] for name in oracle.end_order[8:]]
    best = min(late, key=lambda trial: trial.score)
    assert abs(best.hyperparameters.values["rate"] - 0.2) < 0.1
    assert best.hyperparameters.values["units"] == 1
