"""The axes of a tensor, and what reshapes, permutations and sums do to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout, Place
from tfwd.pretrained.flatten_order.orders import MAY_EXCHANGE

# Sizes of all axes of a tensor, with the batch.
Sizes = tuple[int | None, ...]


@dataclasses.dataclass(frozen=True)
class TensorAxes:
    """The axes of a tensor. The first axis is usually the batch.

    Attributes:
        axes: The axes in Keras's order. None for an axis of size 1.
        places: Their places. None for an axis of size 1.
        layout: Order of the places in PyTorch.
    """

    axes: tuple[Axis | None, ...]
    places: tuple[Place | None, ...]
    layout: Layout

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of the axes."""
        return tuple(1 if axis is None else axis.size for axis in self.axes)

    @property
    def last(self) -> Axis | None:
        """Returns the last axis; None if its size is 1."""
        return self.axes[-1] if self.axes else None

    @property
    def used(self) -> tuple[Place, ...]:
        """Returns the places of the axes that are not of size 1."""
        return tuple(place for place in self.places if place is not None)

    @property
    def entries(self) -> tuple[Axis, ...]:
        """Returns the axes that are not of size 1."""
        return tuple(axis for axis in self.axes if axis is not None)

    def has_batch(self, batch: Axis) -> bool:
        """Returns True if the first axis is the axis of the examples."""
        return bool(self.axes) and self.axes[0] is not None and self.axes[0].find() is batch

    def is_image_of_caller(self) -> bool:
        """Returns True for an input that may be an image, if no layer has shown its order."""
        is_input = self.layout.is_open and self.layout.possible is not None
        return is_input and len(self.axes) > 3 and len(self.used) > 2

    def is_as_in_keras(self) -> bool:
        """Returns True if PyTorch is known to have the axes in the same order."""
        return self.layout.known == tuple(place.find() for place in self.used)


def entries(tensors: Sequence[TensorAxes], batch: Axis) -> list[Axis]:
    """Returns the axes of tensors that are not of size 1, without the axis of the examples."""
    return [axis for tensor in tensors for axis in tensor.entries if axis is not batch]


def made(
    axes: Sequence[Axis | None],
    reason: str,
    order: Sequence[int] | None = None,
    *,
    natural: Sequence[int] | None = None,
    is_contradictory: bool = False,
    is_sequence: bool = False,
) -> TensorAxes:
    """Returns a tensor with new places.

    Args:
        axes: The axes.
        reason: Clause that says why the order of the axes is unknown, if it is.
        order: Numbers of the axes in PyTorch's order. Default None: the order is unknown.
        natural: Numbers of axes that PyTorch has in this order among each other. Default None: all
            axes but the last.
        is_contradictory, is_sequence: As in `Layout`.
    """
    places = tuple(None if axis is None else Place() for axis in axes)
    used = [place for place in places if place is not None]
    known = None
    if order is not None:
        known = [tuple(places[number] for number in order if places[number] is not None)]
    elif len(used) < 2:
        known = [tuple(used)]
    layout = Layout(
        known,  # type: ignore[arg-type]
        reason=reason,
        natural=used[:-1] if natural is None else [p for n in natural if (p := places[n])],
        is_contradictory=is_contradictory and len(used) > 2,
        is_sequence=is_sequence,
    )
    return TensorAxes(tuple(axes), places, layout)


def natural_numbers(tensor: TensorAxes, order: Sequence[int]) -> list[int]:
    """Returns the numbers of axes that PyTorch has in Keras's order among each other.

    Args:
        tensor: The tensor before a permutation.
        order: For each axis after it, its number before.
    """
    natural = tensor.layout.natural
    of_place = {place.find(): n for n, place in enumerate(tensor.places) if place is not None}
    before = [of_place[place] for place in natural if place in of_place]
    found = [n for n, old in enumerate(order) if old in before]
    return found if [order[n] for n in found] == [old for old in before if old in order] else []


