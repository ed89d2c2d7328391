"""Weight sizes from which the compiled loop, and a second draw in backward, are faster.

    python benchmarks/mask_and_recompute_thresholds.py

A chain of twelve Dense layers is trained with weight dropout in four ways. One operation or the
compiled loop draws the mask (`tfwd._random.masks_and_normals`). The effective weight is stored for
backward or drawn again (`tfwd._graph.recomputed_weights`). tfwd uses the first way for weights with
fewer than `masks_and_normals.SMALL` entries, and the last way for all other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from common import measure
from common.measure import Row, ratio

WIDTHS = (64, 128, 181, 256, 512)
# For each name: True if one operation draws masks, and True if effective weights are drawn again.
WAYS = {
    "operation, kept": (True, False),
    "operation, again": (True, True),
    "loop, kept": (False, False),
    "loop, again": (False, True),
}


def make(width: int, way: str) -> Callable[[], Any]:
    """Returns the traced training step."""
    from common.many_layers_models import dense

    from tfwd._random import masks_and_normals
    from tfwd.layers._substitution import substituted_call

    by_operation, again = WAYS[way]
    model, x, y = dense(12, width, "tfwd")
    model.compile("sgd", "mse")
    worth = mock.patch.object(
        substituted_call.SubstitutedCall, "is_worth_recomputing", lambda call: again
    )
    with mock.patch.object(masks_and_normals, "SMALL", 1 << 60 if by_operation else 0), worth:
        model.train_on_batch(x, y)
    return lambda: model.train_on_batch(x, y)


def main() -> None:
    """Measures all ways at each width, in turn."""
    parser = measure.parser(__doc__)
    parser.parse_args()
    measure.equal_threads()
    from tfwd._random import masks_and_normals

    rows = []
    for width in WIDTHS:
        steps = {way: make(width, way) for way in WAYS}
        times = measure.alternate(steps, seconds=15.0, rounds=40, title=f"width {width}")
        one, other = "operation, kept", "loop, again"
        if width * width >= masks_and_normals.SMALL:
            one, other = other, one
        median = measure.milliseconds(times)
        peers = {way: median[way] for way in WAYS if way != one}
        claim = f"step of 12 Dense layers of {width * width:,} entries: {one}"
        figure = ratio(times[one], times[other])
        rows.append(Row(claim, figure, f"time over {other}", float(median[one]), peers))
    measure.report("mask_and_recompute_thresholds", rows)


if __name__ == "__main__":
    main()
