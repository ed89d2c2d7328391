"""Rules of normalizations, of slopes per channel, and of a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order import layer_groups as groups
from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.needed_places import (
    need_last,
    need_last_for_softmax,
    need_second,
    with_weights,
)
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes


def normalization(call: Call) -> list[TensorAxes]:
    """Returns the output of a normalization with a weight for each entry of some axes."""
    layer, tensor = call.layer, call.tensors[0]
    rank = len(tensor.axes)
    numbers = _normalized_axes(layer, rank)
    axes = [tensor.axes[number] for number in numbers]
    used = [n for n in numbers if tensor.axes[n] is not None]
    several = f"'{call.name}' normalizes some axes of an image of {tensor.sizes[1:]}"
    if len(used) == 1:
        call.recorder.record_axis(layer, "inputs", tensor.axes[used[0]])
    else:
        call.recorder.record_plain([layer], "inputs", axes, several)
    groups_of = getattr(layer, "groups", 1)
    if isinstance(layer, keras.layers.GroupNormalization) and groups_of not in (
        *(1, -1),
        tensor.sizes[-1],
    ):
        text = f"'{call.name}' normalizes groups of flattened features"
        call.recorder.record_plain([layer], "inputs", axes, text)
        for axis in axes:
            if axis is not None:
                call.recorder.must_be_plain(axis, text)
    if len(used) > 1 and _keras.layers.held_weights(layer):
        tensor = with_weights(tensor, used, call.name)
    if isinstance(layer, groups.LAST_AXES_LAYERS):
        return [need_last(tensor, used, several)]
    if isinstance(layer, groups.FIRST_AXIS_LAYERS):
        _need_second(call, tensor, used)
    return [tensor]


def slopes(call: Call) -> list[TensorAxes]:
    """Returns the output of a `PReLU`, with a slope for each entry of some axes."""
    layer, tensor = call.layer, call.tensors[0]
    used = [number + 1 for number, size in enumerate(layer.alpha.shape) if size != 1]
    if len(used) == 1:
        call.recorder.record_axis(layer, "inputs", tensor.axes[used[0]])
        _need_second(call, tensor, used)
        return [tensor]
    text = f"'{call.name}' has weights for the positions of an image of {tensor.sizes[1:]}"
    call.recorder.record_plain([layer], "inputs", [tensor.axes[n] for n in used], text)
    return [with_weights(tensor, used, call.name) if used else tensor]


def after_softmax(call: Call, result: TensorAxes, function: Any) -> TensorAxes:
    """Returns the output after a softmax over the last axis, which PyTorch may have last.

    Args:
        call: Call of a layer.
        result: The layer's output.
        function: Activation function of the layer, or a `Softmax` layer.
    """
    name = getattr(function, "__name__", "")
    if "softmax" not in name and not isinstance(function, keras.layers.Softmax):
        return result
    rank = len(result.axes)
    numbers = _normalized_axes(function, rank)
    used = [n for n in numbers if 0 < n < rank and result.axes[n] is not None]
    if rank - 1 in used and len(used) < rank - 1 and len(result.used) > 2:
        return need_last_for_softmax(result, used, call.name)
    return result


def _normalized_axes(layer: Any, rank: int) -> list[int]:
    """Returns the numbers of a normalization's axes, with the batch."""
    axis = getattr(layer, "axis", -1)
    if axis is None:
        return []
    axes = [axis] if isinstance(axis, int) else list(axis)
    return sorted(each % rank for each in axes)


def _need_second(call: Call, tensor: TensorAxes, numbers: Sequence[int]) -> None:
    """Notes that PyTorch's layer has the channels second, if the layout allows it."""
    if len(numbers) != 1 or need_second(tensor, numbers[0], call.name):
        return
    if numbers[0] != len(tensor.axes) - 1:
        text = f"'{call.name}' has a weight for each position of an image"
        call.recorder.record_layout([call.layer], None, tensor.places, text)
