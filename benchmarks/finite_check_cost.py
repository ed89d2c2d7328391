"""Cost of finite checks in a training step: tfwd and other libraries.

    python benchmarks/finite_check_cost.py

There are five models, each with and without `jit_compile=True`. The script times the training
function of `fit` on one batch. `FiniteCheck` checks the whole model in each step. `ApplyIfFinite`
is used alone, around the optimizer. Their times are divided by the time of the bare step. The same
holds for `tf.debugging.enable_check_numerics`. On the stack of 100 small layers,
`FiniteCheck(every_n_steps=10)` is measured too, and ten steps are timed together. The times of
PyTorch's `detect_anomaly` and of `DebugUnderflowOverflow` of Hugging Face's transformers are
divided by the time of PyTorch's bare step of the same model.

Then a weight of each side is set to NaN. The row has the reaction of the side. For `FiniteCheck`,
whose diagnosis takes seconds, only one model is tested. Peak memory is measured on a large batch,
each side in a separate process (see common/peak_memory.py). The figure is the extra memory of
`FiniteCheck`, as a share of the bytes of one activation.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

from common import measure, memory_above_plain_step, peak_memory
from common.finite_check_settings import (
    BARE,
    CONVOLUTIONS,
    EVERY,
    LSTM,
    OPTIMIZER,
    OURS,
    SHAPES,
    STACK,
    TENSORFLOW,
    Side,
    title,
)
from common.measure import Row, ratio

MODES = {"in a graph": False, "compiled": True}
LIMITS = {OURS: 1.05, OPTIMIZER: 1.01, EVERY: 1.02}
LSTM_LIMIT = 1.10
# The only model for work that takes seconds and does not depend on the model: FiniteCheck's
# diagnosis of a NaN, and TensorFlow's checks in a compiled step.
ONE = LSTM
# Number of rounds for the other libraries. Their ratios are far from 1, so few rounds are enough.
FEW = 8
LARGE = (CONVOLUTIONS, 128)


def step(way: str, compiled: bool) -> Callable[[], Any]:
    """Returns a step of the model of `LARGE`. It is called in a child process."""
    measure.equal_threads()
    from common import finite_check_keras_models

    return finite_check_keras_models.side(LARGE[0], way, compiled, batch=LARGE[1]).step


def times(sides: dict[str, Side], heading: str, **limits: Any) -> dict[str, list[float]]:
    """Returns the seconds of each side's steps."""
    steps = {way: side.step for way, side in sides.items()}
    return measure.alternate(steps, warmup=1, title=heading, **limits)


def reactions_to_nan(sides: dict[str, Side], name: str) -> dict[str, str]:
    """Plants a NaN on each tested side, and returns the reactions of the sides."""
    tested = [way for way in sides if way not in (BARE, EVERY) and (way != OURS or name == ONE)]
    found = {way: sides[way].react_to_nan() for way in tested}
    for way, outcome in found.items():
        measure.CONSOLE.print(f"{name}: {way}, a planted NaN: {outcome}", highlight=False)
    return found


def rows_of(
    heading: str,
    name: str,
    found: dict[str, list[float]],
    said: dict[str, str],
    unable: dict[str, str] | None = None,
) -> list[Row]:
    """Returns a row for each side except the bare side.

    Args:
        heading: The model and its mode.
        name: Name of the model.
        found: Seconds of each side.
        said: dict from a side to its reaction to a planted NaN.
        unable: dict from a missing side to the reason. Default None.
    """
    medians = measure.milliseconds(found)
    return [
        Row(
            f"step with {way}, {heading}" + (f"; a NaN: {said[way]}" if way in said else ""),
            ratio(found[way], found[BARE]),
            "time over bare",
            float(medians[way]),
            {BARE: medians[BARE], **((unable or {}) if way == OURS else {})},
            at_most=LSTM_LIMIT if (way, name) == (OURS, LSTM) else LIMITS.get(way),
        )
        for way in found
        if way != BARE
    ]


