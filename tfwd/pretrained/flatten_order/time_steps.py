"""Rule of a layer that is called on each step of a sequence."""

from __future__ import annotations

import keras

from tfwd.pretrained.flatten_order import layer_groups as groups
from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layer_call import Call
from tfwd.pretrained.flatten_order.layouts_in_torch import Layout, Place, orders_at_end
from tfwd.pretrained.flatten_order.made_axes import MergedAxis
from tfwd.pretrained.flatten_order.tensor_axes import TensorAxes, made


def time_distributed(call: Call) -> list[TensorAxes]:
    """Returns the outputs of a layer that is called on each step of a sequence."""
    inner = groups.unwrapped(call.layer.layer)
    if isinstance(inner, keras.layers.Dense):  # it acts on the last axis, also without the wrapper
        return call.run(inner, call.tensors, call.shapes)
    reason = f"'{call.name}' runs its layer along an axis of an image"
    for tensor in call.tensors:
        if not _may_move_channels(tensor):
            _need_time_first(tensor, reason)
    is_first = all(map(_has_time_first, call.tensors))
    steps = [_step(tensor, reason) for tensor in call.tensors]
    results = call.run(inner, steps, [(shape[0], *shape[2:]) for shape in call.shapes])
    outer = {}
    for tensor, step in zip(call.tensors, steps, strict=True):
        outer[id(step.layout.find())] = tensor
        time = tensor.places[1]
        if step.layout.is_restricted and time is not None and step.layout.possible:
            orders = {(each[0], time, *each[1:]) for each in step.layout.possible}
            tensor.layout.restrict(orders, reason)
    if not is_first:
        return [_along_an_image(result, call.tensors[0].axes[1], reason) for result in results]
    found = []
    for result in results:
        same = outer.get(id(result.layout.find()))  # it has the axes of this input
        found.append(_with_time(result, same or call.tensors[0], keeps_layout=same is not None))
    return found


def _may_move_channels(tensor: TensorAxes) -> bool:
    """Returns True if a layer on the rows of an image does not show the order of the image."""
    return tensor.is_image_of_caller() and len(tensor.axes) == 4


def _need_time_first(tensor: TensorAxes, reason: str) -> None:
    """Restricts an open layout to those with the time behind the batch."""
    time, layout = tensor.places[1], tensor.layout
    if time is None or len(tensor.used) < 3 or not layout.is_open:
        return
    orders = layout.possible or orders_at_end(tensor.used, set())
    layout.restrict({each for each in orders if each[1] is time.find()}, reason)


def _has_time_first(tensor: TensorAxes) -> bool:
    """Returns True if PyTorch may have the time behind the batch."""
    time, possible = tensor.places[1], tensor.layout.possible
    if time is None or len(tensor.used) < 3 or tensor.layout.find().step is not None:
        return True
    return possible is not None and any(each[1] is time.find() for each in possible)


def _step(tensor: TensorAxes, reason: str) -> TensorAxes:
    """Returns one step of a sequence."""
    layout, time = tensor.layout, tensor.places[1]
    step = layout.find().step
    if _may_move_channels(tensor):
        step = Layout(None, reason=layout.reason)
    elif step is None or layout.is_restricted:
        possible = layout.possible
        if possible is not None and time is not None:
            possible = {(each[0], *each[2:]) for each in possible if each[1] is time.find()}
        is_first = _has_time_first(tensor)
        step = Layout(
            possible or None,
            reason=layout.reason if is_first else reason,
            is_open=layout.is_open and is_first,
            natural=[place for place in layout.natural if time is None or place is not time.find()],
            is_contradictory=not is_first or layout.is_contradictory,
        )
    axes, places = (tensor.axes[0], *tensor.axes[2:]), (tensor.places[0], *tensor.places[2:])
    return TensorAxes(axes, places, step)


def _with_time(step: TensorAxes, tensor: TensorAxes, *, keeps_layout: bool) -> TensorAxes:
    """Returns the output of a layer on all steps.

    Args:
        step: The output for one step.
        tensor: An input, with the time.
        keeps_layout: True if the output has the axes of this input.
    """
    axes = (step.axes[0], tensor.axes[1], *step.axes[1:])
    if keeps_layout:
        places = (step.places[0], tensor.places[1], *step.places[1:])
        return TensorAxes(axes, places, tensor.layout)
    time = None if tensor.axes[1] is None else Place()
    possible = step.layout.possible
    is_shown_later = step.layout.is_open and possible is None
    if time is not None and possible is not None:
        possible = {(each[0], time, *each[1:]) for each in possible}
    layout = Layout(
        possible,
        reason=step.layout.reason,
        natural=[*step.layout.natural[:1], *([time] if time else []), *step.layout.natural[1:]],
        is_contradictory=step.layout.is_contradictory,
    )
    if is_shown_later:
        layout.step = step.layout.find()
    return TensorAxes(axes, (step.places[0], time, *step.places[1:]), layout)


def _along_an_image(step: TensorAxes, time: Axis | None, reason: str) -> TensorAxes:
    """Returns the output of a layer that PyTorch's model cannot call in this way."""
    axes = (step.axes[0], time, *step.axes[1:])
    for axis in axes:
        if isinstance(axis, MergedAxis):
            axis.doubts(reason)
    return made(axes, reason, natural=(), is_contradictory=True)
