"""Memory that stays after models are built, fitted and deleted.

    python benchmarks/memory_after_deletion.py

Each model has 18 MB of weights and is fitted for three steps. Then it is deleted with `del`,
`clear_session` and a garbage collection. The figure is the growth of the process from the second
model to the last model. Plain Keras and weight dropout are measured in separate processes.
docs/memory.md explains the figure.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from common import measure, peak_memory
from common.measure import Row, Spread

WIDTH, LAYERS = 1062, 4  # 4 x 1062 x 1062 weights of 4 bytes are 18 MB
WAYS = ("plain", "plain, released", "wrapped")


def growth_measurement(way: str, models: int) -> Callable[[], list[float]]:
    """Returns a function that makes the models and returns the growth in MiB, in a child."""
    measure.equal_threads()
    import keras
    import tensorflow as tf

    import tfwd

    x = tf.ones([8, WIDTH])

    def fit_one_model() -> None:
        layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(LAYERS)]
        if way == "wrapped":
            layers = [tfwd.layers.WeightDropout(layer, 0.5) for layer in layers]
        model = keras.Sequential([keras.layers.Input([WIDTH]), *layers])
        model.compile("sgd", "mse")
        model.fit(x, x, batch_size=8, epochs=3, verbose=0)

    def run() -> list[float]:
        for number in range(models):
            fit_one_model()
            if way == "plain, released":
                tfwd.release_models()
            keras.backend.clear_session()
            gc.collect()
            if number == 1:
                before = peak_memory.resident()
        return [(peak_memory.resident() - before) / peak_memory.MIB]

    return run


def main() -> None:
    """Measures, and reports a row."""
    options = measure.parser(__doc__)
    options.add_argument("--models", type=int, default=50, help="number of models")
    models = options.parse_args().models
    found = peak_memory.in_children(
        growth_measurement, {way: (way, models) for way in WAYS}, steps=None
    )
    failed = [f"{way}: {growth}" for way, growth in found.items() if isinstance(growth, str)]
    if failed:
        raise RuntimeError("; ".join(failed))
    growth = {way: values[0] for way, values in found.items()}
    row = Row(
        f"growth of the process by {models} models of 18 MB that were fitted and dropped",
        Spread.of([growth["wrapped"] / growth["plain"]]),
        "growth over plain Keras",
        growth["wrapped"],
        {"plain Keras": growth["plain"], "plain Keras, release()": growth["plain, released"]},
        "MiB",
        at_most=1.0,
    )
    measure.report("memory_after_deletion", [row], growth=growth)


if __name__ == "__main__":
    main()
