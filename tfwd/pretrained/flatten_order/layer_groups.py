"""Groups of Keras layers and operations that have the same effect on the order of axes."""

from __future__ import annotations

from typing import Any

import keras

from tfwd import _keras


def _named(*names: str) -> tuple[Any, ...]:
    """Returns the Keras layers with these names. Older releases lack some."""
    return tuple(getattr(keras.layers, name) for name in names if hasattr(keras.layers, name))


def _of_ranks(*names: str) -> tuple[Any, ...]:
    """Returns the Keras layers for one, two and three spatial axes."""
    return _named(*(name.format(rank) for name in names for rank in (1, 2, 3)))


CONVOLUTIONS = _of_ranks("Conv{}D", "Conv{}DTranspose", "SeparableConv{}D", "DepthwiseConv{}D")
UPSAMPLING_LAYERS = _of_ranks("UpSampling{}D")
CROPPING_LAYERS = (*_of_ranks("Cropping{}D"), *_named("CenterCrop"))
# These layers change the positions of an image.
RESIZING_LAYERS = (
    *_of_ranks("MaxPooling{}D", "AveragePooling{}D", "ZeroPadding{}D"),
    *_of_ranks("AdaptiveMaxPooling{}D", "AdaptiveAveragePooling{}D"),
    *_named("Resizing"),
    *(*CROPPING_LAYERS, *UPSAMPLING_LAYERS),
)
# Layers on images.
IMAGE_LAYERS = (
    *(*CONVOLUTIONS, *RESIZING_LAYERS),
    *_of_ranks("GlobalMaxPooling{}D", "GlobalAveragePooling{}D"),
)
# The outputs of these layers have the channels of the inputs.
DEPTHWISE_LAYERS = _of_ranks("DepthwiseConv{}D")
NORMALIZED_KERNELS = _named("SpectralNormalization")
# The outputs of these layers are images, or sequences of images.
IMAGE_SEQUENCE_LAYERS = _of_ranks("ConvLSTM{}D")
_ATTENTION_OF_OPERATIONS = _named("Attention", "AdditiveAttention")
ATTENTION_LAYERS = _named("MultiHeadAttention", "GroupQueryAttention")
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
# These layers have a rule, also without weights.
_WITH_RULES = (
    *(*RESIZING_LAYERS, *LAST_AXES_LAYERS, *FIRST_AXIS_LAYERS),
    *_named("Flatten", "Permute", "TimeDistributed", "Softmax"),
)


def is_channels_first(layer: Any) -> bool:
    """Returns True for a layer with the channels on the first axis, as in PyTorch."""
    return getattr(layer, "data_format", "channels_last") == "channels_first"


def image_axes(layer: Any, rank: int) -> tuple[int, ...]:
    """Returns the position in PyTorch of each axis of the images that a layer takes or returns.

    Args:
        layer: One of `IMAGE_LAYERS` or `IMAGE_SEQUENCE_LAYERS`.
        rank: int. Number of axes. A sequence of images has one more.
    """
    if isinstance(layer, IMAGE_SEQUENCE_LAYERS):
        cell = layer.cell
        if rank > cell.rank + 1:
            return (0, *(position + 1 for position in image_axes(cell, rank - 1)))
        return image_axes(cell, rank)
    images = max(0, rank - image_rank(layer, rank))  # axes of a batch of batches
    inner = rank - images
    axes = tuple(range(inner)) if is_channels_first(layer) else (*range(1, inner), 0)
    return (*range(images), *(images + axis for axis in axes))


def image_rank(layer: Any, rank: int) -> int:
    """Returns the number of axes of an image with channels, by the class of an image layer."""
    for spatial in (1, 2, 3):
        if any(base.__name__.endswith(f"{spatial}D") for base in type(layer).__mro__):
            return spatial + 1
    return rank


def recurrent_cells(layer: Any) -> list[Any]:
    """Returns the cells that take the inputs of a recurrent layer; none for other layers."""
    if isinstance(layer, keras.layers.Bidirectional):
        return [*recurrent_cells(layer.forward_layer), *recurrent_cells(layer.backward_layer)]
    if not isinstance(layer, keras.layers.RNN):
        return []
    return list(getattr(layer.cell, "cells", [layer.cell]))[:1]


def is_composite(layer: Any) -> bool:
    """Returns True for a layer whose call shows what it does: by its operations and layers inside.

    Other layers have a rule, or their call is not known.
    """
    if not isinstance(unwrapped(layer), keras.layers.Layer) or unwrapped(layer) is not layer:
        return False
    defined = _keras.calls_of(type(layer))
    if not _keras.is_of_keras(defined):
        return not (defined.__module__.startswith("tfwd.") and layer.weights)
    if isinstance(layer, (keras.Model, *_ATTENTION_OF_OPERATIONS)):
        return True
    return not (isinstance(layer, _WITH_RULES) or layer.weights)


def has_image_layers(layer: Any) -> bool:
    """Returns True for a layer that is or contains a layer of images."""
    if not isinstance(layer, keras.layers.Layer):
        return False
    kinds = (*IMAGE_LAYERS, *IMAGE_SEQUENCE_LAYERS)
    return any(isinstance(inner, kinds) for inner in _keras.layers.all_layers(layer))


def unwrapped(layer: Any) -> Any:
    """Returns a layer without the wrappers of tfwd, and without `SpectralNormalization`."""
    wrappers: tuple[Any, ...] = (_keras.layer_wrappers.Wraps, *NORMALIZED_KERNELS)
    while isinstance(layer, wrappers):
        layer = layer.layer
    return layer
