"""Axes of tensors: what their entries are, and where PyTorch has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfwd.pretrained.flatten_order.joinable import Joinable
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout, Place
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    UnknownFeatureOrder,
    flattened_axes,
)


class Orders:
    """Orders of axes relative to PyTorch. Each is found once, so no call may change them later."""

    def __init__(self) -> None:
        self._found: dict[Axis, FeatureOrder] = {}

    def of(self, axis: Axis) -> FeatureOrder:
        """Returns the order of an axis. Chains of axes may be long, so this does not recurse."""
        waiting = [axis.find()]
        while waiting:
            present = waiting[-1]
            missing = [a for each in present.needed() if (a := each.find()) not in self._found]
            if present in self._found or not missing:
                waiting.pop()
                if present not in self._found:
                    self._found[present] = present.find_order(self)
            else:
                waiting += missing
        return self._found[axis.find()]

    def first_unknown(self, axes: Iterable[Axis]) -> UnknownFeatureOrder | None:
        """Returns the order of the first axis whose order is unknown, or None."""
        orders = map(self.of, axes)
        return next((order for order in orders if isinstance(order, UnknownFeatureOrder)), None)


class Axis(Joinable):
    """An axis that a layer, or the model's input, has as one.

    Args:
        size: int. None if it varies.
        is_input: bool. True if the caller of the model gives its entries. Default False.
        owner: The axis that was divided into it and others. Default None.
        doubt: str. Clause that says why its order is unknown. Default None.
        is_repetition: bool. True if all its entries are equal. Default False.
    """

    def __init__(
        self,
        size: int | None,
        *,
        is_input: bool = False,
        is_repetition: bool = False,
        owner: Axis | None = None,
        doubt: str | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.is_input = is_input
        self.doubt = doubt
        self.is_repetition = is_repetition
        self.divisions: list[Division] = []
        self.uses: list[Axis] = []  # axes that were made of this one
        self._owners = [] if owner is None else [owner]

    @property
    def owners(self) -> list[Axis]:
        """Returns the axes that were divided into this axis and others."""
        return [owner.find() for owner in self.find()._owners]

    @property
    def wholes(self) -> set[Axis]:
        """Returns the axes of which this axis is a part, and which are no parts themselves."""
        owners = self.owners
        return set[Axis]().union(*(owner.wholes for owner in owners)) if owners else {self.find()}

    @property
    def is_part(self) -> bool:
        """Returns True if the axis is a part of another one."""
        return bool(self.owners)

    @property
    def has_chosen_entries(self) -> bool:
        """Returns True if PyTorch may have other entries, not only another order of them."""
        return self.doubt is not None

    def become_part_of(self, whole: Axis) -> None:
        """Makes the axis a part of another one."""
        self._owners.append(whole)

    def doubts(self, reason: str, *, of_sources: bool = False) -> None:
        """Marks the order of the entries as unknown.

        Args:
            reason: Clause that says why.
            of_sources: bool. True to mark the axes too of which it was made. Default False.
        """
        del of_sources
        axis = self.find()
        axis.doubt = axis.doubt or reason

    def holds_input(self) -> bool:
        """Returns True if the caller of the model gives the entries, or some of them."""
        return self.find().is_input

    def merged_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the axes that a reshape merged into this one; () if none did."""
        return ()

    def divided_sizes(self) -> tuple[int, ...]:
        """Returns the sizes of the axes that a reshape makes of this one; () if none does."""
        if not self.divisions:
            return ()
        sizes = joined_sizes(
            part.find().divided_sizes() or (part.size,) for part in self.divisions[0].parts
        )
        return sizes if len(self.divisions) == 1 else ()

    def join(self, other: Axis) -> None:
        """Makes two axes the same."""
        mine, others = self.find(), other.find()
        if not self.become_one_with(other):
            return
        mine.divisions += others.divisions
        mine.uses += others.uses
        mine.is_repetition &= others.is_repetition
        mine._owners += others._owners
        mine.doubt = mine.doubt or others.doubt
        mine.is_input = mine.is_input or others.is_input

    def order(self) -> FeatureOrder:
        """Returns the order of the entries relative to PyTorch, as far as it is known now."""
        return Orders().of(self)

    def needed(self) -> Iterable[Axis]:
        """Returns the axes on whose orders the order depends."""
        return [part for division in self.divisions for part in division.parts]

    def find_order(self, known: Orders) -> FeatureOrder:
        """Returns the order of the entries relative to PyTorch.

        Args:
            known: Orders of the axes in `needed`.
        """
        if self.doubt is not None:
            return UnknownFeatureOrder(self.doubt)
        orders = [division.order(known) for division in self.divisions]
        distinct = {rows_of(order): order for order in orders}
        if len(distinct) > 1:
            unknown = [order for order in orders if isinstance(order, UnknownFeatureOrder)]
            reason = "its outputs become an image, and other layers use them too"
            return unknown[0] if unknown else UnknownFeatureOrder(reason)
        order = next(iter(distinct.values()), None)
        if isinstance(order, FlattenedAxes) and self.is_input:
            return UnknownFeatureOrder("the model makes an image of its input")
        return order


