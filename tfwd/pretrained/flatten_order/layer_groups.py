"""Groups of Keras layers and operations that have the same effect on the order of axes."""

from __future__ import annotations

import math
import re
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.orders import AxisOrder, Shape, channels_last
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation


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
    *_named("Resizing", "CenterCrop"),
)
# The outputs of these layers have the channels of the inputs.
DEPTHWISE_LAYERS = _of_ranks("DepthwiseConv{}D")
_NORMALIZED_KERNELS = _named("SpectralNormalization")
# The outputs of these layers are images, or sequences of images.
IMAGE_SEQUENCE_LAYERS = _of_ranks("ConvLSTM{}D")
# The outputs of these layers have the features of their values.
ATTENTION_WITHOUT_KERNELS = _named("Attention", "AdditiveAttention")
ATTENTION_LAYERS = _named(
    *("MultiHeadAttention", "GroupQueryAttention", "Attention", "AdditiveAttention"),
)
# The outputs of these layers have the same axes in PyTorch.
SEQUENCE_LAYERS = (*_named("Embedding", "RNN", "Bidirectional", "EinsumDense"), *ATTENTION_LAYERS)
_CONCATENATIONS = ("concatenate", "concat")
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
# These layers combine the entries of several tensors one by one.
MERGING_LAYERS = _named("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum")
# These operations take and return the entries of a tensor one by one.
_ELEMENTWISE_OPERATIONS = (
    *("add", "subtract", "sub", "multiply", "mul", "divide", "div", "truediv", "true_divide"),
    *("maximum", "minimum", "negative", "neg", "abs", "absolute", "square", "sqrt", "rsqrt", "exp"),
    *("expm1", "log", "log1p", "pow", "power", "sign", "clip", "clip_by_value", "cast", "erf"),
    *("relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "swish", "sigmoid"),
    *("log_sigmoid", "hard_sigmoid", "softplus", "softsign", "soft_sign", "tanh", "hard_tanh"),
    *("hard_silu", "hard_swish", "mish", "softmax", "log_softmax", "identity", "stop_gradient"),
    *("real_div", "bias_add", "squared_difference", "select", "reciprocal", "prevent_gradient"),
    *("erfc", "ensure_shape", "check_numerics", "greater", "greater_equal", "less", "less_equal"),
)
# These operations do not merge axes, and do not divide them.
_OPERATIONS_ON_AXES = (
    *("getitem", "slice", "stridedslice", "split", "unstack", "stack", "pad", "repeat", "tile"),
    *("mean", "sum", "prod", "max", "min", "amax", "amin", "std", "var", "any", "all", "logsumexp"),
    *("transpose", "swapaxes", "moveaxis", "flip", "roll", "einsum", "matmul", "tensordot", "take"),
    *("broadcastto", "resize", "cumsum", "argmax"),
)
# Names of convolutions and poolings, without underscores.
_IMAGE_OPERATION = re.compile(
    r"(depthwise|separable|atrous|adaptive)?(conv(\d|transpose|$)|(max|avg|average)pool)"
)
# Operations that may reorder the entries of a tensor without changing its shape.
_PERMUTATIONS = ("transpose", "permute", "swapaxes", "moveaxis", "einsum")
_REORDERING_OPERATIONS = (
    *("transpose", "permute", "flip", "reverse", "roll", "swapaxes", "moveaxis", "sort", "rot90"),
    *("dot", "matmul", "einsum", "tensordot", "gather", "take"),
    *("while", "if", "case", "call", "pyfunc"),  # they contain other operations
)


def operation_name(operation: Any) -> str:
    """Returns the name of a function in a graph; "" for a layer."""
    symbol = getattr(operation, "symbol", None)  # of Keras 2
    if isinstance(symbol, str):
        return symbol.rpartition(".")[2].lower()
    return "" if isinstance(operation, keras.layers.Layer) else type(operation).__name__.lower()


def makes_images(layer: Any) -> bool:
    """Returns True for a layer or operation whose outputs are images, or sequences of images."""
    is_layer = isinstance(layer, (*IMAGE_LAYERS, *IMAGE_SEQUENCE_LAYERS))
    return is_layer or bool(_IMAGE_OPERATION.match(operation_name(layer).replace("_", "")))


def reorders_channels(layer: Any, shape: Shape, result: Shape) -> bool:
    """Returns True if an operation has other neighbours on the channels than PyTorch's operation.

    TensorFlow has the channels of a pixel's block as the last factor, PyTorch as the first one.

    Args:
        layer: Layer or operation.
        shape, result: Shapes of the input and of the output.
    """
    channels = {"depthtospace": result, "spacetodepth": shape}
    name = operation_name(layer).replace("_", "")
    return name in channels and channels[name][-1] != 1


def is_operation(layer: Any) -> bool:
    """Returns True for an operation of a graph, and for `Dot`. They do not flatten."""
    return bool(operation_name(layer)) or isinstance(layer, keras.layers.Dot)


def is_concatenation(layer: Any) -> bool:
    """Returns True for a `Concatenate` layer and for an operation that joins tensors."""
    is_layer = isinstance(layer, keras.layers.Concatenate)
    return is_layer or operation_name(layer) in _CONCATENATIONS


def is_reshape(layer: Any) -> bool:
    """Returns True for a `Reshape` layer and for an operation that changes only the shape."""
    names = ("reshape", "expanddims", "expand_dims", "squeeze")
    return isinstance(layer, keras.layers.Reshape) or operation_name(layer) in names


def may_exchange_axes(layer: Any, shape: Shape) -> bool:
    """Returns True for a function that may reorder the entries of a tensor, and keeps its shape.

    Args:
        layer: Layer or operation.
        shape: Shape of its input and output. A function cannot exchange axes of different sizes.
    """
    if not isinstance(layer, keras.layers.Layer):
        return any(word in operation_name(layer) for word in _REORDERING_OPERATIONS)
    is_function = isinstance(layer, keras.layers.Lambda) or not layer.weights
    is_known = _keras.is_of_keras(type(layer), "call") and not isinstance(
        layer, keras.layers.Lambda
    )
    return is_function and not is_known and shape[-1] != 1 and shape[-1] in shape[:-1]


def permutes_like_a_function(layer: Any, shape: Shape, result: Shape) -> bool:
    """Returns True for a function that may only permute the axes of an example.

    The axes of most such functions are known in a traced call. An `einsum` with a weight is a
    product. An axis of unknown size may be the axis of the examples, which has moved.
    """
    if isinstance(layer, TracedOperation) and layer.table_axes:
        return False
    if None in (*shape, *result):
        return False
    return operation_name(layer).replace("_", "") in _PERMUTATIONS


def combines_entries_one_by_one(layer: Any) -> bool:
    """Returns True for a layer or operation that is known not to move the entries of a tensor."""
    if isinstance(layer, keras.layers.Activation):
        name = getattr(layer.activation, "__name__", "")
        return layer.activation is getattr(keras.activations, name, None)
    name = operation_name(layer).replace("_", "")
    names = {each.replace("_", "") for each in _ELEMENTWISE_OPERATIONS}
    return isinstance(layer, (*MERGING_LAYERS, *ORDER_PRESERVING_LAYERS)) or name in names


def keeps_axes_whole(layer: Any, shape: Shape, result: Shape) -> bool:
    """Returns True if a layer or operation cannot merge the axes of an image to other axes.

    Args:
        layer: Layer or operation that changes the shape.
        shape: Shape of the input.
        result: Shape of the output, with two or more axes.
    """
    name = operation_name(layer).replace("_", "")
    if name.removeprefix("reduce") in _OPERATIONS_ON_AXES or result[-1] in (1, shape[-1]):
        return True
    return not name and result[:-1] == shape[:-1]


def changes_examples(layer: Any, shape: Shape, result: Shape) -> bool:
    """Returns True for an operation whose result has more or fewer examples than its input.

    Args:
        layer: Layer or operation.
        shape, result: Shapes of the input and of the output.
    """
    if isinstance(layer, TracedOperation):
        return layer.moves_examples
    is_known = is_reshape(layer) and None not in (*shape, *result)
    return is_known and math.prod(shape) != math.prod(result)


def axes_of_positions(layer: Any, shape: Shape) -> int:
    """Returns the number of axes of an input. A function on a sequence adds an axis of size 1."""
    return sum(size != 1 for size in shape) if isinstance(layer, TracedOperation) else len(shape)


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
    images = max(0, rank - _image_rank(layer, rank))  # axes of a batch of batches
    inner = rank - images
    axes = tuple(range(inner)) if is_channels_first(layer) else channels_last(inner)
    return (*range(images), *(images + axis for axis in axes))


def _image_rank(layer: Any, rank: int) -> int:
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


def has_image_layers(layer: Any) -> bool:
    """Returns True for a layer that is or contains a layer of images."""
    if not isinstance(layer, keras.layers.Layer):
        return False
    kinds = (*IMAGE_LAYERS, *IMAGE_SEQUENCE_LAYERS)
    return any(isinstance(inner, kinds) for inner in _keras.layers.all_layers(layer))


def weights_of(layer: Any) -> list[Any]:
    """Returns the weights of a layer. An operation has none."""
    return list(layer.weights) if isinstance(layer, keras.layers.Layer) else []


def unwrapped(layer: Any) -> Any:
    """Returns a layer without the wrappers of tfwd, and without `SpectralNormalization`."""
    wrappers: tuple[Any, ...] = (_keras.layer_wrappers.Wraps, *_NORMALIZED_KERNELS)
    while isinstance(layer, wrappers):
        layer = layer.layer
    return layer
