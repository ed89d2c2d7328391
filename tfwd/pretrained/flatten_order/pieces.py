"""Pieces of an image at some of its positions, which a model joins to features.

The pieces `[examples, channels]` of an image `[examples, positions, channels]` become features in
the order of positions and channels. PyTorch's model may join pieces too. But it may also flatten
the whole image at once, with the channels first.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence

from tfwd.pretrained.flatten_order.axes import Axis, Orders, same_order
from tfwd.pretrained.flatten_order.made_axes import DependentAxis, JoinedAxis, MadeAxis, MergedAxis
from tfwd.pretrained.flatten_order.orders import FeatureOrder, UnknownFeatureOrder
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes


class CroppedAxis(DependentAxis):
    """A part of an axis of positions."""


class PieceAxis(MadeAxis):
    """The channels of an image at some of its positions.

    The piece has the channels of the image, in the same order.

    Args:
        channels: The channels.
        positions: An object that is equal only for the same positions.
    """

    def __init__(self, channels: Axis, positions: Hashable) -> None:
        super().__init__(channels.size, [channels])
        self.positions = positions

    @property
    def channels(self) -> Axis:
        """Returns the channels of the image."""
        return self.sources[0].find()

    def find_order(self, known: Orders) -> FeatureOrder:
        own, order = super().find_order(known), known.of(self.channels)
        if own is None or order is None or same_order(own, order):
            return order if own is None else own
        return UnknownFeatureOrder("the model uses features of an image in several orders")

    @property
    def wholes(self) -> set[Axis]:
        return self.channels.wholes

    @property
    def is_part(self) -> bool:
        return self.channels.is_part


class JoinedPieces(JoinedAxis):
    """Pieces of one image at several positions, which are joined to features."""

    def find_order(self, known: Orders) -> FeatureOrder:
        return known.first_unknown(self.sources) or UnknownFeatureOrder(
            f"'{self._name}' joins parts of an image, and PyTorch's model may flatten the image"
        )


def joined_axis(parts: Sequence[Axis], name: str) -> JoinedAxis:
    """Returns the axis that a concatenation makes of several axes.

    Args:
        parts: The axes.
        name: Name of the layer or operation.
    """
    positions: dict[Axis, set[Hashable]] = {}
    for channels, chosen in map(_channels_and_positions, parts):
        if chosen:
            positions.setdefault(channels, set()).add(chosen)
    kind = JoinedPieces if any(len(each) > 1 for each in positions.values()) else JoinedAxis
    return kind(parts, name)


def _channels_and_positions(axis: Axis) -> tuple[Axis, tuple[Hashable, ...]]:
    """Returns the channels of an image that an axis has, and the positions; () for all positions.

    The axis may be a piece that is flattened.
    """
    found = axis.find()
    if isinstance(found, MergedAxis):
        channels, chosen = _channels_and_positions(found.sources[-1])
        return channels, chosen + cropped(source.find() for source in found.sources)
    if isinstance(found, PieceAxis):
        return found.channels, (found.positions,)
    return found, ()


def channels_of_piece(
    tensor: TensorAxes, removed: Collection[int], batch: Axis, positions: Hashable
) -> dict[int, Axis | None]:
    """Returns the new last axis of a tensor of which positions are chosen, by its number.

    Args:
        tensor: The tensor before the choice.
        removed: Numbers of the axes of which one entry remains.
        batch: Axis of the examples.
        positions: As in `PieceAxis`.

    Returns:
        An empty dict if the tensor is no image, or if no axis of positions is removed.
    """
    last = len(tensor.axes) - 1
    channels = tensor.last
    if channels is None or last in removed or not is_image(tensor, batch):
        return {}
    is_chosen = any(tensor.axes[n] is not None for n in removed if 0 < n < last)
    return {last: PieceAxis(channels, positions)} if is_chosen else {}


def is_image(tensor: TensorAxes, batch: Axis) -> bool:
    """Returns True if PyTorch may have the channels before the positions."""
    return len(tensor.used) > 2 and tensor.has_batch(batch) and not tensor.is_as_in_keras()


def cropped(axes: Iterable[Axis | None]) -> tuple[int, ...]:
    """Returns an id of each axis that is a part of an axis of positions."""
    return tuple(id(axis) for axis in axes if isinstance(axis, CroppedAxis))
