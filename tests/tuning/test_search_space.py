"""Spaces of a sweep, and keras-tuner's form of them."""

import keras_tuner
import pytest

from tfwd.tuning.oracles import make_oracle
from tfwd.tuning.search_space import (
    Boolean,
    Choice,
    Float,
    Int,
    grid_size,
    hyperparameters,
    read,
    size,
)


@pytest.mark.parametrize(
    ("spec", "values"),
    [
        (Float(0, 0.7, step=0.1), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)),
        (Float(0, 0.75, step=0.1), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)),
        (Float(0.25, 0.25, step=0.5), (0.25,)),
        (Float(1e-4, 1e-2, step=10, log=True), (1e-4, 1e-3, 1e-2)),
        (Float(0, 0.7), None),
        (Int(1, 3), (1, 2, 3)),
        (Int(2, 9, step=3), (2, 5, 8)),
        (Choice(["adam", "sgd"]), ("adam", "sgd")),
        (Choice([[300, 150], (400, 200)]), ((300, 150), (400, 200))),
        (Boolean(), (False, True)),
    ],
)
def test_values(spec, values):
    assert spec.values == values
    assert size({"a": spec, "b": Int(1, 2)}) == (None if values is None else 2 * len(values))


def test_keras_tuner_alone_misses_the_last_step():
    """Checks why a stepped Float is declared as a choice."""
    hp = keras_tuner.HyperParameters()
    hp.Float("rate", 0, 0.7, step=0.1)
    assert 0.7 not in list(hp.space[0].values)
    assert list(hyperparameters({"rate": Float(0, 0.7, step=0.1)}).space[0].values)[-1] == 0.7


SPACE = {
    "rate": Float(0, 0.7, step=0.1),
    "any": Float(1e-4, 1e-1, log=True),
    "units": Choice([(300, 150), (400, 200)]),
    "name": Choice(["adam", "sgd"]),
    "tie": Boolean(),
    "mixed": Choice([0, 0.5]),
    "window": Int(10, 70, step=20),
    "wide": Int(1, 1000, log=True),
}


def test_every_value_is_one_that_was_declared():
    oracle = make_oracle("random", "val_loss", hyperparameters(SPACE), max_trials=60)
    seen = {name: set() for name in SPACE}
    for _ in range(60):
        trial = oracle_trial(oracle)
        for name, value in read(SPACE, trial).items():
            seen[name].add(value)
            spec = SPACE[name]
            if spec.values is not None:
                assert value in spec.values
                assert type(value) is type(spec.values[spec.values.index(value)])
            else:
                assert spec.low <= value <= spec.high
                assert float(f"{value:.6g}") == value
    assert seen["rate"] == set(SPACE["rate"].values)  # 0.7 is among them
    assert seen["units"] == {(300, 150), (400, 200)}
    assert seen["tie"] == {False, True} and seen["mixed"] == {0, 0.5}
    # Evenly on a logarithmic scale: as many below the middle, 10^-2.5, as above it.
    assert 15 <= sum(value < 10**-2.5 for value in seen["any"]) <= 45
    assert 15 <= sum(value < 32 for value in map(int, seen["wide"])) <= 45


def oracle_trial(oracle):
    return oracle.populate_space("x")["values"]


def test_the_size_of_a_grid_is_what_keras_tuner_visits(tmp_path):
    space = {"rate": Float(0, 0.2, step=0.1), "any": Float(0.0, 1.0), "tie": Boolean()}
    oracle = make_oracle("grid", keras_tuner.Objective("loss", "min"), hyperparameters(space))
    oracle._set_project_dir(str(tmp_path), "sweep")
    count = 0
    while (trial := oracle.create_trial("one")).status == "RUNNING":
        oracle.update_trial(trial.trial_id, {"loss": 1.0})
        trial.status = "COMPLETED"
        oracle.end_trial(trial)
        count += 1
    assert count == grid_size(space) == 3 * 11 * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float(0.7, 0), "low is above high"),
        (lambda: Float(0, float("inf")), "finite numbers"),
        (lambda: Float(0, 1, step=0), "step above 0"),
        (lambda: Float(0, 1, log=True), "must start above 0"),
        (lambda: Float(1, 2, step=1, log=True), "step above 1"),
        (lambda: Int(0.5, 2), "whole numbers"),
        (lambda: Int(1, 8, step=2, log=True), "takes no step"),
        (lambda: Choice([]), "give a list of values"),
        (lambda: Choice("adam"), "give a list of values"),
        (lambda: Choice([1, 2, 1]), "twice"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_range_of_too_many_values_is_refused_at_once():
    for make in (
        lambda: Int(0, 10**12),
        lambda: Int(1, 10**12, log=True),
        lambda: Float(0, 1, step=1e-12),
        lambda: Float(1e-300, 1e300, step=1 + 1e-9, log=True),
    ):
        with pytest.raises(ValueError, match="more than 100,000 values; give a larger step"):
            make()
