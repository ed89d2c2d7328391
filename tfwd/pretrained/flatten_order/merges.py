"""Sums, products and other merges of tensors entry by entry, and joins along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout
from tfwd.pretrained.flatten_order.orders import COMBINES
from tfwd.pretrained.flatten_order.tensor_axes import Sizes, TensorAxes, made

Matches = list[tuple[Axis, Axis, str]]


def combined(
    tensors: Sequence[TensorAxes], shape: Sizes, name: str, matches: Matches
) -> TensorAxes:
    """Returns a tensor whose entries are functions of the same entries of others, as in a sum.

    Args:
        tensors: The tensors. Axes of size 1, and missing first axes, are repeated.
        shape: Shape of the result.
        name: Name of the layer or operation.
        matches: Gets the pairs of axes that must have the same order in PyTorch.
    """
    tensors = [_with_rank(tensor, len(shape)) for tensor in tensors]
    axes = [_common_axis(tensors, number, name, matches) for number in range(len(shape))]
    return _with_common_layout(
        tensors, axes, f"'{name}' combines tensors in several orders of axes"
    )


def joined(
    tensors: Sequence[TensorAxes], number: int, whole: Axis | None, name: str, matches: Matches
) -> TensorAxes:
    """Returns a tensor that joins others along one axis.

    Args:
        tensors: The tensors, without constants.
        number: Number of the axis.
        whole: The joined axis.
        name, matches: As in `combined`.
    """
    axes = [
        whole if n == number else _common_axis(tensors, n, name, matches)
        for n in range(len(tensors[0].axes))
    ]
    return _with_common_layout(
        tensors, axes, f"'{name}' joins an image with tensors of another order"
    )


def _common_axis(
    tensors: Sequence[TensorAxes], number: int, name: str, matches: Matches
) -> Axis | None:
    """Returns the one axis that an axis of several tensors becomes; None if its size is 1."""
    axes = [tensor.axes[number] for tensor in tensors]
    given = list(dict.fromkeys(axis.find() for axis in axes if axis is not None))
    return matched(given, name, matches) if given else None


def _with_common_layout(
    tensors: Sequence[TensorAxes], axes: Sequence[Axis | None], reason: str
) -> TensorAxes:
    """Returns a tensor with the order that several tensors have in common.

    Args:
        tensors: The tensors.
        axes: Axes of the result.
        reason: Clause that says why the order is unknown, if they have several orders.
    """
    used = {number for number, axis in enumerate(axes) if axis is not None}
    whole = [tensor for tensor in tensors if _used_numbers(tensor) == used]
    if not whole:
        return made(axes, reason, _order_of_parts(tensors, axes))
    base, layout = whole[0], whole[0].layout
    for other in whole[1:]:
        for mine, others in zip(base.places, other.places, strict=True):
            if mine is not None and others is not None:
                mine.become_one_with(others)
        layout = layout.join(other.layout, reason)
    for other in tensors:
        same = [base.places[n] for n, place in enumerate(other.places) if place is not None]
        if other not in whole and other.layout.is_open and base.layout.is_natural(same):  # type: ignore[arg-type]
            other.layout.restrict({other.used}, reason)
        order = None if other in whole else other.layout.known
        if order is not None and len(order) > 2:  # the order of some axes
            places = {p.find(): base.places[n] for n, p in enumerate(other.places) if p is not None}
            wanted = tuple(places[place].find() for place in order)  # type: ignore[union-attr]
            if layout.arrangement(wanted) not in (None, wanted):
                layout = Layout(None, reason=reason, is_contradictory=True)
    return TensorAxes(tuple(axes), base.places, layout)


def _order_of_parts(tensors: Sequence[TensorAxes], axes: Sequence[Axis | None]) -> list[int] | None:
    """Returns the order in PyTorch of a tensor, from tensors that have some of its axes.

    Returns:
        Numbers of the axes: with the last one last, or behind the batch. None if the tensors do not
        show one of these orders.
    """
    used = [number for number, axis in enumerate(axes) if axis is not None]
    shown = [tensor for tensor in tensors if len(tensor.used) > 2]
    if not used or {n for tensor in shown for n in _used_numbers(tensor)} != set(used):
        return None
    for order in (used, [used[0], used[-1], *used[1:-1]]):
        wanted = [[tensor.places[n] for n in order if tensor.places[n]] for tensor in shown]
        if all(
            tensor.layout.known == tuple(place.find() for place in places if place is not None)
            for tensor, places in zip(shown, wanted, strict=True)
        ):
            return order
    return None


def _used_numbers(tensor: TensorAxes) -> set[int]:
    """Returns the numbers of the axes that are not of size 1."""
    return {number for number, place in enumerate(tensor.places) if place is not None}


def matched(axes: Sequence[Axis], name: str, matches: Matches) -> Axis:
    """Returns the one axis that several axes with the same entries become.

    Args:
        axes, matches: As in `combined`.
        name: Name of the layer or operation.
    """
    special = [axis for axis in axes if type(axis) is not Axis]
    plain = [axis for axis in axes if type(axis) is Axis]
    for other in plain[1:]:
        plain[0].join(other)
    chosen = (special or plain)[0]
    reason = f"'{name}' {COMBINES}"
    for other in [*special[1:], *(plain[:1] if special else [])]:
        matches.append((chosen, other, reason))
    return chosen


def _with_rank(tensor: TensorAxes, rank: int) -> TensorAxes:
    """Returns a tensor with axes of size 1 before its axes."""
    missing = (None,) * (rank - len(tensor.axes))
    return TensorAxes((*missing, *tensor.axes), (*missing, *tensor.places), tensor.layout)
