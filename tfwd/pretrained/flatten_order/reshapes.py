"""Reshapes of tensors: they merge axes, divide them, or add and remove axes of size 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfwd.pretrained.flatten_order.axes import Axis, Division
from tfwd.pretrained.flatten_order.layouts_in_torch import Arrangement, Layout, Place
from tfwd.pretrained.flatten_order.made_axes import MergedAxis
from tfwd.pretrained.flatten_order.orders import IS_RESHAPE, UnknownFeatureOrder
from tfwd.pretrained.flatten_order.pixel_shuffles import doubt_shuffled_channels
from tfwd.pretrained.flatten_order.tensor_axes import (
    Sizes,
    TensorAxes,
    example_of,
    in_order,
    opened,
    selected,
    with_unknown_axes,
)


class _Unit:
    """A factor of an axis, in a reshape.

    Attributes:
        axis: The factor.
        source: Number of the axis of the tensor that it is a factor of.
    """

    def __init__(self, axis: Axis, source: int) -> None:
        self.axis, self.source = axis, source


def reshaped(tensor: TensorAxes, shape: Sizes, name: str, batch: Axis) -> TensorAxes:
    """Returns a tensor after a reshape.

    Args:
        tensor: The tensor.
        shape: Shape of the result.
        name: Name of the layer or operation.
        batch: Axis of the examples.
    """
    groups = _divided(tensor, shape)
    if groups is None or _regroups_flattened(tensor, groups):
        sizes = f"from {example_of(tensor.sizes)} to {example_of(shape)}"
        reason = f"'{name}' {IS_RESHAPE} {sizes}"
        return with_unknown_axes(shape, reason, batch)
    if all(
        len(group) == 1 and group[0].axis is tensor.axes[group[0].source]
        for group in groups
        if group
    ):  # only axes of size 1 change
        numbers = [group[0].source if group else None for group in groups]
        return selected(tensor, numbers, {})
    return _Reshape(tensor, groups, name, batch).result()


def _divided(tensor: TensorAxes, shape: Sizes) -> list[list[_Unit]] | None:
    """Divides the factors of a tensor's axes into the axes of a reshaped tensor.

    Returns:
        The factors of each axis of the result. None if an axis does not consist of whole factors.
    """
    waiting = [_Unit(axis, n) for n, axis in enumerate(tensor.axes) if axis is not None]
    groups: list[list[_Unit]] = []
    for size in shape:
        group: list[_Unit] = []
        rest = size
        while rest != 1:
            if not waiting:
                return None
            unit = waiting.pop(0)
            own = unit.axis.size
            if own == rest and (own is not None or not group):
                group.append(unit)
                rest = 1
            elif own is None or rest is None:
                return None
            elif rest % own == 0:
                group.append(unit)
                rest //= own
            elif isinstance(unit.axis.find(), MergedAxis):
                parts = unit.axis.find().sources  # type: ignore[attr-defined]
                waiting = [_Unit(part, unit.source) for part in parts] + waiting
            elif own % rest == 0:
                first, second = (Axis(n, owner=unit.axis) for n in (rest, own // rest))
                waiting.insert(0, _Unit(second, unit.source))
                group.append(_Unit(first, unit.source))
                rest = 1
            else:
                return None
        groups.append(group)
    return None if waiting else groups


def _regroups_flattened(tensor: TensorAxes, groups: list[list[_Unit]]) -> bool:
    """Returns True if a reshape divides a flattened image into axes that the image does not have.

    A `view` to the same shape has other entries in PyTorch, where the features have another order.
    """
    features = tensor.entries[-1] if len(tensor.used) == 2 else None
    others = [group for group in groups if group and group[0].axis is not tensor.axes[0]]
    is_divided = len(others) > 1 and any(len(group) > 1 for group in others)
    return is_divided and isinstance(features, MergedAxis) and features.order() is not None


class _Reshape:
    """A reshape that merges or divides axes.

    Args:
        tensor: The tensor.
        groups: The factors of each axis of the result.
        name, batch: As in `reshaped`.
    """

    def __init__(
        self, tensor: TensorAxes, groups: list[list[_Unit]], name: str, batch: Axis
    ) -> None:
        self._tensor, self._groups, self._name, self._batch = tensor, groups, name, batch
        self._by_source: dict[int, list[_Unit]] = {}
        for group in groups:
            for unit in group:
                self._by_source.setdefault(unit.source, []).append(unit)
        # Places of the factors before the reshape, and the layout of all factors.
        self._places: dict[_Unit, Place] = {}
        self._known = tensor.is_as_in_keras() and not any(axis.order() for axis in tensor.entries)
        self._of_all_factors = self._of_factors()
        self._misdivided = set(filter(self._divides_other_features, self._by_source))

    def result(self) -> TensorAxes:
        """Returns the axes of the result."""
        self._restrict_examples()
        merged = [self._merged(group) for group in self._groups]
        is_whole = self._is_division_of_features()
        if self._known and not is_whole:
            result = self._as_in_keras(merged)
        elif is_whole:
            result = opened(merged, self._name)
        else:
            result = self._kept(merged)
        self._register_divisions(result, is_whole)
        groups = [[unit.axis.find() for unit in group] for group in self._groups]
        doubt_shuffled_channels(groups, self._batch, self._name)
        return self._with_doubts(result)

    def _as_in_keras(self, merged: list[Axis | None]) -> TensorAxes:
        """Returns the tensor, if PyTorch has the same axes before the reshape.

        Later layers show the order if it has more axes, because it may be an image then.
        """
        used = [axis for axis in merged if axis is not None]
        if len(used) <= max(3, len(self._tensor.used)):
            return in_order(merged)
        return opened(merged, self._name, is_sequence_of_parts=True)

    def _restrict_examples(self) -> None:
        """Restricts the layout to those with the axes together that are merged with the batch."""
        tensor, first = self._tensor, self._groups[0]
        if len(first) < 2 or not tensor.has_batch(self._batch):
            return
        numbers = {unit.source for unit in first}
        places = {tensor.places[n].find() for n in numbers}  # type: ignore[union-attr]
        possible = tensor.layout.possible
        if possible is not None and numbers == set(range(len(numbers))):
            kept = {each for each in possible if set(each[: len(places)]) == places}
            tensor.layout.restrict(kept, self._reason())

    def _of_factors(self) -> Layout:
        """Returns the layout of the factors before they are merged."""
        tensor = self._tensor
        inside: dict[Place, tuple[Place, ...] | None] = {}
        for source, factors in self._by_source.items():
            place = tensor.places[source]
            assert place is not None
            if len(factors) == 1:
                self._places[factors[0]] = place
                inside[place.find()] = (place.find(),)
            else:
                self._places |= {factor: Place() for factor in factors}
                inside[place.find()] = self._order_inside(tensor.axes[source], factors)
        if all(order is not None and len(order) == 1 for order in inside.values()):
            return tensor.layout
        layout, possible = tensor.layout, tensor.layout.possible
        is_known = possible is not None and all(order is not None for order in inside.values())
        arrangements = [
            tuple(place for old in each for place in inside[old] or ())
            for each in (possible if possible is not None and is_known else ())
        ]
        return Layout(
            arrangements if is_known else None,
            reason=self._reason() if layout.known else layout.reason or self._reason(),
            natural=self._natural_factors(inside),
            is_contradictory=layout.is_contradictory,
            is_sequence=layout.is_sequence,
        )

    def _natural_factors(self, inside: dict[Place, tuple[Place, ...] | None]) -> list[Place]:
        """Returns the places of factors that PyTorch has in Keras's order among each other.

        Args:
            inside: For the place of each axis, the order in PyTorch of its factors, if it is known.
        """
        natural = set(self._tensor.layout.natural)
        found: list[Place] = []
        for source in sorted(self._by_source):
            place = self._tensor.places[source]
            factors = [self._places[unit] for unit in self._by_source[source]]
            if place is None or place.find() not in natural:
                continue
            is_other = self._is_restored(source) and inside[place.find()] != tuple(factors)
            found += [] if is_other else factors
        return found

    def _order_inside(self, axis: Axis | None, factors: list[_Unit]) -> tuple[Place, ...] | None:
        """Returns the order in PyTorch of the factors of one axis; None if it is not known."""
        if not isinstance(axis, MergedAxis):
            return tuple(self._places[factor] for factor in factors) if self._known else None
        order = axis.layout.arrangement(axis.places)
        is_whole = _is_made_of(axis, factors) and axis.layout.are_neighbours(axis.places)
        if order is None or not is_whole:
            return None
        new = {
            place.find(): self._places[factor]
            for place, factor in zip(axis.places, factors, strict=True)
        }
        return tuple(new[place] for place in order)

    def _reason(self) -> str:
        shape = tuple(math.prod(u.axis.size or 0 for u in g) for g in self._groups)
        return (
            f"'{self._name}' {IS_RESHAPE} between an image of {example_of(self._tensor.sizes)} and "
            f"{example_of(shape)}"
        )

    def _merged(self, group: list[_Unit]) -> Axis | None:
        """Returns the axis that some factors become."""
        axes = [unit.axis for unit in group]
        if not axes:
            return None
        if len(axes) == 1:
            return axes[0]
        sources = {unit.source for unit in group}
        if len(sources) == 1:
            whole = self._tensor.axes[group[0].source]
            if group == self._by_source[group[0].source]:
                return whole
        places = [self._places[unit] for unit in group]
        merged = merged_axis(axes, places, self._of_all_factors, self._name, self._reason())
        is_last = group is next(each for each in reversed(self._groups) if each)
        if is_last and self._groups[-1] is not group and not self._known:
            merged.doubts(self._reason())  # PyTorch's model may have parts of the channels last
        return merged

    def _is_division_of_features(self) -> bool:
        """Returns True if the tensor is a vector of features, of which an image may be made."""
        last = max(self._by_source, default=0)
        whole = self._tensor.axes[last]
        if whole is None or last == 0 or self._is_restored(last) or whole.order() is not None:
            return False
        before, after = self._groups[0], [unit for group in self._groups[1:] for unit in group]
        layout = self._tensor.layout
        if len(before) > 1 and layout.known is None and not layout.is_open:
            return False  # PyTorch's model may have moved the axes that become examples
        sources = {unit.source for unit in before}
        return (
            sources == set(self._by_source) - {last}
            and all(unit.axis is self._tensor.axes[unit.source] for unit in before)
            and len(after) > 1
            and all(unit.source == last for unit in after)
            and all(len(group) < 2 for group in self._groups[1:])
        )

    def _is_restored(self, source: int) -> bool:
        """Returns True if the factors of an axis are the axes that were merged to it."""
        axis = self._tensor.axes[source]
        return isinstance(axis, MergedAxis) and _is_made_of(axis, self._by_source[source])

    def _kept(self, merged: list[Axis | None]) -> TensorAxes:
        """Returns the tensor, with the order that PyTorch has if it merges the same axes."""
        places = tuple(None if axis is None else Place() for axis in merged)
        used = tuple(place for place in places if place is not None)
        if len(used) < 3:
            return TensorAxes(tuple(merged), places, Layout({used}, reason=""))
        before = self._of_all_factors
        arrangements = self._merged_arrangements(places)
        is_contradictory = before.is_contradictory
        if arrangements is not None and any(len(group) > 1 for group in self._groups[1:]):
            # PyTorch's model may move the channels to the end.
            is_contradictory |= used not in arrangements and not self._tensor.layout.is_open
            arrangements.add(used)
        layout = Layout(
            arrangements,
            reason=before.reason or self._reason(),
            natural=self._natural_places(places),
            is_contradictory=is_contradictory,
            is_sequence=before.is_sequence,
        )
        return TensorAxes(tuple(merged), places, layout)

    def _natural_places(self, places: Sequence[Place | None]) -> list[Place]:
        """Returns the result's places that PyTorch has in Keras's order among each other."""
        natural = set(self._of_all_factors.natural)
        return [
            place
            for group, place in zip(self._groups, places, strict=True)
            if place is not None and all(self._places[unit].find() in natural for unit in group)
        ]

    def _merged_arrangements(self, places: Sequence[Place | None]) -> set[Arrangement] | None:
        """Returns the arrangements of the result's places, if PyTorch merges the same axes.

        None if PyTorch has other axes between those that are merged.
        """
        before = self._of_all_factors
        merged_to: dict[Place, Place] = {}
        for group, place in zip(self._groups, places, strict=True):
            factors = [self._places[unit] for unit in group]
            if len(factors) > 1 and not before.are_neighbours(factors):
                return None
            if place is not None:
                merged_to |= {factor.find(): place for factor in factors}
        if before.possible is None:
            return None
        return {
            tuple(dict.fromkeys(merged_to[place] for place in each)) for each in before.possible
        }

    def _register_divisions(self, result: TensorAxes, is_whole: bool) -> None:
        """Notes the parts of each divided axis, whose order later layers may show."""
        numbers = {unit: n for n, group in enumerate(self._groups) for unit in group}
        for source, units in self._by_source.items():
            axis = self._tensor.axes[source]
            if len(units) < 2 or axis is None or self._is_restored(source):
                continue
            if source not in self._misdivided:
                places = [result.places[numbers[unit]] for unit in units]
                parts = [unit.axis for unit in units]
                known = self._tensor.layout.known
                division = Division(
                    parts,
                    places,  # type: ignore[arg-type]
                    result.layout,
                    is_whole,
                    self._name,
                    known is not None and not self._tensor.is_as_in_keras(),
                )
                axis.find().divisions.append(division)

    def _divides_other_features(self, source: int) -> bool:
        """Returns True if PyTorch divides an axis that has its features in another order."""
        axis = self._tensor.axes[source]
        is_divided = len(self._by_source[source]) > 1 and not self._is_restored(source)
        return is_divided and axis is not None and axis.order() is not None

    def _with_doubts(self, result: TensorAxes) -> TensorAxes:
        """Returns the result with unknown axes, where PyTorch's model may have other entries.

        These are parts of features in another order, and axes beside features that were merged with
        others in an unknown order. If the last axis of the result is a part of the last axis of the
        tensor, PyTorch's model has the same entries on the other axes.
        """
        merged = [
            axis
            for axis, group in zip(result.axes, self._groups, strict=True)
            if isinstance(axis, MergedAxis) and len(group) > 1
        ]
        is_beside = not self._ends_with_part() and any(
            isinstance(axis.order(), UnknownFeatureOrder) for axis in merged
        )
        axes: list[Axis | None] = []
        for axis, group in zip(result.axes, self._groups, strict=True):
            is_wrong = any(unit.source in self._misdivided for unit in group)
            is_simple = not isinstance(axis, MergedAxis) and axis is not self._batch
            if axis is not None and (is_wrong or (is_beside and is_simple)):
                axes.append(Axis(axis.size, doubt=self._reason()))
            else:
                axes.append(axis)
        return dataclasses.replace(result, axes=tuple(axes))

    def _ends_with_part(self) -> bool:
        """Returns True if the last axis of the result is a part of the last axis of the tensor."""
        last_group = next((group for group in reversed(self._groups) if group), [])
        last = max(self._by_source, default=0)
        is_part = all(unit.source == last for unit in last_group)
        return self._known or (is_part and not isinstance(self._tensor.axes[last], MergedAxis))


def _is_made_of(axis: MergedAxis, factors: Sequence[_Unit]) -> bool:
    """Returns True if factors are the axes that were merged to an axis."""
    return list(axis.sources) == [factor.axis for factor in factors]


def merged_axis(
    axes: Sequence[Axis], places: Sequence[Place], layout: Layout, name: str, reason: str
) -> Axis:
    """Returns the axis that some axes become: the one that was divided into them, or a new one.

    Args:
        axes: The axes, in Keras's order.
        places, layout: Their places before they are merged.
        name: Name of the layer or operation.
        reason: Clause that says why the order is unknown, if PyTorch has other neighbours.
    """
    found = [axis.find() for axis in axes]
    for owner in axes[0].owners:
        same = (each for each in owner.divisions if each.layout.find() is layout.find())
        if any([part.find() for part in each.parts] == found for each in same):
            return owner
    return MergedAxis(axes, places, layout, name, reason)
