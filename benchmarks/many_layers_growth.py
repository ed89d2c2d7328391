"""Growth of costs with the number of layers: 50, 100, 200 and 400 Dense layers of 16.

    python benchmarks/many_layers_growth.py

The script measures `tfwd.parametrize`, the first training step, a step, `save`, `load_model`,
`tfwd.unwrap` and the first `gradients.moments`. The steps, `save` and `load_model` are also
measured for the plain model. Each chain runs in a separate process. An exponent of 1 is linear
growth: twice the layers, twice the cost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import many_layers_measurements, measure
from common.measure import Row

LAYERS = (50, 100, 200, 400)
# So small that a signal passes through 400 layers with orthogonal kernels. Without a gradient,
# `gradients.moments` would check three times whether examples depend on each other.
RATE = 0.01
COSTS = ("parametrize", "first step", "step", "save", "load_model", "unwrap", "moments")
# Exponent of linear growth, plus the error of the measurement.
AT_MOST = 1.15


def child(layers: int) -> dict[str, dict[str, float]]:
    """Returns the seconds of each cost for a chain, with tfwd and for the plain model."""
    measure.equal_threads()
    import keras
    import numpy as np

    import tfwd
    from tfwd import gradients, parametrizations

    stack = [keras.layers.Dense(16, kernel_initializer="orthogonal") for _ in range(layers)]
    plain = keras.Sequential([keras.Input((16,)), *stack])
    x = y = np.random.default_rng(0).normal(size=(16, 16)).astype("float32")
    found: dict[str, dict[str, float]] = {"tfwd": {}, "plain": {}}

    def note(side: str, cost: str, function: Callable[[], Any], times: int = 1) -> None:
        found[side][cost] = many_layers_measurements.timed(function, times, warmup=2 * (times > 1))

    made: dict[str, Any] = {"plain": plain}

    def parametrize() -> None:
        drop = {".*kernel": parametrizations.Dropout(RATE)}
        made["tfwd"] = tfwd.parametrize(plain, drop)

    note("tfwd", "parametrize", parametrize)
    with tempfile.TemporaryDirectory() as folder:
        for side, model in made.items():
            model.compile("sgd", "mse")
            note(side, "first step", lambda model=model: model.train_on_batch(x, y))
            note(side, "step", lambda model=model: model.train_on_batch(x, y), 20)
            path = str(Path(folder) / f"{side}.keras")
            note(side, "save", lambda model=model, path=path: model.save(path))
            note(side, "load_model", lambda path=path: keras.saving.load_model(path))
    note("tfwd", "unwrap", lambda: tfwd.unwrap(made["tfwd"]))

    def moments() -> Any:
        return gradients.moments(made["tfwd"], x, y, "mse", training=True)

    note("tfwd", "moments", moments)
    return found


def main() -> None:
    """Measures each chain once."""
    parser = measure.parser(__doc__)
    parser.add_argument(
        "--child", type=int, help="measure the chain of this many layers in this process"
    )
    flags = parser.parse_args()
    if flags.child:
        print(json.dumps(child(flags.child)), flush=True)
        return
    found = [many_layers_measurements.in_a_process(__file__, f"--child={n}") for n in LAYERS]
    rows = []
    for cost in COSTS:
        sides = {
            side: [run[side][cost] for run in found]
            for side in ("tfwd", "plain")
            if cost in found[0][side]
        }
        last = {
            f"{side}, {n}": 1000 * t
            for side, ts in sides.items()
            for n, t in zip(LAYERS, ts, strict=True)
        }
        ours = last.pop(f"tfwd, {LAYERS[-1]}")
        claim = f"{cost} of 50 to 400 Dense layers"
        rows.append(
            Row(
                claim,
                measure.exponents(LAYERS, sides["tfwd"]),
                "exponent",
                ours,
                dict(last),
                at_most=AT_MOST,
            )
        )
    measure.report("many_layers_growth", rows)


if __name__ == "__main__":
    main()
