"""Unknown orders at layers whose calls no trace shows. A recorder gets them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import OrderRecorder
from tfwd.pretrained.flatten_order.orders import Shape, UnknownFeatureOrder
from tfwd.pretrained.flatten_order.unseen_layers import (
    Side,
    before_convolutions,
    kernel_owners,
    may_be_image,
    number_of_outputs,
    takes_images,
    unexplained_sizes,
)

_AXES: dict[Side, int] = {"inputs": 0, "outputs": -1}  # of a kernel, by the side of its layer


def record_unexplained(recorder: OrderRecorder, layers: Sequence[Any], sizes: set[int]) -> None:
    """Records an unknown order for kernels in layers whose calls are not known.

    Args:
        recorder: The recorder.
        layers: Layers outside all graphs, or in a custom layer. One of them takes images.
        sizes: Sizes of the last axes of the tensors that these layers take.
    """
    record_kernels(recorder, layers)
    for size in unexplained_sizes(layers, sizes):
        reason = f"the model does not show where the {size} features come from"
        record_beside(recorder, layers, size, reason)
    for layer in before_convolutions(layers):
        reason = "the model does not show whether it makes an image of these outputs"
        recorder.record(layer, "outputs", UnknownFeatureOrder(reason))


def record_kernels(recorder: OrderRecorder, layers: Sequence[Any]) -> None:
    """Records that a flattened image may be the input of any kernel of some layers."""
    reason = "the model does not show whether it flattens an image for this layer"
    for layer in layers:
        for owner in kernel_owners(layer):
            recorder.record(owner, "inputs", UnknownFeatureOrder(reason))


def record_hidden_reshape(recorder: OrderRecorder, caller: Any, layers: Sequence[Any]) -> None:
    """Records unknown orders for layers that code with a reshape calls.

    Args:
        recorder: The recorder.
        caller: Layer whose code names a reshape, and is not traced.
        layers: Layers that it may call.
    """
    reason = f"a method of {type(caller).__name__}, which tfwd does not trace, names a reshape"
    unknown = UnknownFeatureOrder(reason)
    sizes = set[int]()  # of features that may be an image
    for owner in (owner for layer in layers for owner in kernel_owners(layer)):
        for side, axis in _AXES.items():
            size = int(owner.kernel.shape[axis])
            if may_be_image(size):
                recorder.record(owner, side, unknown)
                sizes.add(size)
    for size in sizes:
        record_unseen(recorder, "inputs", (size,), layers, reason)


def record_beside(recorder: OrderRecorder, layers: Sequence[Any], size: int, reason: str) -> None:
    """Records an unknown order for normalizations and tables that have a weight per feature.

    Args:
        recorder: The recorder.
        layers: Layers that may use the features.
        size: int. Number of features whose order is unknown.
        reason: Why the order is unknown.
    """
    unknown = UnknownFeatureOrder(reason)
    kernels = [owner.kernel for each in layers for owner in kernel_owners(each)]
    is_taken = any(kernel.shape[0] == size for kernel in kernels)
    for layer in layers:
        if isinstance(layer, keras.layers.Dense) and layer.units == size and not is_taken:
            recorder.record(layer, "outputs", unknown)
        shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(layer)]
        if isinstance(layer, ORDER_PRESERVING_LAYERS) and (size,) in shapes:
            recorder.record(layer, "inputs", unknown)
        if isinstance(layer, keras.layers.Embedding) and layer.output_dim == size:
            recorder.record(layer, "outputs", unknown)


def record_unseen(
    recorder: OrderRecorder, side: Side, shape: Shape, layers: Sequence[Any], reason: str
) -> None:
    """Records an unknown order for layers with a weight on all entries of a tensor.

    Args:
        recorder: The recorder.
        side: "inputs" if the layer may take the tensor, "outputs" if it may return the tensor.
        shape: Shape of the tensor.
        layers: Layers outside all graphs, or in a custom layer.
        reason: Why the order is unknown.
    """
    if side == "outputs" and -1 in shape:
        size = math.prod(each for each in shape if each != -1)
        for owner in layers:
            if isinstance(owner, keras.layers.Dense) and owner.units % size == 0:
                recorder.record(owner, side, UnknownFeatureOrder(reason))
        return
    if None in shape:
        return
    axis = _AXES[side]
    for owner in layers:
        if isinstance(owner, ORDER_PRESERVING_LAYERS) and takes_images(owner):
            continue
        shapes = [tuple(weight.shape) for weight in _keras.layers.held_weights(owner)]
        is_kernel = not isinstance(owner, ORDER_PRESERVING_LAYERS) and _keras.is_of_keras(
            type(owner), "call"
        )
        if any(len(each) > is_kernel and each[axis] == math.prod(shape) for each in shapes):
            recorder.record(owner, side, UnknownFeatureOrder(reason))
        # A sum or a product with the flattened tensor is possible.
        if side == "inputs" and number_of_outputs(owner) == math.prod(shape):
            recorder.record(owner, "outputs", UnknownFeatureOrder(reason))
