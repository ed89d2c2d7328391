"""How a tensor of a file becomes a variable's value: as it is, transposed, reshaped.

PyTorch's products have the outputs on the first axis of a kernel, Keras's on the last. Which axes
are outputs is known from the layer that owns the variable.
"""

from __future__ import annotations

import dataclasses
import math

import keras
import numpy as np

from tfwd.pretrained.targets import Target

_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Takes a tensor of a file to a variable: reshaped, its axes permuted, reshaped.

    Attributes:
        shape: what the file must have.
        split: the shape to which that is reshaped at first.
        axes: the order of axes after it.
        final: the variable's shape.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    final: tuple[int, ...]

    @property
    def words(self) -> str:
        """What is done, for people."""
        steps = []
        if self.axes != tuple(range(len(self.axes))):
            steps.append("transposed")
        if self.shape != self.final and len(self.shape) != len(self.final):
            steps.append("reshaped")
        return ", ".join(steps) or "as it is"

    @property
    def axis(self) -> int | None:
        """The variable's axis along which the file's rows lie; None if there is none."""
        if not self.shape or self.shape != self.split or len(self.final) != len(self.axes):
            return None
        return self.axes.index(0)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """The value of the variable; where there is an `axis`, of some rows a part of it."""
        if self.axis is not None:
            return np.transpose(values, self.axes)
        return np.transpose(values.reshape(self.split), self.axes).reshape(self.final)


def layout_of(target: Target, transposed: bool) -> Layout:
    """How a file has a variable.

    Args:
        target: the variable.
        transposed: whether kernels in the file have the outputs first, as PyTorch's.
    """
    shape = target.shape
    plain = Layout(shape, shape, tuple(range(len(shape))), shape)
    owner, name = target.owner, target.name
    if isinstance(owner, keras.layers.EinsumDense):
        if name == "kernel":
            return _of_einsum(owner, shape) if transposed else plain
        flat = (math.prod(shape),)
        return Layout(flat, shape, plain.axes, shape) if transposed else plain
    if not transposed or name not in ("kernel", "depthwise_kernel"):
        return plain
    if isinstance(owner, keras.layers.Dense):
        return _permuted(shape, (1, 0))
    if isinstance(owner, _CONVOLUTIONS):  # outputs, inputs, places
        places = len(shape) - 2
        return _permuted(shape, (*range(2, places + 2), 1, 0))
    return plain


def _permuted(shape: tuple[int, ...], axes: tuple[int, ...]) -> Layout:
    there = tuple(shape[axes.index(i)] for i in range(len(axes)))
    return Layout(there, there, axes, shape)


def _of_einsum(owner: keras.layers.EinsumDense, shape: tuple[int, ...]) -> Layout:
    """A kernel as a matrix of all outputs by all inputs, of which each may be several axes."""
    operands, _, output = owner.equation.replace(" ", "").partition("->")
    kernel = operands.partition(",")[2].replace("...", "")
    outputs = [axis for axis in kernel if axis in output]
    inputs = [axis for axis in kernel if axis not in output]
    size = dict(zip(kernel, shape, strict=True))
    order = [*outputs, *inputs]
    split = tuple(size[axis] for axis in order)
    there = (math.prod(size[a] for a in outputs), math.prod(size[a] for a in inputs))
    return Layout(there, split, tuple(order.index(axis) for axis in kernel), shape)
