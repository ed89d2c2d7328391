"""Tests of the sides of the benchmark of finite checks, on tiny models. No time is asserted."""

import importlib
import math
import types

import pytest
from stack_marks import extended, needs_keras3

pytestmark = [needs_keras3("benchmarks, which are of the newer stack")]
SMALL = {
    "MLP": (4, 8),
    "convolutions": (2, 8, 8, 3),
    "LSTM": (2, 3, 5),
    "transformer block": (2, 3, 8),
    "stack": (2, 4),
}


def helper(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    models = importlib.import_module("common.finite_check_settings")
    monkeypatch.setattr(models, "SHAPES", SMALL)
    monkeypatch.setattr(models, "DEPTH", 1)
    monkeypatch.setattr(models, "STACK_DEPTH", 3)
    return importlib.import_module(name)


@pytest.mark.slow
def test_sides_make_the_same_step_and_do_about_a_nan_what_they_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    side = helper("common.finite_check_keras_models", monkeypatch).side
    ends = {
        "bare": ["passes, weights are overwritten"],
        "FiniteCheck": ["raises and names it"],
        "ApplyIfFinite": ["leaves the step out"],
        # Updates that do not wait for the operation that raises may have been made.
        "enable_check_numerics": ["raises", "raises, weights are overwritten"],
    }
    sides = {way: side("MLP", way, compiled=False) for way in ends}
    losses = [one.step() for one in sides.values()]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-6)
    for way, said in ends.items():
        assert sides[way].react_to_nan() in said, way


@extended
def test_the_stack_makes_the_same_steps_in_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    side = helper("common.finite_check_keras_models", monkeypatch).side
    ways = ("bare", "FiniteCheck", "FiniteCheck(every_n_steps=10)")
    losses = [side("stack", way, compiled=False).step() for way in ways]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_that_a_check_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics_keras = helper("common.finite_check_keras_models", monkeypatch)
    with pytest.raises(Exception) as caught:
        numerics_keras.side("MLP", "enable_check_numerics", compiled=True)
    assert numerics_keras.reason(caught.value) == "does not compile"
    assert numerics_keras.reason(KeyError("a\nb")) == r"KeyError: 'a\nb'"


def test_rows_have_the_goals_of_their_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    numerics = helper("finite_check_cost", monkeypatch)
    found = {"bare": [2.0], "FiniteCheck": [2.1], "ApplyIfFinite": [2.1], "detect_anomaly": [4.0]}
    said, unable = {"detect_anomaly": "raises"}, {"peer": "does not compile"}
    rows = numerics.rows_of("a model", "LSTM", found, said, unable)
    assert [row.reached for row in rows] == [True, False, None]
    assert [row.claim for row in rows][1:] == [
        "step with ApplyIfFinite, a model",
        "step with detect_anomaly, a model; a NaN: raises",
    ]
    assert [len(row.peers) for row in rows] == [2, 1, 1]
    watched, *_ = numerics.rows_of("a model", "MLP", found, {})
    assert watched.at_most == 1.05
    assert numerics.rows_of("a model", "MLP", {}, {}) == []


@pytest.mark.parametrize("name", SMALL)
def test_models_are_the_same_in_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    theirs = helper("peers.torch_finite_checks", monkeypatch).model(name)
    ours = helper("common.finite_check_keras_models", monkeypatch).model(name)
    sizes = sorted(parameter.numel() for parameter in theirs.parameters())
    if name == "LSTM":
        sizes.remove(4 * 200)  # PyTorch's second bias
    if name == "transformer block":  # PyTorch has queries, keys and values in one
        width = SMALL[name][-1]
        sizes = [size for size in sizes if size not in (3 * width, 3 * width**2)]
        sizes = sorted([*sizes, *[width] * 3, *[width**2] * 3])
    assert sizes == sorted(math.prod(weight.shape) for weight in ours.trainable_variables)
    inputs, _ = importlib.import_module("common.finite_check_settings").data(name)
    inputs = torch.from_numpy(inputs)
    inputs = inputs.permute(0, 3, 1, 2) if name == "convolutions" else inputs
    assert tuple(theirs(inputs).shape) == (SMALL[name][0], 10)


def test_peers_in_pytorch_raise_at_a_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    sides = helper("peers.torch_finite_checks", monkeypatch).sides("MLP")
    losses = [one.step() for one in sides.values()]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    found = {way: one.react_to_nan() for way, one in sides.items()}
    assert found == {
        "bare": "passes, weights are overwritten",
        "detect_anomaly": "raises",
        "DebugUnderflowOverflow": "raises",
    }
