"""A call of an operation of TensorFlow on tensors whose axes are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layer_orders import OrderRecorder
from tfwd.pretrained.flatten_order.made_axes import dependent_axis
from tfwd.pretrained.flatten_order.orders import CHANGES_FEATURES, COMBINES
from tfwd.pretrained.flatten_order.tensor_axes import Sizes, TensorAxes, entries, with_unknown_axes
from tfwd.pretrained.flatten_order.traced_operations import TracedOperation, value_of_constant


@dataclasses.dataclass(frozen=True)
class OperationCall:
    """An operation on tensors, the axes of some of which are known.

    Attributes:
        traced: The operation.
        inputs: Axes of each input. None for a constant or weight.
        shapes: Shapes of the results.
        batch: Axis of the examples.
        recorder: Gets the axes on which the operation reads variables.
        owners: Layers that hold the variables.
    """

    traced: TracedOperation
    inputs: Sequence[TensorAxes | None]
    shapes: Sequence[Sizes]
    batch: Axis
    recorder: OrderRecorder
    owners: Sequence[Any]

    @property
    def operation(self) -> tf.Operation:
        """Returns TensorFlow's operation."""
        return self.traced.operation

    @property
    def name(self) -> str:
        """Returns the name of the layer that calls it, or the name in TensorFlow's graph."""
        return self.traced.name

    @property
    def known(self) -> list[TensorAxes]:
        """Returns the inputs that depend on the inputs of the call."""
        return [tensor for tensor in self.inputs if tensor is not None]

    def constant(self, number: int) -> list[int] | None:
        """Returns the entries of an input that depends on no other tensor; else None."""
        value = value_of_constant(self.operation.inputs[number])
        return None if value is None else [int(entry) for entry in np.ravel(value)]

    def dependent(self, size: int | None, sources: Sequence[Axis | None]) -> Axis | None:
        """Returns a new axis, whose order is known only if the order of the sources is."""
        if size == 1:
            return None
        reason = f"'{self.name}' {CHANGES_FEATURES}"
        return dependent_axis(size, sources, reason)

    def unknown(self) -> list[TensorAxes]:
        """Returns results of which nothing is known."""
        reason = f"the model does not show what '{self.name}' does with its inputs"
        self.recorder.record_plain(self.owners, "inputs", [Axis(2, doubt=reason)], reason)
        results = [with_unknown_axes(shape, reason, self.batch) for shape in self.shapes]
        given, made = (entries(tensors, self.batch) for tensors in (self.known, results))
        self.recorder.record_hidden(self.owners, given, made, reason)
        return results

    def reads(self, axes: Sequence[Axis | None], side: str = "inputs") -> None:
        """Notes that the operation uses variables along some axes."""
        reason = "the model uses it in an operation whose inputs or outputs are flattened features"
        self.recorder.record_plain(self.owners, side, axes, reason)  # type: ignore[arg-type]

    def joins_table(self, number: int, axes: Sequence[Axis | None]) -> bool:
        """Notes that the operation has different constants or weights along some axes.

        Args:
            number: Number of the input that depends on no input of the call.
            axes: The axes.

        Returns:
            False if all entries of the input are equal, so that the order does not matter.
        """
        if self.owners:
            self.reads(axes)
            return True
        value = tf.get_static_value(self.operation.inputs[number])
        if value is not None and np.size(value) and np.all(value == np.ravel(value)[0]):
            return False
        self.needs_plain(axes)
        return True

    def needs_plain(self, axes: Sequence[Axis | None]) -> None:
        """Notes that the order of some axes is unknown if it differs from PyTorch's."""
        for axis in axes:
            if axis is not None:
                self.recorder.must_be_plain(axis, f"'{self.name}' {COMBINES}")

    def matches(self, first: Axis | None, second: Axis | None) -> None:
        """Notes that two axes must have the same order in PyTorch."""
        if first is not None and second is not None and first.find() is not second.find():
            self.recorder.matches.append((first, second, f"'{self.name}' {COMBINES}"))


Results = TensorAxes | list[TensorAxes] | None
