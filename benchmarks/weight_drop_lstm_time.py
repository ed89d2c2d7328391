"""Time of an LSTM with weight dropout, forward and backward: tfwd, Keras and PyTorch.

    python benchmarks/weight_drop_lstm_time.py

Each side computes the output and the gradients of the input and of all weights. tfwd and PyTorch
draw a mask for the recurrent kernel in every run. Keras's LSTM cannot draw it, so its kernel is
dropped once before.

Two measurements give the largest possible speed-up over Keras. `products alone` computes only the
matrix products that an LSTM with a gradient needs, in the same order. `operations alone` is tfwd's
LSTM on a batch of 1 with 8 units. It computes almost nothing, and starts as many operations as the
real LSTM. The same LSTM with 1 step gives the cost of a call, which the products already include.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common import measure
from common.measure import Row, ratio

if TYPE_CHECKING:
    import keras
    import numpy as np

RATE = 0.5
# Time, batch, input and units.
SIZES = {"small": (35, 20, 200, 200), "large": (70, 20, 400, 1150)}
KERAS, TORCH, PRODUCTS = "keras.layers.LSTM", "torch.nn.LSTM", "products alone"
OPERATIONS, CALL = "operations alone", "a call"
# Goals: how many times faster than each peer.
LIMITS = {"small": {KERAS: 1.6, TORCH: 1.0}, "large": {KERAS: 3.0, TORCH: 1.1}}


def by_tensorflow(
    layer: keras.layers.LSTM, x: np.ndarray, upstream: np.ndarray, dropped: bool
) -> Callable[[], None]:
    """Returns a run of a Keras layer.

    Args:
        layer: Layer that is not built yet. It must return sequences.
        x: Input, `[time, batch, input]`.
        upstream: Gradient of the output, `[time, batch, units]`.
        dropped: bool. Drops the recurrent kernel once before the runs.
    """
    import keras
    import tensorflow as tf

    sequences, given = (tf.constant(a.transpose(1, 0, 2)) for a in (x, upstream))
    layer.build((x.shape[1], None, x.shape[2]))
    weights = [v.value for v in layer.trainable_variables]
    scope: Any = contextlib.nullcontext()
    if dropped:
        weights[1] = tf.nn.dropout(weights[1], RATE)
        scope = keras.StatelessScope(list(zip(layer.trainable_variables, weights, strict=True)))

    # The number of time steps is not static, as in training on windows of random lengths.
    @tf.function(
        input_signature=[tf.TensorSpec([a.shape[0], None, a.shape[2]]) for a in (sequences, given)]
    )
    def step(sequences: tf.Tensor, given: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape, scope:
            tape.watch([sequences, *weights])
            y = layer(sequences, training=True)
        # The output is returned, because a layer that recomputes it in backward could omit it.
        return [y, *tape.gradient(y, [sequences, *weights], output_gradients=given)]

    def run() -> None:
        for tensor in step(sequences, given):
            tensor.numpy()

    return run


def by_torch(x: np.ndarray, upstream: np.ndarray, units: int) -> Callable[[], None]:
    """Returns a run of `torch.nn.LSTM` with dropout on `weight_hh`.

    Arguments are as in `by_tensorflow`.
    """
    import torch
    from peers import torch_lm

    layer = torch_lm.WeightDropLSTM(x.shape[2], units, RATE)
    sequences, given = torch.tensor(x, requires_grad=True), torch.tensor(upstream)
    parameters = [sequences, *layer.parameters()]
    zero = torch.zeros(1, x.shape[1], units)

    def run() -> None:
        for parameter in parameters:
            parameter.grad = None
        y, _ = layer(sequences, (zero, zero))
        y.backward(given)

    return run


def candidates(size: str, has_torch: bool) -> dict[str, Callable[[], None]]:
    """Returns all sides on the same input."""
    import keras
    import numpy as np
    from common import matrix_products_alone

    from tfwd import layers

    generator = np.random.default_rng(0)
    time, batch, features, units = SIZES[size]
    x = generator.normal(size=(time, batch, features)).astype("float32")
    upstream = generator.normal(size=(time, batch, units)).astype("float32")
    own = layers.WeightDropLSTM(units, weight_dropout=RATE, return_sequences=True, seed=1)
    plain = keras.layers.LSTM(units, return_sequences=True, seed=1)
    sides = {
        "tfwd": by_tensorflow(own, x, upstream, dropped=False),
        KERAS: by_tensorflow(plain, x, upstream, dropped=True),
        PRODUCTS: matrix_products_alone.run([matrix_products_alone.Lstm(*SIZES[size])]),
    }
    for name, steps in {OPERATIONS: time, CALL: 1}.items():
        tiny = layers.WeightDropLSTM(8, weight_dropout=RATE, return_sequences=True, seed=1)
        few = [array[:steps, :1, :8] for array in (x, upstream)]
        sides[name] = by_tensorflow(tiny, *few, dropped=False)
    if has_torch:
        sides[TORCH] = by_torch(x, upstream, units)
    return sides


def main() -> None:
    """Measures, and reports a row for each size and peer."""
    seconds = measure.parser(__doc__, seconds=25.0, of="a size's rounds").parse_args().seconds
    has_torch = measure.module("peers.torch_lm", "PyTorch") is not None
    measure.equal_threads()
    rows = []
    for size, limits in LIMITS.items():
        found = measure.alternate(
            candidates(size, has_torch), seconds=seconds, rounds=400, title=size
        )
        medians = measure.milliseconds(found)
        shape = "time {}, batch {}, {} to {}".format(*SIZES[size])
        rows += [
            Row(
                f"WeightDropLSTM, forward and backward, {shape}, against {peer}",
                ratio(found[peer], found["tfwd"]),
                "times faster",
                float(medians["tfwd"]),
                {peer: medians[peer]},
                at_least=limit,
            )
            for peer, limit in limits.items()
            if peer in found
        ]
        least = [
            products + operations - call
            for products, operations, call in zip(
                found[PRODUCTS], found[OPERATIONS], found[CALL], strict=True
            )
        ]
        rows += [
            Row(
                f"largest possible gain over {KERAS}, {shape}",
                ratio(found[KERAS], others),
                f"times faster, {without}",
                None,
                {side: medians[side] for side in (*sides, KERAS)},
            )
            for others, without, sides in (
                (found[PRODUCTS], "with the products alone", [PRODUCTS]),
                (least, "with gates that cost nothing", [PRODUCTS, OPERATIONS, CALL]),
            )
        ]
    measure.report("weight_drop_lstm_time", rows)


if __name__ == "__main__":
    main()
