"""Layouts: how a file's tensor becomes a variable's value (unchanged, transposed, reshaped).

PyTorch has the outputs on the first axis of a kernel, and Keras on the last. The layer that owns a
variable determines which axes are outputs. tfwd knows that for Keras's own layers. For any other
layer the mapping must say it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np

from tfwd.pretrained.flatten_order import ENTRYWISE, Flat, Orders, Unclear, given_order
from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.sources.base import Entry
from tfwd.pretrained.targets import Target

_CONVOLUTIONS = (
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
)
_DEPTHWISE = (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)
_SEPARABLE = (keras.layers.SeparableConv1D, keras.layers.SeparableConv2D)
_CELLS = (keras.layers.SimpleRNNCell, keras.layers.LSTMCell, keras.layers.GRUCell)
_PLAIN = (
    keras.layers.Embedding,
    keras.layers.BatchNormalization,
    keras.layers.GroupNormalization,
)
_MATRICES = ("kernel", "recurrent_kernel", "depthwise_kernel", "pointwise_kernel")
# PyTorch has the gates of a GRU in the order reset, update, new; Keras has update, reset, new.
_GRU_GATES = (1, 0, 2)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Conversion of a file's tensor to a variable: reshape, permute the axes, reshape.

    Attributes:
        shape: the required shape in the file.
        split: the shape after the first reshape.
        axes: the order of the axes after that.
        final: the variable's shape.
        order: the order of the entries along the first axis of `split`; None for the file's order.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    final: tuple[int, ...]
    order: tuple[int, ...] | None = None

    @property
    def words(self) -> str:
        """Returns the conversion in words."""
        steps = []
        if self.axes != tuple(range(len(self.axes))):
            steps.append("transposed")
        if self.shape != self.final and len(self.shape) != len(self.final):
            steps.append("reshaped")
        if len(self.split) > len(self.final) == len(self.shape) and self.order is None:
            steps = ["features reordered"] if len(self.final) == 1 else [*steps, "reordered"]
        if self.order is not None:
            steps.append("gates reordered")
        return ", ".join(steps) or "as it is"

    def merged(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns the same permutation with as few axes as possible.

        Returns:
            The sizes of the file's axes and their order in the variable. Neighbours that stay
            neighbours are merged. One axis remains if the file has the variable unchanged. None if
            the first axis is not the file's rows, or if the rows are reordered.
        """
        if self.order is not None:
            return None
        groups: list[list[int]] = []
        for axis in (axis for axis in self.axes if self.split[axis] != 1):
            between = range(groups[-1][-1] + 1, axis) if groups else ()
            if groups and axis > groups[-1][-1] and all(self.split[i] == 1 for i in between):
                groups[-1].append(axis)
            else:
                groups.append([axis])
        if len(groups) < 2:
            return (math.prod(self.split),), (0,)
        there = sorted(groups)
        sizes = tuple(math.prod(self.split[axis] for axis in group) for group in there)
        if sizes[0] != self.shape[0]:
            return None
        return sizes, tuple(there.index(group) for group in groups)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Returns the value of the variable."""
        split = values.reshape(self.split)
        if self.order is not None:
            split = split[list(self.order)]
        return np.transpose(split, self.axes).reshape(self.final)


@dataclasses.dataclass(frozen=True)
class Step:
    """Variable and the tensor that it gets.

    Attributes:
        target: the variable.
        key: str. The tensor's name in the file.
        entry: the tensor's shape and dtype in the file.
        layout: the conversion of the tensor.
        copies: keys that must hold equal tensors.
    """

    target: Target
    key: str
    entry: Entry
    layout: Layout
    copies: tuple[str, ...] = ()


def layout_of(target: Target, transposed: bool, orders: Orders) -> Layout:
    """Returns the layout in which a file holds a variable.

    Args:
        target: the variable.
        transposed: bool. True if kernels in the file have the outputs first, as in PyTorch.
        orders: the orders of the owner's inputs and outputs.
    """
    layout = _layout_by_owner(target, transposed)
    inputs, outputs = _orders_of_variable(target, orders)
    if not transposed or not (isinstance(inputs, Flat) or isinstance(outputs, Flat)):
        return layout
    shape = target.shape
    first = _split_axis(inputs, shape[0])
    if len(shape) == 1:
        return Layout(shape, first.there, first.axes, shape)
    if layout.order is not None:  # a GRU
        last = Flat((3, shape[1] // 3), (0, 1))
    else:
        last = _split_axis(outputs, shape[1])
    there = (*last.there, *first.there)
    axes = (*(len(last.axes) + axis for axis in first.axes), *last.axes)
    return Layout(layout.shape, there, axes, shape, layout.order)


def with_given(orders: Orders | None, key: Key) -> Orders:
    """Returns the orders of a layer's inputs and outputs, where the key may define the first."""
    orders = orders or Orders()
    if key.flattened is None:
        return orders
    return Orders(given_order(tuple(key.flattened)), orders.outputs)


