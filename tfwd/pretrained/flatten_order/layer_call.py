"""A call of a Keras layer on tensors whose axes are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfwd.pretrained.flatten_order.axes import Axis
from tfwd.pretrained.flatten_order.layer_orders import OrderRecorder
from tfwd.pretrained.flatten_order.made_axes import dependent_axis
from tfwd.pretrained.flatten_order.tensor_axes import Sizes, TensorAxes


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a layer.

    Attributes:
        layer: The layer, without wrappers.
        tensors: Its inputs.
        shapes: Shapes of its outputs.
        batch: Axis of the examples.
        recorder: Gets the axes on which the layer has weights.
        run: Function that returns the outputs of another call, of a layer inside.
    """

    layer: Any
    tensors: Sequence[TensorAxes]
    shapes: Sequence[Sizes]
    batch: Axis
    recorder: OrderRecorder
    run: Callable[[Any, Sequence[TensorAxes], Sequence[Sizes]], list[TensorAxes]]

    @property
    def name(self) -> str:
        """Returns the name of the layer."""
        return getattr(self.layer, "name", "")

    def features(self, size: int | None) -> Axis | None:
        """Returns the new axis that the layer's weights make; None if its size is 1.

        Args:
            size: Its size after the activation function. `glu` combines two features to one.
        """
        if size == 1:
            return None
        made = getattr(self.layer, "units", getattr(self.layer, "filters", size))
        axis = Axis(made)
        self.recorder.record_axis(self.layer, "outputs", axis)
        if made == size:
            return axis
        return dependent_axis(size, [axis], f"'{self.name}' combines features")