def by_tensorflow(name: str, mode: str, seconds: float) -> list[Row]:
    """Measures a model in TensorFlow in one mode, and returns its rows."""
    from common import finite_check_keras_models

    heading = f"{title(name)}, {mode}"

    def make(way: str) -> Side:
        return finite_check_keras_models.side(name, way, MODES[mode])

    ways = (BARE, OURS, OPTIMIZER, *((EVERY,) if name == STACK else ()))
    sides = {way: make(way) for way in ways}
    found = times(sides, heading, seconds=seconds, rounds=100)
    theirs, beside, unable = {}, {}, {}
    if name == ONE or not MODES[mode]:
        try:
            theirs = {BARE: sides[BARE], TENSORFLOW: make(TENSORFLOW)}
        except Exception as error:  # TensorFlow raises errors of several classes
            unable[TENSORFLOW] = finite_check_keras_models.reason(error)
            measure.CONSOLE.print(f"{heading}: {TENSORFLOW} {unable[TENSORFLOW]}", style="yellow")
        else:
            beside = times(theirs, heading, rounds=FEW, seconds=seconds)
    said = reactions_to_nan(sides | theirs, name)
    return rows_of(heading, name, found, said, unable) + rows_of(heading, name, beside, said)


def by_torch(name: str, torch_sides: Callable[[str], dict[str, Side]], seconds: float) -> list[Row]:
    """Measures a model in PyTorch, and returns its rows."""
    heading = f"{title(name)}, PyTorch"
    sides = torch_sides(name)
    if BARE not in sides:
        return []
    found = times(sides, heading, rounds=FEW, seconds=seconds)
    return rows_of(heading, name, found, reactions_to_nan(sides, name))


def by_memory() -> list[Row]:
    """Measures the extra peak memory of `FiniteCheck`, and returns a row for each mode."""
    from common import finite_check_keras_models

    name, batch = LARGE
    largest = finite_check_keras_models.largest_activation(name, batch)
    configurations = {
        f"{way}, {mode}": (way, compiled)
        for mode, compiled in MODES.items()
        for way in (BARE, OURS)
    }
    found = peak_memory.in_children(step, configurations)
    rows = []
    for mode in MODES:
        bare, ours = (found[f"{way}, {mode}"] for way in (BARE, OURS))
        figure = memory_above_plain_step.above(ours, bare, largest)
        if isinstance(figure, str):
            measure.CONSOLE.print(f"without memory {mode}: {figure}", style="red")
            continue
        rows.append(
            Row(
                f"memory of a step with {OURS}, {name}, batch {batch}, {mode}",
                figure,
                "extra over bare, share of an activation",
                measure.Spread.of(ours).median / peak_memory.MIB,
                {
                    BARE: measure.Spread.of(bare).median / peak_memory.MIB,
                    "the activation": largest / peak_memory.MIB,
                },
                "MiB",
                at_most=1.0,
            )
        )
    return rows


def main() -> None:
    """Measures, and reports a row for each side."""
    options = measure.parser(__doc__, seconds=1.0, of="a group's rounds")
    options.add_argument(
        "--models", nargs="+", default=list(SHAPES), choices=SHAPES, help="some of the models"
    )
    arguments = options.parse_args()
    measure.equal_threads()
    memory_rows = by_memory()
    # By default PyTorch's threads spin while they wait, which is slow on busy cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch_models = measure.module("peers.torch_finite_checks", "PyTorch")
    rows = []
    for name in arguments.models:
        for mode in MODES:
            rows += by_tensorflow(name, mode, arguments.seconds)
            gc.collect()
        if torch_models:
            rows += by_torch(name, torch_models.sides, arguments.seconds)
    measure.report("finite_check_cost", rows + memory_rows, method=peak_memory.method_text())


if __name__ == "__main__":
    main()