def _orders_of_variable(target: Target, orders: Orders) -> tuple[Any, Any]:
    """Returns the orders on a variable's first axis, and on its second axis."""
    owner, name, rank = target.owner, target.name, len(target.shape)
    if isinstance(owner, (keras.layers.Dense, *_CELLS)):
        if rank == 2 and name == "kernel":
            return orders.inputs, orders.outputs
        return (orders.outputs if rank == 1 and name == "bias" else None), None
    outputs = orders.outputs if isinstance(orders.outputs, Unclear) and rank else None
    if rank == 2 or (rank == 1 and isinstance(owner, ENTRYWISE)):
        return orders.inputs, outputs
    return (orders.inputs if isinstance(orders.inputs, Unclear) and rank else None), outputs


def _split_axis(order: Flat | None, size: int) -> Flat:
    return order if isinstance(order, Flat) else Flat((size,), (0,))


def _layout_by_owner(target: Target, transposed: bool) -> Layout:
    """Returns the layout of a variable whose inputs and outputs are not flattened images."""
    shape = target.shape
    plain = Layout(shape, shape, tuple(range(len(shape))), shape)
    owner, name = target.owner, target.name
    if not transposed:
        return plain
    if isinstance(owner, keras.layers.EinsumDense):
        if name == "kernel":
            return _of_einsum(owner, shape)
        return Layout((math.prod(shape),), shape, plain.axes, shape)
    if _has_slope_per_feature(target):
        return Layout((math.prod(shape),), shape, plain.axes, shape)
    if not _is_known(target):
        return _permuted(shape, (1, 0)) if len(shape) == 2 else plain
    if name not in _MATRICES:
        return plain
    if isinstance(owner, _DEPTHWISE) or name == "depthwise_kernel":
        return _of_depthwise(shape)
    if isinstance(owner, keras.layers.GRUCell):
        return _of_gru(shape)
    if isinstance(owner, (keras.layers.Dense, *_CELLS)):
        return _permuted(shape, (1, 0))
    if isinstance(owner, _CONVOLUTIONS):
        # PyTorch: outputs, inputs, positions; transposed: inputs, outputs, positions.
        # Keras: positions, inputs, outputs; transposed: positions, outputs, inputs.
        positions = len(shape) - 2
        return _permuted(shape, (*range(2, positions + 2), 1, 0))
    return plain


