"""Axes that operations make of others: merged, joined, and in other ways."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tfwd.pretrained.flatten_order.axes import Axis, Orders, joined_sizes, order_in, rows_of
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout, Place
from tfwd.pretrained.flatten_order.orders import (
    CHANGES_FEATURES,
    IS_PART,
    FeatureOrder,
    JoinedFeatures,
    JoinedPart,
    UnknownFeatureOrder,
    flattened_axes,
)


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
            reason = getattr(order, "reason", IS_PART)
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

    def merged_sizes(self) -> tuple[int, ...]:
        return joined_sizes(
            axis.merged_sizes() if isinstance(axis, MergedAxis) else (axis.size,)
            for axis in (source.find() for source in self.sources)
        )

    def find_order(self, known: Orders) -> FeatureOrder:
        own = super().find_order(known)
        if isinstance(own, UnknownFeatureOrder):
            return own
        merged = self._merged_order(known)
        if own is None or rows_of(own) == rows_of(merged):
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
        is_shown = self.layout.arrangement(self.places) is not None
        if is_shown and self.layout.are_neighbours(self.places):
            order = order_in(self.sources, self.places, self.layout)
            if order is not None and self._is_sequence_of_input():
                return UnknownFeatureOrder(
                    "the model does not show whether PyTorch's model permutes its input, a "
                    "sequence, before or after it flattens it"
                )
            return order
        are_two = self._has_parts_only() and len(self.sources) < 3  # more may be an image
        if are_two and not any(map(known.of, self._all_wholes())):
            return None
        if not self.layout.are_neighbours(self.places):
            is_known = self.layout.known is not None
            return UnknownFeatureOrder(self._reason if is_known else self.layout.reason)
        return order_in(self.sources, self.places, self.layout)

    def needed(self) -> Iterable[Axis]:
        return [*super().needed(), *(self._all_wholes() if self._has_parts_only() else ())]

    @property
    def wholes(self) -> set[Axis]:
        return self._all_wholes() if self.is_part else {self}

    @property
    def is_part(self) -> bool:
        return self._has_parts_only()

    def _is_sequence_of_input(self) -> bool:
        """Returns True for the steps and features of a sequence that the caller gives.

        The convolutions of a model show PyTorch's order. But PyTorch's model may take the sequence
        in Keras's order, and permute it before the convolutions.
        """
        return len(self.sources) == 2 and all(map(_is_given, self.sources))

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


def _is_given(axis: Axis) -> bool:
    """Returns True for an axis of the model's input, for a part of it, and for a join with it."""
    found = axis.find()
    parts = found.sources if isinstance(found, MadeAxis) else [found]
    return any(part.find().is_input for part in parts)


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
        parts = self._parts(known)
        if own is None and not any(part.order for part in parts):
            return None
        if own is not None:
            return UnknownFeatureOrder(
                f"'{self._name}' joins the outputs with others, before they become an image"
            )
        return JoinedFeatures(tuple((part.size, part.order) for part in parts))  # type: ignore[misc]

    def joined_parts(self, known: Orders) -> tuple[JoinedPart, ...]:
        """Returns the parts if the order of one is unknown, and nothing else is; () otherwise."""
        if self.size is None or super().find_order(known) is not None:
            return ()
        parts = tuple(self._parts(known))
        return parts if any(part.is_unknown for part in parts) else ()

    def _parts(self, known: Orders) -> list[JoinedPart]:
        """Returns the parts. A part that was joined itself is divided into its own parts."""
        found: list[JoinedPart] = []
        for part in (source.find() for source in self.sources):
            order = known.of(part)
            inner: tuple[JoinedPart, ...] = ()
            if isinstance(part, JoinedAxis) and isinstance(order, UnknownFeatureOrder):
                inner = part.joined_parts(known)
            if isinstance(order, JoinedFeatures):
                found += [JoinedPart(size, each, ()) for size, each in order.parts]
            elif inner:
                found += inner
            else:
                found.append(JoinedPart(part.size or 0, order, part.merged_sizes()))
        return found


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


def _nested_order(
    parts: Sequence[Axis],
    orders: Sequence[FeatureOrder],
    places: Sequence[Place],
    layout: Layout,
    name: str,
) -> FeatureOrder:
    """Returns the order of merged axes, some of which have another order than in PyTorch."""
    unknown = UnknownFeatureOrder(f"'{name}' {CHANGES_FEATURES}")
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
