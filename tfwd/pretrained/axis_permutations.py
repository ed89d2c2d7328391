"""Orders of the axes of a tensor that fit a shape."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from tfwd.pretrained.flatten_order.orders import FlattenedAxes, Shape, flattened_axes

MOST_AXES = 6  # of which all permutations are tried


def orders_of_axes(
    in_keras: Shape, in_torch: Shape, may_be_exchanged: bool
) -> set[FlattenedAxes | None]:
    """Returns the orders that PyTorch may have of Keras's axes, if its tensor has some shape.

    PyTorch has the last axis anywhere between the others, or the last two axes first (groups of
    channels). The other axes keep Keras's order, unless they may be exchanged. But if sizes are
    equal, or if the shape merges neighbouring axes, other permutations may have this shape too. An
    example is a stack of images on a new last axis, with the channels first. The height and width
    of an image that are merged keep their order.

    Args:
        in_keras: Sizes of the axes in Keras's order, without sizes of 1.
        in_torch: Sizes of the axes in PyTorch's order, without sizes of 1. Some may be merged.
        may_be_exchanged: bool. True if PyTorch may have exchanged axes such as height and width.

    Returns:
        The distinct orders. None stands for Keras's order. Only one order is a proof.
    """
    rank = len(in_keras)
    if rank > MOST_AXES or len(in_torch) > rank:
        return set()
    is_merged_image = len(in_torch) < rank < 4
    stacked = (rank - 2, *range(rank - 2), rank - 1)
    wanted = set(itertools.accumulate(in_torch, operator.mul))
    fitting = [
        order
        for order in itertools.permutations(range(rank))
        if wanted <= set(itertools.accumulate((in_keras[axis] for axis in order), operator.mul))
        and (may_be_exchanged or order == stacked or _keeps_equal_axes(order, in_keras))
        and not (is_merged_image and not _keeps_positions(order))
    ]
    found = {
        flattened_axes(in_keras, [order.index(axis) for axis in range(rank)]) for order in fitting
    }
    if len(found) > 1 or may_be_exchanged:
        return found
    groups = (rank - 2, rank - 1, *range(rank - 2))
    is_usual = any(_keeps_positions(order) or order == groups for order in fitting)
    return found if is_usual else set()


def _keeps_positions(order: Sequence[int]) -> bool:
    """Returns True if all axes but the last keep their order."""
    others = [axis for axis in order if axis != len(order) - 1]
    return others == sorted(others)


def _keeps_equal_axes(order: Sequence[int], sizes: Shape) -> bool:
    """Returns True if axes of equal sizes keep their order before the last axis, and behind it."""
    position = order.index(len(order) - 1)
    return all(
        first < second or sizes[first] != sizes[second]
        for side in (order[:position], order[position + 1 :])
        for first, second in itertools.combinations(side, 2)
    )
