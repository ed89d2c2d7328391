"""Layers that are called outside all graphs: which of them may flatten an image, or make one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import recurrent_cells
from tfwd.pretrained.flatten_order.orders import Shape, channels_last, flattened_axes

Side = Literal["inputs", "outputs"]


def unseen_images(layers: Sequence[Any], has_images: bool) -> list[tuple[Side, Shape, str]]:
    """Returns the images that are flattened or made by a reshape outside all graphs.

    Args:
        layers: Layers outside all graphs, or in a custom layer.
        has_images: bool. True if there is an image layer, so that two axes may be an image.

    Returns:
        For each image: "inputs" if it is flattened, and "outputs" if features are reshaped to it;
        its shape; and why its order is unknown for a layer.
    """
    found: list[tuple[Side, Shape, str]] = []
    for layer in layers:
        if isinstance(layer, keras.layers.Flatten):
            shape = tuple((_keras.layer_building.called_shape(layer) or ())[1:])
            side: Side = "inputs"
            reason = f"'{layer.name}' flattens {shape}, maybe for this layer"
        elif isinstance(layer, keras.layers.Reshape):  # Keras may not know its inputs
            shape, side = tuple(layer.target_shape), "outputs"
            reason = f"'{layer.name}' makes an image of {shape}, maybe from these outputs"
        else:
            continue
        if len(shape) < (3 if -1 in shape else 2) or None in shape:
            continue
        if not has_images and len(shape) < 3:
            continue
        if flattened_axes(shape, channels_last(len(shape))):
            found.append((side, shape, reason))
    return found


def unexplained_kernels(layers: Sequence[Any], sizes: set[int]) -> Iterator[tuple[Any, int]]:
    """Yields the kernels whose number of inputs is not the size of any layer's outputs.

    Their inputs may be a flattened image, also if a function flattens it.

    Args:
        layers: Layers outside all graphs, or in a custom layer.
        sizes: Further sizes of tensors that a kernel may take.

    Yields:
        The layer that owns the kernel, and the number of inputs.
    """
    known = sizes | {size for layer in layers for size in _output_sizes(layer)}
    for layer in layers:
        for owner in recurrent_cells(layer) or [layer]:
            kernel = getattr(owner, "kernel", None)
            is_dense = isinstance(layer, keras.layers.Dense) or owner is not layer
            if is_dense and kernel is not None and kernel.shape[0] not in {1, *known}:
                yield owner, int(kernel.shape[0])


def _output_sizes(layer: Any) -> set[int]:
    """Returns the sizes of the last axis that a layer's outputs may have."""
    shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(layer)]
    sizes = {shape[-1] for shape in shapes if len(shape) > 1}
    for cell in recurrent_cells(layer):  # the last cell may have other units
        units = getattr(cell, "units", 0)
        sizes |= {units, 2 * units}
    return sizes