def like(
    tensor: TensorAxes,
    axes: Sequence[Axis | None],
    reason: str = "",
    *,
    order: Sequence[int] | None = None,
    is_contradictory: bool = False,
) -> TensorAxes:
    """Returns a tensor with an unknown order of axes.

    The order is contradictory if the order of another tensor is contradictory.

    Args:
        tensor: The other tensor.
        axes: The axes.
        reason: As in `made`. Default "": the reason of the other tensor.
        order: For each axis, its number in the other tensor. Default None: the same axes.
        is_contradictory: bool. True if the order is contradictory anyway. Default False.
    """
    layout = tensor.layout
    return made(
        axes,
        layout.reason if layout.is_contradictory or not reason else reason,
        natural=natural_numbers(tensor, order or range(len(axes))),
        is_contradictory=is_contradictory or layout.is_contradictory,
        is_sequence=layout.is_sequence,
    )


def in_order(axes: Sequence[Axis | None], reason: str = "") -> TensorAxes:
    """Returns a tensor whose axes PyTorch has in the same order."""
    return made(axes, reason, range(len(axes)))


def appended(tensor: TensorAxes, new: Sequence[Axis | None]) -> TensorAxes:
    """Returns a tensor that has a vector or a matrix in place of each number, as from a table.

    Args:
        tensor: The tensor of numbers.
        new: The axes of the vector or matrix.
    """
    axes = (*tensor.axes, *new)
    natural = tuple(place.find() for place in tensor.used)
    if tensor.layout.arrangement(natural) != natural:
        return like(tensor, axes)
    if len(tensor.used) + len(new) > 3:  # PyTorch's model may permute it, as an image
        if tensor.layout.is_open and tensor.layout.allows(natural):
            tensor.layout.restrict({natural}, "a grid of numbers has Keras's order in PyTorch too")
        reason = "PyTorch's model may have the channels of the image first"
        return made(axes, reason, natural=range(len(tensor.axes)))
    return in_order(axes)


def with_unknown_axes(
    shape: Sizes, reason: str, batch: Axis | None = None, *, is_doubted: bool = True
) -> TensorAxes:
    """Returns a tensor of which nothing is known.

    Args:
        shape: Its shape.
        reason: Clause that says why.
        batch: Axis of the examples, if the first axis is this axis. Default None.
        is_doubted: bool. True if the order of each axis is unknown too. Default True.
    """
    doubt = reason if is_doubted else None
    axes: list[Axis | None] = [None if size == 1 else Axis(size, doubt=doubt) for size in shape]
    if batch is not None and shape and shape[0] == batch.size:
        axes[0] = batch
    return made(axes, reason, natural=())


def permuted(tensor: TensorAxes, order: Sequence[int], name: str) -> TensorAxes:
    """Returns a tensor after a permutation of its axes.

    The order is known if PyTorch has the axes in the same order before it, and the features stay
    last, or if the permutation makes Keras's order equal to PyTorch's. Otherwise PyTorch's model
    may have the permutation, or not.

    Args:
        tensor: The tensor.
        order: For each axis of the result, its number before.
        name: Name of the layer or operation.
    """
    axes = tuple(tensor.axes[number] for number in order)
    places = tuple(tensor.places[number] for number in order)
    used = tuple(place.find() for place in places if place is not None)
    if used == tuple(place.find() for place in tensor.used):
        return TensorAxes(axes, places, tensor.layout)
    if tensor.layout.known == used:
        return in_order(axes)
    is_input = tensor.layout.is_open and tensor.layout.possible is not None
    if is_input and len(order) > 3 and list(order) == [0, *range(2, len(order)), 1]:
        # The input has PyTorch's order.
        return made(axes, "", (0, len(order) - 1, *range(1, len(order) - 1)))
    keeps_last = _last_used(order, tensor) == _last_used(range(len(order)), tensor)
    natural = tuple(place.find() for place in tensor.used)
    is_moved = keeps_last and order[0] != 0 and len(tensor.used) < 4 and tensor.layout.possible
    if is_moved and tensor.layout.is_open and tensor.layout.allows(natural):
        # The features are last in PyTorch too, in a model that moves the axis of the examples.
        tensor.layout.restrict({natural}, f"'{name}' moves the axis of the examples")
    if tensor.is_as_in_keras() and keeps_last:
        return in_order(axes)
    reason = f"the model does not show whether PyTorch's model permutes like '{name}'"
    if len(order) in (4, 5) and order[0] == 0 and order[-1] == len(order) - 1:
        reason = f"{MAY_EXCHANGE} '{name}'"
    if order[0] != 0:
        reason = f"'{name}' moves the axis of the examples"
    is_image = tensor.layout.known is not None and not tensor.is_as_in_keras()
    return like(tensor, axes, reason, order=order, is_contradictory=is_image)


