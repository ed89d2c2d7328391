"""Orders of the axes of a tensor that fit a shape."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence

from tfwd.pretrained.flatten_order.orders import FlattenedAxes, Shape, flattened_axes


def orders_of_axes(
    in_keras: Shape, in_torch: Shape, may_be_exchanged: bool
) -> set[FlattenedAxes | None]:
    """Returns the orders that PyTorch may have of Keras's axes, if its tensor has some shape.

    The likely orders are Keras's own order, the last axis first (an image), the last axis second (a
    video, or the rows of an image), and the last two axes first (groups of channels). If height and
    width of an image may be exchanged, the reverse order is likely too. Neighbouring axes may be
    merged in the shape, but not if the last axis is second, or if height and width are exchanged.

    Args:
        in_keras: Sizes of the axes in Keras's order, without sizes of 1.
        in_torch: Sizes of the axes in PyTorch's order, without sizes of 1.
        may_be_exchanged: bool. True if PyTorch may have exchanged height and width.

    Returns:
        The distinct orders. None stands for Keras's order.
    """
    rank = len(in_keras)
    orders = [*_mergeable(rank)]
    if len(in_torch) == rank:
        orders += _unmerged(rank, may_be_exchanged)
    wanted = _ends(in_torch)
    return {
        flattened_axes(in_keras, [order.index(axis) for axis in range(rank)])
        for order in orders
        if _divides([in_keras[axis] for axis in order], wanted)
    }


def _mergeable(rank: int) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of Keras's axes in likely orders of PyTorch."""
    axes = tuple(range(rank))
    yield axes
    yield (*axes[-1:], *axes[:-1])
    if rank > 3:
        yield (*axes[-2:], *axes[:-2])


def _unmerged(rank: int, may_be_exchanged: bool) -> Iterator[tuple[int, ...]]:
    """Yields likely orders in which the shape has each axis by itself."""
    axes = tuple(range(rank))
    if rank > 2:
        yield (*axes[:1], *axes[-1:], *axes[1:-1])
    if rank == 3 and may_be_exchanged:
        yield axes[::-1]


def _divides(sizes: Sequence[int], wanted: set[int]) -> bool:
    """Returns True if axes have ends where a shape has, or the reverse."""
    ends = _ends(sizes)
    return wanted <= ends or ends <= wanted


def _ends(sizes: Sequence[int]) -> set[int]:
    return set(itertools.accumulate(sizes, operator.mul))
