"""Evaluation of a wrapped layer compared with the bare layer: same operations, same time.

    python benchmarks/evaluation_time.py

Both sides use the same layer object, which is called with `training=False` in a `tf.function`. The
JSON line also has the numbers of operations of the two graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from common import measure
from common.measure import Row, Spread, ratio


def kinds() -> dict[str, tuple[Any, Any]]:
    """Returns a dict from a name to a layer and the shape of its input."""
    import keras

    return {
        "Dense 3072, batch 64": (keras.layers.Dense(3072, activation="relu"), (64, 3072)),
        "Conv2D 3x3, 128 to 128": (keras.layers.Conv2D(128, 3), (8, 16, 16, 128)),
        "LSTM 400, time 35, batch 20": (keras.layers.LSTM(400), (20, 35, 400)),
        "MultiHeadAttention 8 x 64": (keras.layers.MultiHeadAttention(8, 64), (4, 64, 512)),
    }


def evaluated(layer: Any, call: Callable[..., Any], values: Any) -> tuple[Callable, int]:
    """Returns a traced function that evaluates, and the number of operations in its graph."""
    import tensorflow as tf

    arguments = [values] * (1 + _attends(layer))
    run = tf.function(lambda *inputs: call(*inputs, training=False), autograph=False)
    graph = run.get_concrete_function(*arguments).graph
    return lambda: run(*arguments), _operations(graph)


def _operations(graph: Any) -> int:
    functions = graph.as_graph_def().library.function
    return len(graph.get_operations()) + sum(len(function.node_def) for function in functions)


def main() -> None:
    """Measures, and reports a row for each layer."""
    options = measure.parser(__doc__, seconds=10.0, of="a layer's rounds")
    seconds = options.parse_args().seconds
    measure.equal_threads()
    import tensorflow as tf

    from tfwd import layers

    rows, operations = [], {}
    for name, (layer, shape) in kinds().items():
        values = tf.random.stateless_normal(shape, [1, 2])
        bare = _call(layer)
        bare(*([values] * (1 + _attends(layer))), training=False)  # builds it
        wrapped = layers.WeightDropout(layer, 0.5, seed=1)
        sides = {
            "wrapped": evaluated(layer, wrapped, values),
            "bare": evaluated(layer, bare, values),
        }
        operations[name] = {side: count for side, (_, count) in sides.items()}
        candidates = {side: run for side, (run, _) in sides.items()}
        found = measure.alternate(
            candidates, seconds=seconds, rounds=400, least=20, calls=5, title=f"evaluation {name}"
        )
        medians = measure.milliseconds(found)
        rows.append(
            Row(
                f"evaluation of a wrapped layer, {name}",
                ratio(found["wrapped"], found["bare"]),
                "time over the bare layer",
                float(medians["wrapped"]),
                {"bare": medians["bare"]},
                no_more=1.0,
            )
        )
    counts = {name: Spread.of([c["wrapped"] / c["bare"]]) for name, c in operations.items()}
    most = max(counts.values())
    rows.append(
        Row("operations of an evaluation", most, "operations over the bare layer", at_most=1.0)
    )
    measure.report("evaluation_time", rows, operations=operations)


def _call(layer: Any) -> Callable[..., Any]:
    # Some plain layers have no training argument.
    def call(*inputs: Any, training: bool) -> Any:
        return layer(*inputs, training=training) if takes else layer(*inputs)

    takes = "training" in inspect.signature(layer.call).parameters
    return call


def _attends(layer: Any) -> bool:
    """Returns True if the layer takes its input twice, as query and as value."""
    return "value" in inspect.signature(layer.call).parameters


if __name__ == "__main__":
    main()