def _last_used(order: Sequence[int], tensor: TensorAxes) -> int | None:
    """Returns the number of the last axis in an order that is not of size 1."""
    return next((n for n in reversed(order) if tensor.axes[n] is not None), None)


def selected(
    tensor: TensorAxes, numbers: Sequence[int | None], changed: dict[int, Axis | None]
) -> TensorAxes:
    """Returns a tensor with some of the axes, in the same order, and with new axes of size 1.

    Args:
        tensor: The tensor.
        numbers: For each axis of the result, its number before; None for a new axis of size 1.
        changed: By the number before: axes that have other entries now.
    """
    axes = [
        None if number is None else changed.get(number, tensor.axes[number]) for number in numbers
    ]
    places = [None if number is None else tensor.places[number] for number in numbers]
    places = [None if axis is None else place for axis, place in zip(axes, places, strict=True)]
    if {place for place in places if place} == set(tensor.used):
        return TensorAxes(tuple(axes), tuple(places), tensor.layout)
    if tensor.is_image_of_caller() and len([place for place in places if place]) == 3:
        # A layer on a row of an image does not show the order of the image.
        return TensorAxes(tuple(axes), tuple(places), Layout(None, reason=tensor.layout.reason))
    return TensorAxes(tuple(axes), tuple(places), _projected(tensor.layout, places))


def _projected(layout: Layout, places: Sequence[Place | None]) -> Layout:
    """Returns the layout of a tensor with some of the places."""
    kept = {place.find() for place in places if place is not None}
    possible = layout.possible
    found = None if possible is None else {tuple(p for p in each if p in kept) for each in possible}
    if len(kept) < 2:
        found = {tuple(kept)}
    is_contradictory = layout.is_contradictory and len(kept) > 2
    return Layout(
        found,
        reason=layout.reason,
        natural=[place for place in layout.natural if place in kept],
        is_contradictory=is_contradictory,
        is_sequence=layout.is_sequence,
    )


def has_natural_order(axes: Sequence[Axis | None]) -> bool:
    """Returns True for a vector, a sequence, or an image with one channel, without other layers."""
    used = [axis for axis in axes if axis is not None]
    return len(used) < 4 and (len(axes) < 4 or axes[-1] is None)


def opened(
    axes: Sequence[Axis | None], name: str, *, is_sequence_of_parts: bool = False
) -> TensorAxes:
    """Returns a tensor that features become. Later layers show the order of its axes.

    Args:
        axes: The axes.
        name: Name of the layer or operation.
        is_sequence_of_parts: bool. True if the last axis of a sequence was divided, so that the
            tensor may be an image, but also heads of attention. Default False.
    """
    places = tuple(None if axis is None else Place() for axis in axes)
    used = tuple(place for place in places if place is not None)
    shape = tuple(1 if axis is None else axis.size for axis in axes)
    if axes[0] is None and len(used) > 2:  # without a batch, an image has one axis less
        return made(axes, f"'{name}' makes an image of {example_of(shape)}", is_contradictory=True)
    default = used if has_natural_order(axes) else None
    only = None  # an image, which PyTorch's model makes with the channels first
    if default is None and not is_sequence_of_parts and places[-1] is not None:
        only = (used[0], used[-1], *used[1:-1])
    layout = Layout(
        None,
        reason=f"'{name}' makes an image of {example_of(shape)}",
        default=default,
        only=only,
        is_open=True,
        natural=used[:-1],
    )
    return TensorAxes(tuple(axes), places, layout)


def example_of(shape: Sizes) -> Sizes:
    """Returns the shape of an example."""
    return tuple(shape[1:])
