"""Layers that are called outside all graphs: which of them may flatten an image, or make one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import IMAGE_LAYERS, recurrent_cells
from tfwd.pretrained.flatten_order.orders import Shape, flattened_image

_RESHAPES = ("reshape", "rearrange", "unflatten", "batch_flatten", "ravel")
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
        if flattened_image((shape[-1], *shape[:-1])):
            found.append((side, shape, reason))
    return found


def reshapes_in_code(layer: Any, *, is_traced: bool) -> bool:
    """Returns True if a method of a user's layer names a reshape.

    Args:
        layer: The layer.
        is_traced: bool. True if `call` is known from its trace. Other methods count then.
    """
    names = _keras.names_in_code(layer, ("call", "build") if is_traced else ())
    return any(word in name for name in names for word in _RESHAPES)


def may_be_image(size: int) -> bool:
    """Returns True if features may be the entries of an image: three axes of at least two each."""
    factors, rest = 0, size
    for divisor in range(2, size + 1):
        while rest % divisor == 0:
            factors, rest = factors + 1, rest // divisor
    return factors > 2


def unexplained_sizes(layers: Sequence[Any], sizes: set[int]) -> Iterator[int]:
    """Yields the numbers of inputs of kernels that no earlier layer has as outputs.

    The inputs may be a flattened image, also if a function flattens it.

    Args:
        layers: Layers outside all graphs, or in a custom layer, in the order of their creation.
        sizes: Further sizes of tensors that a kernel may take.
    """
    known, last_image = {1, *sizes}, set[int]()
    for layer in layers:
        for owner in kernel_owners(layer):
            size = int(owner.kernel.shape[0])
            if size not in known | last_image:
                yield size
        if isinstance(layer, IMAGE_LAYERS):  # the channels of earlier images are not flattened
            sizes_now = _output_sizes(layer)  # two poolings may be joined
            last_image = {k * size for size in sizes_now for k in (1, 2)} or last_image
        else:
            known |= _output_sizes(layer)


def before_convolutions(layers: Sequence[Any]) -> Iterator[Any]:
    """Yields the `Dense` layers before a convolution, whose outputs may be reshaped to an image.

    Args:
        layers: As in `unexplained_sizes`.
    """
    convolutions = [i for i, layer in enumerate(layers) if isinstance(layer, IMAGE_LAYERS)]
    for layer in layers[: max(convolutions, default=0)]:
        if isinstance(layer, keras.layers.Dense) and layer.built:
            yield layer


def takes_images(layer: Any) -> bool:
    """Returns True if a layer was first called on a tensor with four axes or more."""
    shape = _keras.layer_building.called_shape(layer)
    return _is_shape(shape) and len(shape) > 3 and not any(map(_is_shape, shape))


def kernel_owners(layer: Any) -> list[Any]:
    """Returns the layers or cells with a kernel on the last axis of a layer's inputs."""
    owners = recurrent_cells(layer) or [layer] * isinstance(layer, keras.layers.Dense)
    return [owner for owner in owners if getattr(owner, "kernel", None) is not None]


def number_of_outputs(layer: Any) -> int | None:
    """Returns the number of features that a dense layer, a table or a recurrent cell returns."""
    if isinstance(layer, keras.layers.EinsumDense):
        return int(layer.kernel.shape[-1]) if layer.built else None
    name = "output_dim" if isinstance(layer, keras.layers.Embedding) else "units"
    return getattr(layer, name, None)


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple, tf.TensorShape))


def _output_sizes(layer: Any) -> set[int]:
    """Returns the sizes of the last axis that a layer's outputs may have."""
    if isinstance(layer, IMAGE_LAYERS):
        return {layer.filters} if getattr(layer, "filters", None) else set()
    shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(layer)]
    sizes = {shape[-1] for shape in shapes if len(shape) > 1}
    if isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional)):
        cells = [inner for inner in _keras.layers.all_layers(layer) if hasattr(inner, "units")]
        sizes |= {factor * cell.units for cell in cells for factor in (1, 2)}
    return sizes
