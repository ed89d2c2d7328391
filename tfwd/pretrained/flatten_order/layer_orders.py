"""Orders of the features at the layers of a model, recorded at their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.axes import Axis, Orders, same_order
from tfwd.pretrained.flatten_order.layer_groups import IMAGE_LAYERS
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout
from tfwd.pretrained.flatten_order.made_axes import JoinedAxis, with_uses
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    JoinedFeatures,
    JoinedPart,
    Shape,
    UnknownFeatureOrder,
)
from tfwd.pretrained.flatten_order.unseen_layers import (
    Side,
    number_of_outputs,
)

_SEVERAL = UnknownFeatureOrder("the model calls the layer on features in several orders")


@dataclasses.dataclass
class LayerOrders:
    """Orders of the features that a layer takes and returns.

    Attributes:
        inputs: Order of the last axis of the inputs. None if PyTorch has the same.
        outputs: Order of the last axis of the outputs. None if PyTorch has the same.
        sizes: dict from a side to the sizes of the axes that Keras flattens before the layer, or
            makes of the outputs after it. Without sizes of 1, and only if they are known.
        joined: set of the sides on which calls have several features, some of several tensors.
        parts: dict from a side to the parts that a layer joins before it, if the order of a part is
            unknown.
        axes: dict from a side to a number. Equal numbers are the same features. Only if the layer
            always has the same features on this side.
    """

    inputs: FeatureOrder = None
    outputs: FeatureOrder = None
    sizes: dict[Side, Shape] = dataclasses.field(default_factory=dict, compare=False)
    joined: set[Side] = dataclasses.field(default_factory=set, compare=False)
    parts: dict[Side, tuple[JoinedPart, ...]] = dataclasses.field(
        default_factory=dict, compare=False
    )
    axes: dict[Side, int] = dataclasses.field(default_factory=dict, compare=False)

    def of(self, side: Side | None) -> FeatureOrder:
        """Returns the order of one side; None without a side."""
        return None if side is None else getattr(self, side)


class _Plain(NamedTuple):
    """A layer whose weights are known only if PyTorch has the same order of axes.

    Attributes:
        layer, side, axes, reason: As in `OrderRecorder.record_plain`.
        is_own: bool. True if the axes belong to this layer, and not to one of several layers.
    """

    layer: Any
    side: Side
    axes: tuple[Axis, ...]
    reason: str
    is_own: bool


class _Hidden(NamedTuple):
    """Layers that the model calls in code that is not seen. Its results may be their outputs.

    Attributes:
        layers, inputs, results, reason: As in `OrderRecorder.record_hidden`.
    """

    layers: Sequence[Any]
    inputs: tuple[Axis, ...]
    results: tuple[Axis, ...]
    reason: str


class OrderRecorder:
    """Recorder of the axes at the calls of each layer. Conflicting orders become unknown.

    Attributes:
        matches: Pairs of axes that must have the same order in PyTorch, with the reason of an
            unknown order if they have not.
        flattened_sizes: Sizes of the recorded axes with another order than in PyTorch.
    """

    def __init__(self) -> None:
        self.flattened_sizes: set[int] = set()
        self.matches: list[tuple[Axis, Axis, str]] = []
        self._axes: list[tuple[Any, Side, Axis | None]] = []
        # Axes, the numbers of earlier records of axes and of plain axes, and if it is a reduction.
        self._choices: list[tuple[Axis, int, int, bool]] = []
        self._plain: list[_Plain] = []
        self._layouts: list[tuple[Any, Layout | None, list[Any], str]] = []
        self._hidden: list[_Hidden] = []
        self._orders: dict[int, LayerOrders] = {}
        # The order at the first call, by the layer's id and the side.
        self._first: dict[tuple[int, str], FeatureOrder] = {}

    def record_axis(self, layer: Any, side: Side, axis: Axis | None) -> None:
        """Records the axis of features that a layer takes or returns at one of its calls."""
        self._axes.append((layer, side, axis))

    def record_plain(
        self, layers: Sequence[Any], side: Side, axes: Sequence[Axis | None], reason: str
    ) -> None:
        """Records that weights of layers are known only if PyTorch has the same order of axes.

        Args:
            layers: The layers.
            side: "inputs" or "outputs" of the layers.
            axes: The axes.
            reason: Clause that says why the order is unknown, if an axis has another order.
        """
        given = tuple(axis for axis in axes if axis is not None)
        is_own = len(layers) == 1
        self._plain += [_Plain(layer, side, given, reason, is_own) for layer in layers]

    def record_layout(
        self, layers: Sequence[Any], layout: Layout | None, places: Sequence[Any], reason: str
    ) -> None:
        """Records that weights of layers are known only if axes have Keras's order in PyTorch.

        Args:
            layers: The layers.
            layout: Order of the axes of the input. None: it is another order.
            places: Places of the axes.
            reason: Clause that says why the order is unknown, if the axes have another order.
        """
        used = [place for place in places if place is not None]
        self._layouts += [(layer, layout, used, reason) for layer in layers]

    def record_hidden(
        self,
        layers: Sequence[Any],
        inputs: Sequence[Axis],
        results: Sequence[Axis],
        reason: str,
    ) -> None:
        """Records layers that are called in code that is not seen, such as a branch or a loop.

        Their outputs may be the results, or may be added to the inputs. So their order is unknown
        if a result becomes an image or meets flattened features. It is also unknown if an input
        has as many flattened features.

        Args:
            layers: The layers. Layers on images are left out.
            inputs, results: Axes that the code takes and returns.
            reason: Clause that says why the order is unknown.
        """
        others = [layer for layer in layers if not isinstance(layer, IMAGE_LAYERS)]
        self._hidden.append(_Hidden(others, tuple(inputs), tuple(results), reason))

    def record_choice(self, axis: Axis | None, *, is_reduction: bool = False) -> None:
        """Records that the model chooses single entries of an axis by their numbers.

        If PyTorch has another order, these are other entries. The layers that are called later then
        have unknown inputs.

        Args:
            axis: The axis.
            is_reduction: bool. True if the model has the sum or maximum of chosen entries. If no
                layer is called later, the inputs of the layer before are unknown. Default False.
        """
        if axis is not None:
            self._choices.append((axis, len(self._axes), len(self._plain), is_reduction))

    def record_reduction(self, axis: Axis | None) -> None:
        """Records that the model sums over an axis. It may have other entries in PyTorch."""
        if axis is not None and axis.find().has_chosen_entries:
            self.record_choice(axis, is_reduction=True)

    def must_be_plain(self, axis: Axis, reason: str) -> None:
        """Notes that later layers do not know the order of an axis that differs from PyTorch's."""
        self.matches.append((axis, Axis(axis.size), reason))

    def finish(self, layers: Sequence[Any]) -> None:
        """Determines the orders of all recorded axes, after all calls are recorded.

        Args:
            layers: All layers of the model.
        """
        recorded = [axis for _, _, axis in self._axes if axis is not None]
        recorded += [axis for plain in self._plain for axis in plain.axes]
        recorded += [axis for axis, *_ in self._choices]
        made = with_uses(recorded)
        is_changed = True
        while is_changed:
            known = Orders()
            for each in made:
                known.of(each)
            is_changed = any([each.mark_sources(known) for each in made])
            for first, second, reason in () if is_changed else self.matches:
                if same_order(known.of(first), known.of(second)):
                    continue
                of_sources = first.holds_input() or second.holds_input()
                for other in (first.find(), second.find()):
                    is_changed = is_changed or other.doubt is None
                    other.doubts(reason, of_sources=of_sources)
        self._note_axes(known)
        self.flattened_sizes = {
            axis.size for axis in recorded if axis.size and known.of(axis) is not None
        }
        for layer, side, axis in self._axes:
            order: FeatureOrder = None if axis is None else known.of(axis)
            if side == "outputs" and order is not None:
                order = _of_outputs(layer, order)
            self.record(layer, side, order)
        self._record_choices(known, layers)
        for layer, layout, places, reason in self._layouts:
            if layout is None or not layout.is_natural(places):
                self.record(layer, "inputs", UnknownFeatureOrder(reason))
        for hidden in self._hidden:
            is_met = self._meets_flattened(hidden, known)
            sizes = {axis.size for axis in hidden.inputs if known.of(axis) is not None}
            for layer in hidden.layers:
                if is_met or number_of_outputs(layer) in sizes:
                    self.record(layer, "outputs", UnknownFeatureOrder(hidden.reason))
        for plain in self._plain:
            orders = [order for axis in plain.axes if (order := known.of(axis)) is not None]
            if orders:
                if not isinstance(orders[0], UnknownFeatureOrder):
                    orders[0] = UnknownFeatureOrder(plain.reason)
                self.record(plain.layer, plain.side, orders[0])

    def _record_choices(self, known: Orders, layers: Sequence[Any]) -> None:
        """Records the layers that take entries chosen from an axis in another order."""
        for axis, number, number_of_plain, is_reduction in self._choices:
            if known.of(axis) is not None:
                later = [layer for layer, *_ in self._axes[number:]]
                later += [plain.layer for plain in self._plain[number_of_plain:]]
                recorded_ids = {id(layer) for layer, *_ in (*self._axes, *self._plain)}
                later += [layer for layer in layers if id(layer) not in recorded_ids]  # tables
                if is_reduction and not any(map(_keras.layers.held_weights, later)):
                    later += [each[0] for each in (*self._axes[:number], *self._plain)][-1:]
                reason = "the model chooses single features of a flattened image"
                for layer in later:
                    self.record(layer, "inputs", UnknownFeatureOrder(reason))

    def _meets_flattened(self, hidden: _Hidden, known: Orders) -> bool:
        """Returns True if results of hidden code become an image, or meet flattened features."""
        results = {axis.find() for axis in hidden.results}
        divisions = [division for axis in results for division in axis.divisions]
        pairs = [(first.find(), second.find()) for first, second, _ in self.matches]
        met = [one for pair in pairs for one in pair if not results.isdisjoint(pair)]
        orders = [
            *(division.order(known) for division in divisions),
            *(known.of(axis) for axis in met if axis not in results),
        ]
        return any(order is not None for order in orders)

    def _note_axes(self, known: Orders) -> None:
        """Notes which features each layer has, and the axes that Keras makes them of."""
        found: dict[tuple[int, Side], set[Axis]] = {}
        recorded = {(id(layer), side) for layer, side, _ in self._axes}
        plain = [
            (each.layer, each.side, each.axes[0])
            for each in self._plain
            if len(each.axes) == 1 and (id(each.layer), each.side) not in recorded
        ]
        of_several = {(id(each.layer), each.side) for each in self._plain if not each.is_own}
        for layer, side, axis in (*self._axes, *plain):
            if axis is not None:
                found.setdefault((id(layer), side), set()).add(axis.find())
        for (number, side), axes in found.items():
            orders = self._orders.setdefault(number, LayerOrders())
            sizes = {
                each.merged_sizes() if side == "inputs" else each.divided_sizes() for each in axes
            }
            if len(sizes) == 1:
                orders.sizes[side] = sizes.pop()
            if len(axes) > 1 and any(isinstance(axis, JoinedAxis) for axis in axes):
                orders.joined.add(side)
            if len(axes) == 1 and (number, side) not in of_several - recorded:
                axis = axes.pop()
                orders.axes[side] = id(axis)
                if isinstance(axis, JoinedAxis):
                    orders.parts[side] = axis.joined_parts(known)

    def found(self) -> dict[int, LayerOrders]:
        """Returns the orders by the id of the layer."""
        return self._orders

    def record(self, layer: Any, side: Side, order: FeatureOrder) -> None:
        """Records the order of a layer's inputs or outputs at one of its calls."""
        orders = self._orders.setdefault(id(layer), LayerOrders())
        before = getattr(orders, side)
        first = self._first.setdefault((id(layer), side), order)
        if isinstance(before, UnknownFeatureOrder):
            return
        if not isinstance(order, UnknownFeatureOrder) and not same_order(first, order):
            order = _SEVERAL
        setattr(orders, side, order or before)

    def share(self, holders: Sequence[Any]) -> None:
        """Gives layers that hold the same variable the same orders.

        Args:
            holders: The layers. An order that is not recorded for all of them in the same way is
                unknown.
        """
        found = [self._orders[id(layer)] for layer in holders if id(layer) in self._orders]
        for side in ("inputs", "outputs") if found else ():
            distinct = list(dict.fromkeys(getattr(orders, side) for orders in found))
            unknown = UnknownFeatureOrder("several layers use it on features in several orders")
            for layer in holders:
                orders = self._orders.setdefault(id(layer), LayerOrders())
                setattr(orders, side, distinct[0] if len(distinct) == 1 else unknown)


def _of_outputs(layer: Any, order: FeatureOrder) -> FeatureOrder:
    """Returns the order of outputs that become an image. Only some layers can be reordered."""
    can_reorder = isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))
    if isinstance(order, JoinedFeatures) or (isinstance(order, FlattenedAxes) and not can_reorder):
        return UnknownFeatureOrder("its outputs become an image")
    return order
