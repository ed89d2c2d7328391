"""Layout of a gain of `WeightNorm(gain=True)`, which has an entry for each position on an axis.

PyTorch's gain of a weight `[outputs, inputs, height, width]` is `[outputs, 1, 1, 1]`, so its shape
shows the axis of the weight.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from tfwd.pretrained.flatten_order.orders import Shape
from tfwd.pretrained.layouts import Layout
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import layout_along


class Gain(NamedTuple):
    """Gain of a weight.

    Attributes:
        target: The gain.
        weight: The weight.
        axis: int. The axis of the weight with an entry of the gain for each of its positions.
    """

    target: Target
    weight: Target
    axis: int


def gain_of(target: Target, by_id: Mapping[int, Target]) -> Gain | None:
    """Returns the gain that a variable is; None for other variables.

    Args:
        target: The variable.
        by_id: All variables, by their ids.
    """
    gains = getattr(target.owner, "gain_axes", {})
    number, axis = gains.get(id(target.variable), (None, 0))
    weight = by_id.get(number)
    return None if weight is None else Gain(target, weight, axis)


def gain_layout(
    gain: Gain, of_weight: Layout, in_file: Shape, in_keras: bool
) -> tuple[Layout, str | None]:
    """Returns the layout of a gain, whose entries have the order of its weight, and an error.

    Args:
        gain: The gain.
        of_weight: Layout in which the file has the weight.
        in_file: Shape of the gain in the file.
        in_keras: bool. True if the file has the gain in Keras's order.
    """
    path, size = gain.target.path, gain.target.shape[0]
    found = None if in_keras else layout_along(of_weight, gain.axis)
    if in_keras:
        axis, layout = gain.axis, Layout.unchanged((size,))
    elif found is None:
        return Layout.unchanged((size,)), (
            f"'{path}' has no order in PyTorch, because the positions on axis {gain.axis} of "
            f"'{gain.weight.path}' are on several axes there: write the gain to the file in "
            "Keras's order, and map to Key(..., transposed=False)"
        )
    else:
        axis, layout = found
    if not math.prod(in_file) == max(in_file, default=0) == size:
        return layout, None  # an error of the plan
    layout = dataclasses.replace(layout, shape=in_file)
    rank = len(of_weight.final if in_keras else of_weight.shape)
    if size == 1 or len(in_file) == 1 or (len(in_file) == rank and in_file[axis] == size):
        return layout, None
    expected = tuple(size if i == axis else 1 for i in range(rank))
    return layout, (
        f"'{path}' has an entry for each position on axis {axis} of '{gain.weight.path}' in the "
        f"file, so its tensor must be {expected} or {(size,)}, but it is {in_file}"
        + _other_axis(of_weight, in_file, in_keras)
    )


def _other_axis(of_weight: Layout, in_file: Shape, in_keras: bool) -> str:
    """Returns the advice to normalize along the axis that the file shows; "" if it shows none."""
    if len(in_file) != len(of_weight.final if in_keras else of_weight.shape):
        return ""
    there = in_file.index(max(in_file))
    for axis in range(len(of_weight.final)):
        along = (axis, None) if in_keras else layout_along(of_weight, axis)
        if along is not None and along[0] == there:
            return f". Use WeightNorm(axis={axis}, gain=True) for this weight, as in the file"
    return ""
