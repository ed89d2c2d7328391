"""Groups of Keras layers and operations that have the same effect on the order of axes."""

from __future__ import annotations

from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.orders import AxisOrder, channels_last


def _named(*names: str) -> tuple[Any, ...]:
    """Returns the Keras layers with these names. Older releases lack some."""
    return tuple(getattr(keras.layers, name) for name in names if hasattr(keras.layers, name))


def _of_ranks(*names: str) -> tuple[Any, ...]:
    """Returns the Keras layers for one, two and three spatial axes."""
    return _named(*(name.format(rank) for name in names for rank in (1, 2, 3)))


# The outputs of these layers are images.
IMAGE_LAYERS = (
    *_of_ranks("Conv{}D", "Conv{}DTranspose", "SeparableConv{}D", "DepthwiseConv{}D"),
    *_of_ranks("MaxPooling{}D", "AveragePooling{}D", "UpSampling{}D", "ZeroPadding{}D"),
    *_of_ranks("Cropping{}D", "GlobalMaxPooling{}D", "GlobalAveragePooling{}D"),
    *_of_ranks("AdaptiveMaxPooling{}D", "AdaptiveAveragePooling{}D"),
)
# The outputs of these layers are images, or sequences of images.
IMAGE_SEQUENCE_LAYERS = _of_ranks("ConvLSTM{}D")
# The outputs of these layers have the same axes in PyTorch.
SEQUENCE_LAYERS = _named(
    *("Embedding", "RNN", "Bidirectional", "MultiHeadAttention", "GroupQueryAttention"),
    *("Attention", "AdditiveAttention", "EinsumDense"),
)
CONCATENATION_LAYERS = _named("Concatenate")
# The outputs of these layers have the axes and features of the inputs.
ORDER_PRESERVING_LAYERS = (
    *_named("Activation", "ReLU", "LeakyReLU", "ELU", "PReLU", "Softmax", "Dropout", "Identity"),
    *_named("AlphaDropout", "GaussianDropout", "GaussianNoise", "ActivityRegularization"),
    *_named("BatchNormalization", "LayerNormalization", "GroupNormalization", "Normalization"),
    *_named("RMSNormalization", "UnitNormalization", "Rescaling", "Masking"),
    *_of_ranks("SpatialDropout{}D"),
)
# These layers normalize the last axes in PyTorch.
LAST_AXES_LAYERS = _named("LayerNormalization", "RMSNormalization")
# These layers have the channels on the first axis in PyTorch.
FIRST_AXIS_LAYERS = _named("BatchNormalization", "GroupNormalization")
# Operations that may reorder the entries of a tensor without changing its shape.
_REORDERING_OPERATIONS = (
    *("transpose", "permute", "flip", "reverse", "roll", "swapaxes", "moveaxis", "sort", "rot90"),
    *("dot", "matmul", "einsum", "tensordot", "gather", "take"),
)


def operation_name(operation: Any) -> str:
    """Returns the name of a function in a graph; "" for a layer."""
    symbol = getattr(operation, "symbol", None)  # of Keras 2
    if isinstance(symbol, str):
        return symbol.rpartition(".")[2].lower()
    return "" if isinstance(operation, keras.layers.Layer) else type(operation).__name__.lower()


def is_reshape(layer: Any) -> bool:
    """Returns True for a `Reshape` layer and for a reshape operation."""
    return isinstance(layer, keras.layers.Reshape) or operation_name(layer) == "reshape"


def may_reorder_entries(layer: Any) -> bool:
    """Returns True for an operation that may change the order of a tensor's entries."""
    name = operation_name(layer)
    return any(word in name for word in _REORDERING_OPERATIONS)


def is_channels_first(layer: Any) -> bool:
    """Returns True for a layer with the channels on the first axis, as in PyTorch."""
    return getattr(layer, "data_format", "channels_last") == "channels_first"


def image_axes(layer: Any, rank: int) -> AxisOrder:
    """Returns the order of the axes of the images that a layer takes or returns.

    Args:
        layer: One of `IMAGE_LAYERS` or `IMAGE_SEQUENCE_LAYERS`.
        rank: int. Number of axes. A sequence of images has one more.
    """
    if isinstance(layer, IMAGE_SEQUENCE_LAYERS):
        cell = layer.cell
        if rank > cell.rank + 1:
            return (0, *(position + 1 for position in image_axes(cell, rank - 1)))
        return image_axes(cell, rank)
    return tuple(range(rank)) if is_channels_first(layer) else channels_last(rank)


def has_image_layers(layer: Any) -> bool:
    """Returns True for a layer that is or contains a layer of images."""
    if not isinstance(layer, keras.layers.Layer):
        return False
    kinds = (*IMAGE_LAYERS, *IMAGE_SEQUENCE_LAYERS)
    return any(isinstance(inner, kinds) for inner in _keras.layers.all_layers(layer))


def weights_of(layer: Any) -> list[Any]:
    """Returns the weights of a layer. An operation has none."""
    return list(layer.weights) if isinstance(layer, keras.layers.Layer) else []
