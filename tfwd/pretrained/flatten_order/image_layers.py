"""Rules of layers on images, which PyTorch has with the channels first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tfwd import _keras
from tfwd.pretrained.flatten_order import layer_groups as groups
from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.layouts_in_torch import Place
from tfwd.pretrained.flatten_order.made_axes import DependentAxis, dependent_axis
from tfwd.pretrained.flatten_order.orders import CHANGES_FEATURES, MAY_BE_EXCHANGED
from tfwd.pretrained.flatten_order.pieces import CroppedAxis
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes, like, made, with_unknown_axes


def convolution(call: Call) -> list[TensorAxes]:
    """Returns the output of a convolution, whose channels are first in PyTorch."""
    layer, tensor, shape = call.layer, call.tensors[0], call.shapes[0]
    rank = len(tensor.axes)
    order, channels = _image_order(layer, rank), _channel_axis(layer, rank)
    reason = f"'{call.name}' takes an image with the channels first"
    positions = [n for n in range(1, rank) if n != channels and tensor.axes[n] is not None]
    places = [tensor.places[n] for n in positions]
    layout = tensor.layout
    used = [place for place in places if place is not None]
    is_natural = layout.is_natural(used)
    layout.restrict([_needed(tensor, order)], reason)
    is_depthwise = isinstance(layer, groups.DEPTHWISE_LAYERS)
    flattened = f"'{call.name}' has flattened features as inputs"
    call.recorder.record_plain([layer], "inputs", [tensor.axes[channels]], flattened)
    exchanged = f"'{call.name}' is on axes of {tensor.sizes[1:]} {MAY_BE_EXCHANGED}"
    if math.prod(layer.kernel_size) > 1:
        steps = [tensor.axes[n] for n in positions]
        call.recorder.record_plain([layer], "inputs", steps, exchanged)
    is_exchanged = len(positions) > 1 and not (is_natural or layout.is_natural(used))
    if is_exchanged and math.prod(layer.kernel_size) > 1:
        call.recorder.record_layout([layer], None, places, exchanged)
    axes: list[Axis | None] = []
    for number, size in enumerate(shape):
        if number == channels and not is_depthwise:
            axes.append(call.features(size))
        else:
            axes.append(_resized(call, tensor.axes[number], size))
    if is_exchanged:
        return [made(axes, exchanged, natural=())]
    return [made(axes, "", _image_order(layer, len(shape)))]


def recurrent_convolution(call: Call) -> list[TensorAxes]:
    """Returns the outputs of a recurrent layer of convolutions."""
    layer, tensor, shape = call.layer, call.tensors[0], call.shapes[0]
    rank = len(tensor.axes)
    order = _image_order(layer, rank)
    reason = f"'{call.name}' takes a sequence of images with the channels first"
    tensor.layout.restrict([_needed(tensor, order)], reason)
    exchanged = f"'{call.name}' is on axes of {tensor.sizes[1:]} {MAY_BE_EXCHANGED}"
    inside = _keras.layers.all_layers(layer)
    call.recorder.record_plain(inside, "inputs", tensor.entries, exchanged)
    call.recorder.record_layout(inside, tensor.layout, tensor.places[1:-1], exchanged)
    channels = len(shape) - 1 if not groups.is_channels_first(layer.cell) else len(shape) - 3
    before = tensor.axes if len(shape) == rank else (tensor.axes[0], *tensor.axes[2:])
    axes = [_resized(call, axis, size) for axis, size in zip(before, shape, strict=True)]
    axes[channels] = call.features(shape[channels])
    result = made(axes, "", _image_order(layer, len(shape)))
    return [result, *other_outputs(call)]


def resized_image(call: Call) -> list[TensorAxes]:
    """Returns the output of a pooling, padding, cropping or resizing layer."""
    layer, tensor, shape = call.layer, call.tensors[0], call.shapes[0]
    order = _image_order(layer, len(tensor.axes))
    channels = _channel_axis(layer, len(tensor.axes))
    axes = [
        axis if n in (0, channels) else _with_other_entries(call, axis, size)
        for n, (axis, size) in enumerate(zip(tensor.axes, shape, strict=True))
    ]
    needed, layout = _needed(tensor, order), tensor.layout
    reason = f"'{call.name}' is on axes that PyTorch's model may have elsewhere"
    is_made = layout.is_open and layout.possible is None
    is_sequence = layout.is_open and len(tensor.axes) < 4
    if is_sequence or (is_made and not isinstance(layer, groups.UPSAMPLING_LAYERS)):
        layout.drop_default(reason)
        return [like(tensor, axes, reason)]
    if tensor.is_as_in_keras() and not layout.allows(needed):
        text = f"'{call.name}' is on a sequence"
        layout.contradict(text, is_sequence=len(tensor.used) < 4)
        return [made(axes, text, is_contradictory=True, is_sequence=len(tensor.used) < 4)]
    if layout.restrict([needed], reason):
        return [made(axes, "", order)]
    return [like(tensor, axes)]


def _image_order(layer: Any, rank: int) -> list[int]:
    """Returns the numbers of the axes of an image in PyTorch's order, with the batch."""
    in_torch = groups.image_axes(layer, rank - 1)
    order = sorted(range(rank - 1), key=in_torch.__getitem__)
    return [0, *(number + 1 for number in order)]


def _channel_axis(layer: Any, rank: int) -> int:
    """Returns the number of the axis of channels, with the batch."""
    return groups.image_axes(layer, rank - 1).index(_first_of_image(layer, rank)) + 1


def _first_of_image(layer: Any, rank: int) -> int:
    """Returns the position in PyTorch of the channels, without the batch."""
    return max(0, rank - 1 - groups.image_rank(layer, rank - 1))


def _needed(tensor: TensorAxes, order: Sequence[int]) -> tuple[Place, ...]:
    """Returns the places of a tensor in an order of its axes."""
    found = (tensor.places[number] for number in order)
    return tuple(place for place in found if place is not None)


def _with_other_entries(call: Call, axis: Axis | None, size: int | None) -> Axis | None:
    """Returns an axis after a layer that combines its entries, also if its size stays."""
    if size == 1 or axis is None:
        call.recorder.record_reduction(axis)
        return _resized(call, axis, size)
    kind = CroppedAxis if isinstance(call.layer, groups.CROPPING_LAYERS) else DependentAxis
    return kind(size, [axis], f"'{call.name}' {CHANGES_FEATURES}")


def _resized(call: Call, axis: Axis | None, size: int | None) -> Axis | None:
    """Returns an axis after a layer that may change its size."""
    if size == 1:
        return None
    if axis is not None and axis.size == size:
        return axis
    reason = f"'{call.name}' {CHANGES_FEATURES}"
    return dependent_axis(size, [axis], reason)


def other_outputs(call: Call) -> list[TensorAxes]:
    """Returns the second and further outputs of a layer."""
    reason = f"the states of '{call.name}'"
    return [with_unknown_axes(shape, reason, call.batch) for shape in call.shapes[1:]]