class Division:
    """A reshape that divides an axis into parts.

    Args:
        parts: The parts, in Keras's order.
        places, layout: Places of the parts in the tensor after the reshape.
        is_whole: bool. True if the tensor has no other axes, except the batch.
        name: str. Name of the layer or operation.
        is_of_image: bool. True if PyTorch has another order of axes before the reshape, so that the
            divided axis are the channels of an image. Default False.
    """

    def __init__(
        self,
        parts: Sequence[Axis],
        places: Sequence[Place],
        layout: Layout,
        is_whole: bool,
        name: str,
        is_of_image: bool = False,
    ) -> None:
        self.parts, self.is_whole, self._name = tuple(parts), is_whole, name
        self.is_of_image = is_of_image
        self._places, self.layout = tuple(places), layout
        # A later layer can make the order contradictory only if it was not.
        self._was_contradictory = layout.is_contradictory

    def order(self, known: Orders) -> FeatureOrder:
        """Returns the order of the divided axis, which later layers on the parts show."""
        if unknown := known.first_unknown(self.parts):
            return unknown
        if any(map(known.of, self.parts)):
            return UnknownFeatureOrder(f"its outputs become an image after '{self._name}'")
        layout = self.layout
        is_contradicted = layout.is_contradictory and not self._was_contradictory
        if self.is_whole or layout.is_restricted or is_contradicted:
            order = order_in(self.parts, self._places, layout)
            if order is None or self.is_whole or self._is_at_end():
                return order
            return UnknownFeatureOrder(f"its outputs become an image after '{self._name}'")
        return None

    def _is_at_end(self) -> bool:
        """Returns True if PyTorch has the parts behind all other axes, as after a `view`."""
        places = {place.find() for place in self._places}
        possible = self.layout.possible or ()
        ends = [set(each[1:][-len(places) :]) for each in possible]
        return bool(ends) and all(end == places for end in ends)


def joined_sizes(parts: Iterable[Sequence[int | None]]) -> tuple[int, ...]:
    """Returns the sizes of several parts one after another; () if a size varies."""
    sizes = [size for part in parts for size in part]
    return () if None in sizes else tuple(sizes)  # type: ignore[arg-type]


def rows_of(order: FeatureOrder) -> object:
    """Returns a value that is the same for equal orders."""
    return order.rows if isinstance(order, (FlattenedAxes, JoinedFeatures)) else order


def same_order(first: FeatureOrder, second: FeatureOrder) -> bool:
    """Returns True if two orders are known and equal."""
    if isinstance(first, UnknownFeatureOrder) or isinstance(second, UnknownFeatureOrder):
        return False
    return rows_of(first) == rows_of(second)


def order_in(
    parts: Sequence[Axis], places: Sequence[Place], layout: Layout
) -> FlattenedAxes | UnknownFeatureOrder | None:
    """Returns the order of axes in a layout, if each of them has PyTorch's order."""
    arrangement = layout.arrangement(places)
    if arrangement is None:
        return UnknownFeatureOrder(layout.reason)
    positions = [arrangement.index(place.find()) for place in places]
    if positions == sorted(positions):
        return None
    sizes = [part.size for part in parts]
    if None in sizes:
        return UnknownFeatureOrder("the model flattens a size that varies")
    return flattened_axes(tuple(sizes), positions)  # type: ignore[arg-type]
