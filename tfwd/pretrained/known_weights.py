"""Facts about a weight that its layer shows: inputs, outputs, and the axes in PyTorch.

PyTorch has the outputs on the first axis of a kernel, and Keras on the last. The layer determines
which axes are outputs. tfwd knows them for Keras's own layers. For any other layer, the mapping
must give the layout.
"""

from __future__ import annotations

import inspect

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.einsum_axes import einsum_terms
from tfwd.pretrained.flatten_order.layer_groups import (
    NORMALIZED_KERNELS,
    ORDER_PRESERVING_LAYERS,
    unwrapped,
)
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import FeatureOrder, UnknownFeatureOrder
from tfwd.pretrained.target_variables import Target

CONVOLUTIONS = (
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)
DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
CELLS = (keras.layers.SimpleRNNCell, keras.layers.LSTMCell, keras.layers.GRUCell)
WITH_GATES = (keras.layers.LSTMCell, keras.layers.GRUCell)
_NORMALIZATIONS = (keras.layers.BatchNormalization, keras.layers.GroupNormalization)
# Names in code that may read each weight of a layer.
_ALL_WEIGHTS = (
    *("weights", "trainable_weights", "variables", "trainable_variables"),
    *("get_weights", "getattr", "vars", "__dict__"),
)
MATRICES = ("kernel", "recurrent_kernel", "depthwise_kernel", "pointwise_kernel")


def feature_sides(target: Target) -> tuple[Side | None, Side | None]:
    """Returns what a variable's first axis and its second axis are: "inputs", "outputs" or None."""
    owner, name, rank = unwrapped(target.owner), target.name, len(target.shape)
    if isinstance(owner, (keras.layers.Dense, *CELLS)):
        if rank == 2 and name == "kernel":
            return "inputs", "outputs"
        if name == "lora_kernel_a":
            return "inputs", None
        if name == "lora_kernel_b":
            return None, "outputs"
        if name in ("bias", "recurrent_kernel"):
            return ("outputs" if rank == 1 or name != "bias" else None), None
    if is_in_einsum(target):
        return ("inputs" if name == "kernel" else None), "outputs"
    if name == "bias" and isinstance(owner, CONVOLUTIONS) and _keras.is_of_keras(type(owner)):
        return "outputs", None
    return "inputs", "outputs"


def feature_orders(target: Target, orders: LayerOrders) -> tuple[FeatureOrder, FeatureOrder]:
    """Returns the orders of the features on a variable's first axis, and on its second axis."""
    first, second = feature_sides(target)
    inputs, outputs = orders.of(first), orders.of(second)
    if has_sides(target):
        return inputs, outputs
    rank = len(target.shape)
    if rank not in (1, 2) and not (rank > 2 and isinstance(inputs, UnknownFeatureOrder)):
        inputs = None
    if not isinstance(outputs, UnknownFeatureOrder) and rank != 2:
        outputs = None
    return inputs, outputs if rank else None


def has_sides(target: Target) -> bool:
    """Returns True if the layer's formula shows which axis of a weight are inputs or outputs."""
    names = (*MATRICES, "bias", "lora_kernel_a", "lora_kernel_b")
    is_dense = isinstance(unwrapped(target.owner), (keras.layers.Dense, *CELLS))
    return is_in_einsum(target) or (is_dense and target.name in names)


def has_known_use(target: Target) -> bool:
    """Returns True if tfwd knows how the layer uses a weight on features."""
    owner = unwrapped(target.owner)
    convolutions = (*CONVOLUTIONS, *DEPTHWISE)
    is_convolution = isinstance(owner, convolutions) and _keras.is_of_keras(type(owner))
    return has_sides(target) or is_convolution or isinstance(owner, ORDER_PRESERVING_LAYERS)


def is_in_einsum(target: Target) -> bool:
    """Returns True for the kernel and the bias of an einsum layer, and False for LoRA's weights."""
    owner = unwrapped(target.owner)
    return isinstance(owner, keras.layers.EinsumDense) and target.name in ("kernel", "bias")


