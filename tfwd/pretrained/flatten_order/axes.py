"""Axes of tensors: what their entries are, and where PyTorch has them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

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


class Axis:
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
        self.size = size
        self.is_input = is_input
        self.doubt = doubt
        self.is_repetition = is_repetition
        self.divisions: list[Division] = []
        self.uses: list[MadeAxis] = []  # axes that were made of this one
        self._owners = [] if owner is None else [owner]
        self._same: Axis | None = None

    def find(self) -> Axis:
        """Returns the one axis that stands for all that have the same entries."""
        axis = self
        while axis._same is not None:
            axis = axis._same
        return axis

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

    def join(self, other: Axis) -> None:
        """Makes two axes the same."""
        mine, others = self.find(), other.find()
        if mine is others:
            return
        others._same = mine
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
        distinct = {_rows(order): order for order in orders}
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
    """

    def __init__(
        self,
        parts: Sequence[Axis],
        places: Sequence[Place],
        layout: Layout,
        is_whole: bool,
        name: str,
    ) -> None:
        self.parts, self.is_whole, self._name = tuple(parts), is_whole, name
        self._places, self._order_of_places = tuple(places), layout
        # A later layer can make the order contradictory only if it was not.
        self._was_contradictory = layout.is_contradictory

    def order(self, known: Orders) -> FeatureOrder:
        """Returns the order of the divided axis, which later layers on the parts show."""
        if unknown := known.first_unknown(self.parts):
            return unknown
        if any(map(known.of, self.parts)):
            return UnknownFeatureOrder(f"its outputs become an image after '{self._name}'")
        layout = self._order_of_places
        is_contradicted = layout.is_contradictory and not self._was_contradictory
        if self.is_whole or layout.is_restricted or is_contradicted:
            order = _order_in(self.parts, self._places, layout)
            if order is None or self.is_whole or self._is_at_end():
                return order
            return UnknownFeatureOrder(f"its outputs become an image after '{self._name}'")
        return None

    def _is_at_end(self) -> bool:
        """Returns True if PyTorch has the parts behind all other axes, as after a `view`."""
        places = {place.find() for place in self._places}
        possible = self._order_of_places.possible or ()
        ends = [set(each[1:][-len(places) :]) for each in possible]
        return bool(ends) and all(end == places for end in ends)


class MadeAxis(Axis):
    """An axis that an operation made of other axes.

    Args:
        size: As in `Axis`.
        sources: The other axes.
    """

    def __init__(self, size: int | None, sources: Sequence[Axis]) -> None:
        super().__init__(size)
        self.sources = tuple(sources)
        for source in dict.fromkeys(each.find() for each in sources):
            source.uses.append(self)

    def holds_input(self) -> bool:
        return any(source.holds_input() for source in self.sources)

    def doubts(self, reason: str, *, of_sources: bool = False) -> None:
        super().doubts(reason)
        for source in self.sources if of_sources else ():
            source.doubts(reason, of_sources=True)

    def needed(self) -> Iterable[Axis]:
        return [*super().needed(), *self.sources]

    def required(self, known: Orders) -> FeatureOrder:
        """Returns the order that later layers require, which the sources cannot have."""
        found = [division.order(known) for division in self.divisions]
        return next((order for order in found if order is not None), None)

    def mark_sources(self, known: Orders) -> bool:
        """Marks the sources if later layers require an order that differs from theirs.

        Args:
            known: Orders of the axes in `needed`.

        Returns:
            True if a source was not marked before.
        """
        order = self.required(known)
        unmarked = [source for source in self.sources if source.find().doubt is None]
        for source in unmarked if order is not None else ():
            reason = getattr(order, "reason", "a part of its outputs becomes an image")
            source.find().doubts(reason, of_sources=True)
        return bool(unmarked) and order is not None


class MergedAxis(MadeAxis):
    """An axis that a reshape made of several axes.

    Args:
        parts: The axes, in Keras's order.
        places, layout: Places of the parts in the tensor before the reshape.
        name: str. Name of the layer or operation that merges.
        reason: str. Clause that says why the order is unknown, if PyTorch has other neighbours.
    """

    def __init__(
        self,
        parts: Sequence[Axis],
        places: Sequence[Place],
        layout: Layout,
        name: str,
        reason: str,
    ) -> None:
        sizes = [part.size for part in parts]
        super().__init__(None if None in sizes else math.prod(sizes), parts)  # type: ignore[arg-type]
        self.places, self.layout = tuple(places), layout
        self._name, self._reason = name, reason

    def find_order(self, known: Orders) -> FeatureOrder:
        own = super().find_order(known)
        if isinstance(own, UnknownFeatureOrder):
            return own
        merged = self._merged_order(known)
        if own is None or _rows(own) == _rows(merged):
            return merged
        if isinstance(merged, UnknownFeatureOrder):
            return merged
        return UnknownFeatureOrder(f"'{self._name}' merges axes that are divided in another way")

    def _merged_order(self, known: Orders) -> FeatureOrder:
        if unknown := known.first_unknown(self.sources):
            return unknown
        orders = list(map(known.of, self.sources))
        if any(orders):
            return _nested_order(self.sources, orders, self.places, self.layout, self._name)
        if self._has_parts_only() and not any(map(known.of, self._all_wholes())):
            return None
        if not self.layout.are_neighbours(self.places):
            is_known = self.layout.known is not None
            return UnknownFeatureOrder(self._reason if is_known else self.layout.reason)
        return _order_in(self.sources, self.places, self.layout)

    def needed(self) -> Iterable[Axis]:
        return [*super().needed(), *(self._all_wholes() if self._has_parts_only() else ())]

    @property
    def wholes(self) -> set[Axis]:
        return self._all_wholes() if self.is_part else {self}

    @property
    def is_part(self) -> bool:
        return self._has_parts_only()

    def _several(self) -> list[Axis]:
        """Returns the axes whose entries differ."""
        return [source.find() for source in self.sources if not source.find().is_repetition]

    def _all_wholes(self) -> set[Axis]:
        """Returns the axes of which the axes are parts."""
        return set[Axis]().union(*(part.wholes for part in self._several()))

    def _has_parts_only(self) -> bool:
        """Returns True if the axes are parts of others, as the heads of attention.

        PyTorch's model then has the same parts, if it has the others in the same order.
        """
        several = self._several()
        is_distinct = len(set(several)) == len(several)
        return bool(several) and is_distinct and all(part.is_part for part in several)


