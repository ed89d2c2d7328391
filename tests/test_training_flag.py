"""The training flag in every form."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import training_flag


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        (None, False),
        (True, True),
        (False, False),
        (1, True),
        (0, False),
        (np.bool_(True), True),
        (tf.constant(True), True),
        (tf.constant(0), False),
    ],
    ids=repr,
)
def test_known_flags_become_bools(flag, expected: bool) -> None:
    found = training_flag.standardize(flag)
    assert found is expected


def test_variables() -> None:
    assert training_flag.standardize(tf.Variable(True)) is True
    seen = []

    @tf.function
    def call(variable: tf.Variable) -> None:
        seen.append(training_flag.standardize(variable))

    call(tf.Variable(True))
    assert tf.is_tensor(seen[0])


@pytest.mark.parametrize("dtype", [tf.bool, tf.int32, tf.float32])
def test_an_unknown_flag_stays_a_boolean_tensor(dtype: tf.DType) -> None:
    seen = []

    @tf.function(input_signature=[tf.TensorSpec([], dtype)])
    def call(flag: tf.Tensor) -> tf.Tensor:
        seen.append(training_flag.standardize(flag))
        return training_flag.cond(seen[0], lambda: tf.constant(1), lambda: tf.constant(2))

    assert int(call(tf.cast(1, dtype))) == 1
    assert int(call(tf.cast(0, dtype))) == 2
    assert seen[0].dtype == tf.bool
    assert len(seen) == 1


def test_a_constant_in_a_graph_is_known() -> None:
    assert tf.function(lambda: training_flag.standardize(tf.constant(True)) is True)()


def test_a_flag_that_is_not_a_scalar_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"scalar boolean tensor, got a tensor of shape \(2,\)"):
        training_flag.standardize(tf.constant([True, False]))


def test_cond_of_a_bool_runs_one_branch_only() -> None:
    def fail() -> None:
        raise AssertionError("the other branch")

    assert training_flag.cond(True, lambda: "training", fail) == "training"
    assert training_flag.cond(False, fail, lambda: "evaluation") == "evaluation"


def test_there_is_one_cond_in_the_library(root) -> None:
    """Checks rule 7: every dependence on the flag goes through `training_flag.cond`."""
    sources = [*(root / "tfwd").rglob("*.py"), *(root / "layers").rglob("*.py")]
    flagged = [
        path
        for path in sources
        if "training_flag" in path.read_text() or path.stem == "training_flag"
    ]
    calls = {path.name: path.read_text().count("tf.cond(") for path in flagged}
    assert {name: n for name, n in calls.items() if n} == {"training_flag.py": 1}
    assert sum(path.read_text().count("tf.keras.backend.in_train_phase") for path in sources) == 0
    assert keras.backend.backend() == "tensorflow"