def is_table(target: Target) -> bool:
    """Returns True for the table of an `Embedding`, [rows, features]."""
    return isinstance(target.owner, keras.layers.Embedding) and target.name == "embeddings"


def is_power_iteration(target: Target) -> bool:
    """Returns True for the vector of a `SpectralNormalization`, which no output depends on."""
    return target.name == "vector_u" and isinstance(target.owner, NORMALIZED_KERNELS)


def is_known_layout(target: Target) -> bool:
    """Returns True if owner and name determine the order of a variable's axes in PyTorch."""
    owner, name = target.owner, target.name
    if _may_have_gates(target):
        return False
    if len(target.shape) < 2:
        return True
    if not _is_made_by_keras(target):
        return False
    if isinstance(owner, keras.layers.Embedding):
        return name in ("embeddings", "reverse_embeddings")
    if isinstance(owner, _NORMALIZATIONS):  # Keras 2 has weights for several axes
        return _keras.is_of_keras(type(owner)) and sum(size > 1 for size in target.shape) < 2
    if is_slope_per_feature(target):
        return True
    if isinstance(owner, keras.layers.EinsumDense):
        # PyTorch has no layer with a kernel per position, or with a kernel that is summed first.
        terms = einsum_terms(owner)
        once = all((axis in terms.inputs) != (axis in terms.output) for axis in terms.kernel)
        return name == "bias" or (name == "kernel" and once)
    if isinstance(owner, DEPTHWISE):  # its kernel has different names in Keras 2 and Keras 3
        return name in ("kernel", "depthwise_kernel")
    if isinstance(owner, _SEPARABLE):
        return name in ("depthwise_kernel", "pointwise_kernel")
    if isinstance(owner, CELLS):
        return name in ("kernel", "recurrent_kernel", "bias")
    return isinstance(owner, (keras.layers.Dense, *CONVOLUTIONS)) and name == "kernel"


def _is_made_by_keras(target: Target) -> bool:
    """Returns False if a user's class makes the weight, or divides it into gates by itself.

    Keras's own `build` makes the weight if the class has no other `build`, or if this one calls it.
    """
    owner, cls = target.owner, type(target.owner)
    if _keras.is_of_keras(cls) or cls.__module__.startswith("tfwd."):
        return True
    if _is_read_by_own_call(target):
        # Its own formula may divide the axis into gates by itself, or multiply from another side.
        is_square = len(target.shape) == 2 and target.shape[0] == target.shape[1]
        if is_square or isinstance(owner, WITH_GATES):
            return False
    own_build = inspect.unwrap(cls.build)
    return _keras.is_of_keras(cls, "build") or "build" in own_build.__code__.co_names


def _may_have_gates(target: Target) -> bool:
    """Returns True for a vector of a user's cell that may have an entry for each gate."""
    owner = target.owner
    if len(target.shape) != 1:
        return False
    if is_convolutional_lstm(target):
        return target.name == "bias"
    if not isinstance(owner, WITH_GATES):
        return False
    gates = 3 if isinstance(owner, keras.layers.GRUCell) else 4
    is_own = target.name != "bias" or _is_read_by_own_call(target)
    return is_own and target.shape[0] == gates * owner.units


def _is_read_by_own_call(target: Target) -> bool:
    """Returns True if a user wrote the `call` of the weight's layer, and the code reads it."""
    if _keras.is_of_keras(type(target.owner), "call"):
        return False
    names = _keras.names_in_code(target.owner, left_out=("build",))
    return not names.isdisjoint({target.name, f"_{target.name}", *_ALL_WEIGHTS})


def is_convolutional_lstm(target: Target) -> bool:
    """Returns True for a weight of a cell of `ConvLSTM2D`, whose gates PyTorch's libraries order.

    PyTorch has no such layer. Keras has the gates input, forget, cell, output.
    """
    return type(target.owner).__name__ == "ConvLSTMCell"


def is_slope_per_feature(target: Target) -> bool:
    """Returns True for the slopes of a `PReLU` that all positions share, as in PyTorch."""
    is_vector = sum(size > 1 for size in target.shape) < 2
    return isinstance(target.owner, keras.layers.PReLU) and target.name == "alpha" and is_vector