class JoinedAxis(MadeAxis):
    """An axis that a concatenation made of several axes.

    Args:
        parts: The axes.
        name: str. Name of the layer or operation that joins.
    """

    def __init__(self, parts: Sequence[Axis], name: str) -> None:
        sizes = [part.size for part in parts]
        super().__init__(None if None in sizes else sum(sizes), parts)  # type: ignore[arg-type]
        self._name = name

    def find_order(self, known: Orders) -> FeatureOrder:
        own = super().find_order(known)
        if isinstance(own, UnknownFeatureOrder):
            return own
        if unknown := known.first_unknown(self.sources):
            return unknown
        orders = list(map(known.of, self.sources))
        if own is None and not any(orders):
            return None
        if own is not None:
            return UnknownFeatureOrder(
                f"'{self._name}' joins the outputs with others, before they become an image"
            )
        found: list[tuple[int, FlattenedAxes | None]] = []
        for part, order in zip(self.sources, orders, strict=True):
            if isinstance(order, JoinedFeatures):
                found += order.parts
            elif isinstance(order, FlattenedAxes) or order is None:
                found.append((part.size or 0, order))
        return JoinedFeatures(tuple(found))


class DependentAxis(MadeAxis):
    """An axis whose entries come from other axes, by an operation that may not know their order.

    Its order is PyTorch's only if the order of these axes is.

    Args:
        size, sources: As in `MadeAxis`.
        reason: str. Clause that says why the order is unknown, if it is.
    """

    def __init__(self, size: int | None, sources: Sequence[Axis], reason: str) -> None:
        super().__init__(size, sources)
        self._reason = reason

    def find_order(self, known: Orders) -> FeatureOrder:
        own = super().find_order(known)
        if unknown := known.first_unknown(self.sources):
            return unknown
        return UnknownFeatureOrder(self._reason) if any(map(known.of, self.sources)) else own

    @property
    def has_chosen_entries(self) -> bool:
        return True

    def required(self, known: Orders) -> FeatureOrder:
        return Axis.find_order(self, known)


def _rows(order: FeatureOrder) -> object:
    """Returns a value that is the same for equal orders."""
    return order.rows if isinstance(order, (FlattenedAxes, JoinedFeatures)) else order


def dependent_axis(size: int | None, sources: Sequence[Axis | None], reason: str) -> Axis:
    """Returns a `DependentAxis` of the sources that are not of size 1, which are None."""
    return DependentAxis(size, [axis for axis in sources if axis is not None], reason)


def with_uses(axes: Iterable[Axis]) -> list[MadeAxis]:
    """Returns the axes that were made of some axes, or of their parts."""
    waiting, seen = [axis.find() for axis in axes], set[Axis]()
    while waiting:
        axis = waiting.pop()
        if axis not in seen:
            seen.add(axis)
            waiting += [each.find() for each in axis.uses]
            waiting += [part.find() for each in axis.divisions for part in each.parts]
    return [axis for axis in seen if isinstance(axis, MadeAxis)]


def same_order(first: FeatureOrder, second: FeatureOrder) -> bool:
    """Returns True if two orders are known and equal."""
    if isinstance(first, UnknownFeatureOrder) or isinstance(second, UnknownFeatureOrder):
        return False
    return _rows(first) == _rows(second)


def _order_in(
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


def _nested_order(
    parts: Sequence[Axis],
    orders: Sequence[FeatureOrder],
    places: Sequence[Place],
    layout: Layout,
    name: str,
) -> FeatureOrder:
    """Returns the order of merged axes, some of which have another order than in PyTorch."""
    unknown = UnknownFeatureOrder(f"'{name}' changes flattened features")
    arrangement = layout.arrangement(places)
    if arrangement is None or not layout.are_neighbours(places):
        return UnknownFeatureOrder(layout.reason) if layout.reason else unknown
    sizes: list[int] = []
    positions: list[tuple[int, int]] = []
    for part, order, place in zip(parts, orders, places, strict=True):
        if isinstance(order, JoinedFeatures) or part.size is None:
            return unknown
        number = arrangement.index(place.find())
        inner = (part.size,) if order is None else order.shape  # type: ignore[union-attr]
        inside = (0,) if order is None else order.positions  # type: ignore[union-attr]
        sizes += inner
        positions += [(number, position) for position in inside]
    ranks = sorted(positions)
    return flattened_axes(tuple(sizes), [ranks.index(position) for position in positions])
