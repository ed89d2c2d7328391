"""Tests of the benchmarks' helpers on work of known cost. No time is asserted."""

import importlib
import json
import os
import types

import numpy as np
import pytest
from stack_marks import extended, needs_keras3


def helper(name: str) -> types.ModuleType:
    return importlib.import_module(f"common.{name}")


def test_candidates_run_by_turns_and_begin_in_turn() -> None:
    seen: list[str] = []
    candidates = {name: lambda name=name: seen.append(name) for name in "ab"}
    found = helper("measure").alternate(candidates, rounds=4, least=4, warmup=0, calls=2)
    assert "".join(seen) == "aabbbbaaaabbbbaa"
    assert {name: len(times) for name, times in found.items()} == {"a": 4, "b": 4}


def test_ratio_is_the_median_of_the_turns_with_its_quartiles() -> None:
    # The ratio of the medians would be 3 / 1.
    spread = helper("measure").ratio([1.0, 2.0, 3.0, 40.0, 50.0], [1.0, 1.0, 1.0, 10.0, 10.0])
    assert spread == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("goal", "reached"),
    [
        ({"at_most": 0.7}, True),
        ({"at_most": 0.69}, False),
        ({"at_least": 0.7}, True),
        ({"at_least": 0.71}, False),
        ({"no_more": 0.6}, True),
        ({"no_more": 0.59}, False),
        ({}, None),
    ],
)
def test_a_goal_is_compared_with_the_printed_figure(goal: dict, reached: bool | None) -> None:
    measure = helper("measure")
    row = measure.Row("a claim", measure.Spread(0.7004, 0.6, 0.8), "ratio", 1.0, **goal)
    assert row.reached is reached
    assert measure.Row.from_json(json.loads(json.dumps(row.to_json()))) == row


def test_peak_is_what_a_step_holds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = helper("peak_memory")
    if not peak.can_reset():
        pytest.skip("the peak of this process cannot be set back here")

    def step() -> None:
        first = np.ones(64 * peak.MIB, np.uint8)
        second = np.ones(32 * peak.MIB, np.uint8)
        del first, second
        np.ones(80 * peak.MIB, np.uint8)

    for found in peak.peaks(step):
        assert abs(found / peak.MIB - 96) < 4


@extended
def test_a_process_that_dies_is_not_waited_for() -> None:
    found = helper("peak_memory").in_children(os._exit, {"dies": (3,)}, preload=(), seconds=600.0)
    assert found == {"dies": "ended with status 3 and no answer"}


def test_exponents_are_the_slopes_of_the_doublings() -> None:
    found = helper("measure").exponents([1, 2, 4, 8], [1.0, 2.0, 8.0, 64.0])
    assert found == (2.0, 1.0, 3.0)


def test_a_plot_is_written(tmp_path: "pytest.TempPathFactory") -> None:
    growth_plots = helper("growth_plots")
    panel = growth_plots.Panel("Dense", "width", [1, 2], {"tfwd": [1.0, 2.0], "naive": [2.0, 4.0]})
    path = growth_plots.draw("Time", "ms", [panel], tmp_path, "growth")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_memory_is_compared_by_the_share_of_the_weights() -> None:
    memory = helper("memory_above_plain_step")
    assert memory.above([30, 40, 50], [10, 20, 30], 40) == (0.5, 0.375, 0.625)
    assert memory.above("failed", [1], 40) == "failed"


@needs_keras3("benchmarks, which are of the newer stack")
def test_naive_layers_draw_in_each_call_and_drop_the_same_weights_as_tfwd() -> None:
    layer_stacks = helper("layer_stacks")
    kind = layer_stacks.dense(width=64, depth=1, batch=2)
    sizes = {}
    for way in ("bare", "dropout", "naive dropout", "recompute_grad dropout", "noise", "both"):
        step = layer_stacks.train_step(kind, way)
        losses = [float(step()), float(step())]
        assert np.isfinite(losses).all()
        # The learning rate is too small to be seen; the draws are not.
        assert (abs(losses[0] - losses[1]) < 1e-4) == (way == "bare"), (way, losses)
        sizes[way] = step.dropped_bytes
    assert set(sizes.values()) == {64 * 64 * 4}
