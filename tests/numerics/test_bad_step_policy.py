"""The policy for bad steps, by sequences of good and bad steps."""

import numpy as np
import pytest
import tensorflow as tf

from tfwd.numerics.bad_step_policy import BadStepPolicy


def test_raise_always_stops() -> None:
    assert BadStepPolicy("raise", 5, 0.5).reason_to_stop() == ""


@pytest.mark.parametrize(
    ("steps", "stops"),
    # A letter for each step: bad or good.
    [("bb", ""), ("bbb", "b"), ("bbgbb", ""), ("bbgbbb", "b"), ("gggb", "")],
)
def test_skipped_steps_in_a_row(steps: str, stops: str) -> None:
    policy = BadStepPolicy("skip", 2, 0.5)
    reason: str | None = None
    for step in steps:
        assert reason is None
        if step == "g":
            policy.good_step()
        elif (reason := policy.reason_to_stop()) is None:
            assert policy.leave_behind() == 1.0
    assert reason == ("before this step, 2 consecutive bad steps were skipped" if stops else None)


def test_restores_of_an_epoch() -> None:
    policy, weight = BadStepPolicy("restore", 2, 0.5), tf.Variable([1.0, 2.0])
    assert (
        policy.reason_to_stop()
        == "no epoch of this run has ended with finite weights, so no state can be restored"
    )
    for _ in range(2):  # a second epoch starts to count again
        policy.store([weight])
        stored = weight.numpy()
        for factor in (0.5, 0.25):
            weight.assign(np.float32([np.nan, 7.0]))
            assert policy.reason_to_stop() is None
            assert policy.leave_behind() == factor
            np.testing.assert_array_equal(weight.numpy(), stored)
            policy.good_step()  # does not reach the end of the epoch
        reason = policy.reason_to_stop()
        assert reason == "before this step, 2 bad steps led to a restore of the same epoch"
        weight.assign_add([1.0, 1.0])


def test_no_bad_step_is_allowed() -> None:
    for action in ("skip", "restore"):
        assert BadStepPolicy(action, 0, 0.5).reason_to_stop() == ""
