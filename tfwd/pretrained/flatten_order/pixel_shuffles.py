"""Pixel shuffles that a model writes as a reshape: parts of the channels become pixels.

PyTorch's `PixelShuffle` has the pixels of a block as the last factors of the channels, and
TensorFlow's `depth_to_space` as the first factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tfwd.pretrained.flatten_order.axes import Axis


def doubt_shuffled_channels(groups: Sequence[Sequence[Axis]], batch: Axis, name: str) -> None:
    """Marks the channels of an image whose first parts become pixels in a reshape.

    A reshape that merges all positions and parts to one axis is no shuffle: it makes a list of
    boxes.

    Args:
        groups: For each axis of the result, the axes that are merged to it.
        batch: Axis of the examples.
        name: Name of the layer or operation.
    """
    everything = [axis for group in groups for axis in group]
    pixels = {
        axis
        for group in groups
        for axis in group
        if axis.is_part
        and set() != _positions(group, axis, batch) != _positions(everything, axis, batch)
    }
    reason = f"'{name}' makes pixels of channels, and PyTorch's PixelShuffle has another order"
    for pixel in pixels:
        divisions = [division for whole in pixel.wholes for division in whole.divisions]
        for division in divisions:
            parts = [part.find() for part in division.parts]
            if not division.is_of_image or pixel not in parts:
                continue
            if not pixels.issuperset(parts[parts.index(pixel) + 1 :]):
                for whole in pixel.wholes:
                    whole.doubts(reason, of_sources=True)


def _positions(axes: Iterable[Axis], pixel: Axis, batch: Axis) -> set[Axis]:
    """Returns the axes that are neither the batch nor parts of the same channels as a pixel."""
    return {axis for axis in axes if axis is not batch and not axis.wholes & pixel.wholes}
