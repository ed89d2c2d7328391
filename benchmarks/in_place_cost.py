"""Weight dropout in place, compared with a new model, plain Keras and a naive layer.

    python benchmarks/in_place_cost.py

The models are MobileNetV2 with every kernel dropped, and an encoder of twelve BERT layers made of
Keras layers, with every kernel and its embedding dropped. `tfwd.parametrize` changes the model in
place, or returns a new model. The naive layer applies TensorFlow's dropout to each kernel, and
backward stores the dropped kernel. The first step and the memory of a step are measured in a
separate process for each side. For the time of a step, all sides run in turn in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from common import measure, peak_memory
from common.measure import Row, ratio

IN_PLACE, NEW, NAIVE, PLAIN = "in place", "a new model", "naive", "plain"
SIDES = (IN_PLACE, NEW, NAIVE, PLAIN)
TITLES = {
    "MobileNetV2": "MobileNetV2, images of 64x64, batch 8",
    "BERT": "BERT of 12 layers of 256, 8 texts of 64",
    "tiny": "BERT of 2 layers of 32, 8 texts of 64",
}
PATTERN = ".*(kernel|embeddings)"


def make(name: str, side: str) -> tuple[Callable[[], Any], float]:
    """Returns a training step of a model, and the seconds that `tfwd.parametrize` took."""
    measure.equal_threads()
    import keras
    from common import many_layers_models as models

    import tfwd

    keras.utils.set_random_seed(0)
    layers = "naive" if side == NAIVE and name != "MobileNetV2" else "plain"
    if name == "MobileNetV2":
        model, x, y = models.mobilenet("plain")
    else:
        depth, width = (12, 256) if name == "BERT" else (2, 32)
        model, x, y = models.bert(depth, layers, width)
    if side == NAIVE and layers == "plain":
        model = keras.models.clone_model(model, clone_function=_naive)
    begin = time.perf_counter()
    if side in (IN_PLACE, NEW):
        dropped = {PATTERN: tfwd.parametrizations.Dropout(models.RATE)}
        model = tfwd.parametrize(model, dropped, seed=1, in_place=side == IN_PLACE)
    seconds = time.perf_counter() - begin
    model.compile("sgd", "mse")
    return lambda: model.train_on_batch(x, y), seconds


def _naive(layer: Any) -> Any:
    from common.many_layers_models import Naive

    copy = layer.__class__.from_config(layer.get_config())
    has_kernel = any(weight.path.endswith("kernel") for weight in layer.weights)
    return Naive(copy, name=layer.name) if has_kernel else copy


def first(name: str, side: str) -> Callable[[], list[float]]:
    """Returns a function that measures a side in a child process.

    It returns the seconds of `tfwd.parametrize`, the seconds of the first step, and the bytes of
    later steps.
    """

    def run() -> list[float]:
        step, parametrized = make(name, side)
        begin = time.perf_counter()
        step()
        taken = time.perf_counter() - begin
        return [parametrized, taken, *map(float, peak_memory.peaks(step))]

    return run


def rows_of(
    name: str, runs: dict[str, list[list[float]]], steps: dict[str, list[float]]
) -> list[Row]:
    """Returns the rows of a model.

    Args:
        name: Name of the model.
        runs: dict from a side to the results of `first`.
        steps: dict from a side to the seconds of a step in each round.
    """
    title, rows = TITLES[name], []
    times = {
        "first step": {side: [run[1] for run in each] for side, each in runs.items()},
        "step": steps,
    }
    for figure, each in times.items():
        claim = f"{title}: {figure}"
        rows.append(measure.time_over(claim, each, IN_PLACE, NEW, no_more=1.05))
        rows += [measure.time_over(claim, each, IN_PLACE, other) for other in (NAIVE, PLAIN)]
    calls = {side: [run[0] for run in runs[side]] for side in (IN_PLACE, NEW)}
    rows.append(measure.time_over(f"{title}: call of parametrize", calls, IN_PLACE, NEW))
    memory = {side: [max(run[2:]) / peak_memory.MIB for run in each] for side, each in runs.items()}
    middle = {side: measure.Spread.of(values).median for side, values in memory.items()}
    for other in (NEW, NAIVE, PLAIN):
        figure = ratio(memory[IN_PLACE], memory[other])
        means, ours, theirs = f"peak over {other}", middle[IN_PLACE], {other: middle[other]}
        rows.append(Row(f"{title}: memory of a step", figure, means, ours, theirs, "MiB"))
    return rows


def main() -> None:
    """Measures, and reports."""
    options = measure.parser(__doc__, seconds=15.0, of="a model's steps")
    options.add_argument("--rounds", type=int, default=2, help="processes for each side")
    options.add_argument("--models", nargs="+", choices=TITLES, default=("MobileNetV2", "BERT"))
    flags = options.parse_args()
    preload = ("tensorflow", "keras", "tfwd.layers", "common.many_layers_models")
    found: dict[str, dict[str, list]] = {n: {s: [] for s in SIDES} for n in flags.models}
    for turn in range(flags.rounds):
        # Every second round has the reverse order.
        cases = [(name, side) for name in flags.models for side in SIDES][:: (-1) ** turn]
        configurations = {f"{name}, {side}, round {turn + 1}": (name, side) for name, side in cases}
        results = peak_memory.in_children(
            first, configurations, steps=None, at_once=1, preload=preload
        )
        for (name, side), result in zip(cases, results.values(), strict=True):
            if isinstance(result, str):
                raise RuntimeError(f"{name}, {side}: {result}")
            found[name][side].append(result)
    rows = []
    for name in flags.models:
        candidates = {side: make(name, side)[0] for side in SIDES}
        steps = measure.alternate(candidates, seconds=flags.seconds, title=name)
        rows += rows_of(name, found[name], steps)
    measure.report("in_place_cost", rows, method=peak_memory.method_text())


if __name__ == "__main__":
    main()