def reason_unknown(target: Target, key: Key, transposed: bool, orders: Orders) -> str | None:
    """Returns why a variable's layout in a PyTorch file is unknown; None if it is known.

    Args:
        target, transposed, orders: as in `layout_of`.
        key: the variable's key, which may define `transposed` itself.
    """
    if not transposed:
        return None
    if reason := _reason_of_order(target, key, orders):
        return reason
    owner, shape, said = target.owner, target.shape, key.transposed is not None
    kind = type(owner).__name__
    front = f"'{target.path}' belongs to a {kind}"
    if isinstance(owner, keras.layers.GRUCell) and not owner.reset_after:
        if said or target.name not in _MATRICES:
            return None
        return (
            f"{front} with reset_after=False, whose formula is not that of PyTorch's GRU: use "
            "reset_after=True"
        )
    if _is_known(target) or sum(size > 1 for size in shape) < 2:
        return None
    front += ", and tfwd does not know PyTorch's order of axes for this layer"
    if len(shape) != 2:
        return (
            f"{front}: write {shape} to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    if said:
        return None
    return (
        f"{front}: map to Key({key.name!r}, transposed=True) if the file has the outputs first, "
        "else to Key(..., transposed=False)"
    )


def _reason_of_order(target: Target, key: Key, orders: Orders) -> str | None:
    """Returns why the order of flattened features is unknown; None if it is known."""
    inputs, outputs = _orders_of_variable(target, orders)
    if isinstance(inputs, Flat) and math.prod(inputs.shape) != target.shape[0]:
        return (
            f"'{target.path}' is {target.shape}, and Key({key.name!r}, flattened={key.flattened}) "
            f"says that {math.prod(inputs.shape)} entries are flattened before the layer"
        )
    unclear = next((order for order in (inputs, outputs) if isinstance(order, Unclear)), None)
    if unclear is None:
        return None
    front = f"'{target.path}': {unclear.why}, and PyTorch flattens channels first: "
    if unclear is orders.outputs:
        return (
            f"{front}write its features to the file in Keras's order of axes, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    return (
        f"{front}map to Key({key.name!r}, flattened=(channels, height, width)), the shape in "
        "PyTorch; or to Key(..., flattened=()) if both flatten in the same order"
    )


def _is_known(target: Target) -> bool:
    """Returns True if owner and name determine the order of a variable's axes in PyTorch."""
    owner, name = target.owner, target.name
    if len(target.shape) < 2 or name == "embeddings" or isinstance(owner, _PLAIN):
        return True
    if _has_slope_per_feature(target):
        return True
    if isinstance(owner, keras.layers.EinsumDense):
        # A kernel per position, or one of which Keras sums an axis, is no PyTorch layer's kernel.
        inputs, kernel, output = _axes_of(owner)
        once = all((axis in inputs) != (axis in output) for axis in kernel)
        return name == "bias" or (name == "kernel" and once)
    if isinstance(owner, _DEPTHWISE):  # its kernel has different names in Keras 2 and Keras 3
        return name in ("kernel", "depthwise_kernel")
    if isinstance(owner, _SEPARABLE):
        return name in ("depthwise_kernel", "pointwise_kernel")
    if isinstance(owner, _CELLS):
        return name in ("kernel", "recurrent_kernel", "bias")
    return isinstance(owner, (keras.layers.Dense, *_CONVOLUTIONS)) and name == "kernel"


def _has_slope_per_feature(target: Target) -> bool:
    """Returns True for the slopes of a `PReLU` that its positions share, as in PyTorch."""
    one = sum(size > 1 for size in target.shape) < 2
    return isinstance(target.owner, keras.layers.PReLU) and target.name == "alpha" and one


def _permuted(shape: tuple[int, ...], axes: tuple[int, ...]) -> Layout:
    there = tuple(shape[axes.index(i)] for i in range(len(axes)))
    return Layout(there, there, axes, shape)


def _of_depthwise(shape: tuple[int, ...]) -> Layout:
    """Returns the layout of a depthwise kernel.

    PyTorch's outputs are all multiples of the first input, then of the second input, and so on.
    """
    *positions, inputs, multiplier = shape
    split = (inputs, multiplier, *positions)
    axes = (*range(2, len(split)), 0, 1)
    return Layout((inputs * multiplier, 1, *positions), split, axes, shape)


def _of_gru(shape: tuple[int, ...]) -> Layout:
    inputs, width = shape
    return Layout((width, inputs), (3, width // 3, inputs), (2, 0, 1), shape, _GRU_GATES)


def _of_einsum(owner: keras.layers.EinsumDense, shape: tuple[int, ...]) -> Layout:
    """Returns the layout of an einsum kernel, as a matrix of all outputs by all inputs.

    PyTorch has the axes in the order of the layer's output and of its input. The kernel may have
    them in another order.
    """
    inputs_of, kernel, output = _axes_of(owner)
    outputs = [axis for axis in output if axis in kernel]
    inputs = [axis for axis in inputs_of if axis in kernel and axis not in output]
    size = dict(zip(kernel, shape, strict=True))
    order = [*outputs, *inputs]
    split = tuple(size[axis] for axis in order)
    there = (math.prod(size[a] for a in outputs), math.prod(size[a] for a in inputs))
    return Layout(there, split, tuple(order.index(axis) for axis in kernel), shape)


def _axes_of(owner: keras.layers.EinsumDense) -> tuple[str, str, str]:
    """Returns the letters of the axes of an einsum layer's input, kernel and output."""
    operands, _, output = owner.equation.replace(" ", "").replace("...", "").partition("->")
    inputs, _, kernel = operands.partition(",")
    return inputs, kernel, output
