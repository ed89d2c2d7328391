"""Orders of a tensor's axes and of flattened features, relative to PyTorch.

Shapes and orders do not include the first axis, which is the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Shape = tuple[int, ...]
# For each axis of a Keras tensor, its position in PyTorch. -1: an axis of size 1 with no position.
AxisOrder = tuple[int, ...]


class MovedImageAxes(tuple[int, ...]):
    """Axes of an image that the model has moved into PyTorch's order.

    They are an `AxisOrder`. The model may move them back, although PyTorch's model does not.
    """


@dataclasses.dataclass(frozen=True)
class FlattenedAxes:
    """Known order of the features on an axis that was flattened, or that will be reshaped.

    Attributes:
        shape: tuple of int. Sizes of the flattened axes in Keras's order.
        positions: tuple of int. Position of each of these axes in PyTorch's order.
    """

    shape: Shape
    positions: AxisOrder

    @property
    def torch_shape(self) -> Shape:
        """Returns the sizes in PyTorch's order."""
        axes = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        return tuple(self.shape[axis] for axis in axes)


@dataclasses.dataclass(frozen=True)
class JoinedFeatures:
    """Known order of features that a `Concatenate` layer joined.

    Attributes:
        parts: tuple of (int, FlattenedAxes or None). Number of features of each part, and their
            order. None if PyTorch has the same order.
    """

    parts: tuple[tuple[int, FlattenedAxes | None], ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Returns the position in PyTorch of each feature."""
        rows: list[int] = []
        for size, order in self.parts:
            numbers = np.arange(len(rows), len(rows) + size)
            if order is not None:
                numbers = numbers.reshape(order.torch_shape).transpose(order.positions).ravel()
            rows += numbers.tolist()
        return tuple(rows)


@dataclasses.dataclass(frozen=True)
class UnknownFeatureOrder:
    """Unknown order of flattened features. A layer with weights on these features is an error.

    Attributes:
        reason: str. Clause that says why the order is unknown.
    """

    reason: str


@dataclasses.dataclass(frozen=True)
class UnknownAxisOrder:
    """Unknown order of a tensor's axes. It matters only if the axes are flattened later.

    Attributes:
        reason: str. Clause that says why the order is unknown.
        yields: bool. True if the sum with a tensor in a known order has that order. Default False.
        is_sequence: bool. True if a layer on the channels, which PyTorch has last, shows the order
            again. Default False.
        mixes: bool. True if an axis merges positions and a part of the channels. Its entries have
            an unknown order, also if it is the only axis with several entries. Default False.
        is_permuted: bool. True if a permutation, or a division of the channels, made the order
            unknown. Axes that are merged then are mixed. Default False.
    """

    reason: str
    yields: bool = False
    is_sequence: bool = False
    mixes: bool = False
    is_permuted: bool = False


# None: PyTorch has the same order, or nothing was flattened.
FeatureOrder = FlattenedAxes | JoinedFeatures | UnknownFeatureOrder | None
TensorOrder = AxisOrder | UnknownAxisOrder | FeatureOrder


def joined_features(
    orders: Sequence[TensorOrder], shapes: Sequence[Shape], result: Shape
) -> JoinedFeatures | None:
    """Returns the order of joined features; None if it cannot be told from the parts' orders.

    Args:
        orders: Orders of the parts. None if PyTorch has the same order.
        shapes: Shapes of the parts.
        result: Shape of the joined features.
    """
    parts: list[tuple[int, FlattenedAxes | None]] = []
    for order, shape in zip(orders, shapes, strict=True):
        if len(shape) != 1 or shape[0] is None:
            return None
        if isinstance(order, JoinedFeatures):
            parts += order.parts
        elif order is None or isinstance(order, FlattenedAxes):
            parts.append((shape[0], order))
        else:
            return None
    is_joined = result == (sum(size for size, _ in parts),)  # not along the batch
    return JoinedFeatures(tuple(parts)) if is_joined else None


def channels_last(rank: int) -> AxisOrder:
    """Returns the order of the axes of an image with the channels last."""
    return (*range(1, rank), 0)


def flattened_axes(shape: Shape, order: AxisOrder) -> FlattenedAxes | None:
    """Returns the order of the features of a flattened tensor; None if PyTorch has the same.

    Args:
        shape: Sizes of the axes, in Keras's order.
        order: Position of each axis in PyTorch's order.
    """
    kept = [(position, size) for position, size in zip(order, shape, strict=True) if size != 1]
    in_torch = sorted(position for position, _ in kept)
    positions = tuple(in_torch.index(position) for position, _ in kept)
    if positions == tuple(range(len(positions))):
        return None
    return FlattenedAxes(tuple(size for _, size in kept), positions)


def flattened_image(torch_shape: Shape) -> FlattenedAxes | None:
    """Returns the order of the features of a flattened image; None if PyTorch has the same.

    Args:
        torch_shape: Shape of the image in PyTorch, with the channels first. May be empty.
    """
    if not torch_shape:
        return None
    return flattened_axes((*torch_shape[1:], torch_shape[0]), channels_last(len(torch_shape)))


def flattens_differently(order: TensorOrder, shape: Shape) -> bool:
    """Returns True if PyTorch would flatten a tensor with known axes in another order."""
    return isinstance(order, tuple) and flattened_axes(shape, order) is not None


def is_image(order: TensorOrder) -> bool:
    """Returns True for known axes that PyTorch has in another order."""
    return isinstance(order, tuple) and not is_order_of_torch(order)


def may_be_image(order: TensorOrder) -> bool:
    """Returns True for an image, and for axes in an unknown order that no later layer shows."""
    if isinstance(order, UnknownAxisOrder):
        return not order.is_sequence
    return is_image(order)


def after_moved_image(
    order: TensorOrder, shape: Shape, moved: Sequence[TensorOrder], layer: Any, *, reshapes: bool
) -> TensorOrder:
    """Returns the order of a tensor. It takes into account that its sources were images.

    Args:
        order: Order of the tensor by other rules.
        shape: Shape of the tensor.
        moved: Orders of the sources. Without `MovedImageAxes` the order stays.
        layer: Layer or operation between them.
        reshapes: bool. True if the layer only changes the shape.
    """
    is_moved = any(isinstance(source, MovedImageAxes) for source in moved)
    if not is_moved or len(shape) < 2 or is_vector(shape):
        return order
    if order is None and not reshapes:
        return UnknownAxisOrder(f"'{layer.name}' is on an image whose axes the model has moved")
    if order is None:
        return MovedImageAxes(range(len(shape)))
    return MovedImageAxes(order) if is_order_of_torch(order) else order  # type: ignore[arg-type]


def is_vector(shape: Shape) -> bool:
    """Returns True if only the last axis has several entries."""
    return all(size == 1 for size in shape[:-1])


def beside_used_ones(order: TensorOrder, shape: Shape) -> bool:
    """Returns True if an axis without a position in PyTorch has several entries now."""
    if not isinstance(order, tuple):
        return False
    return any(p < 0 and size != 1 for p, size in zip(order, shape, strict=True))


def is_flattened(order: TensorOrder) -> bool:
    """Returns True for an order of features, known or unknown."""
    return isinstance(order, (FlattenedAxes, JoinedFeatures, UnknownFeatureOrder))


def common_order(orders: Iterable[TensorOrder], conflict: str, of_axes: str) -> TensorOrder:
    """Returns the order that several orders agree on.

    Args:
        orders: The orders.
        conflict: str. Reason of the unknown order if orders of flattened features differ.
        of_axes: str. Reason of the unknown order if orders of axes differ.

    Returns:
        The order. None if all orders are None.
    """
    distinct = dict.fromkeys(orders)
    if len(distinct) > 1 and any(map(is_flattened, distinct)):
        return UnknownFeatureOrder(conflict)
    weak = [o for o in distinct if o is None or (isinstance(o, UnknownAxisOrder) and o.yields)]
    strong = [order for order in distinct if order not in weak]
    if len(strong) > 1:
        return first_unknown(strong) or UnknownAxisOrder(of_axes)
    return (strong or [order for order in weak if order is not None] or [None])[0]


def first_unknown(orders: Iterable[TensorOrder]) -> UnknownAxisOrder | None:
    """Returns the first unknown order, but one that mixes positions and channels before others."""
    unknown = [order for order in orders if isinstance(order, UnknownAxisOrder)]
    return next((order for order in unknown if order.mixes), next(iter(unknown), None))


def is_order_of_torch(order: TensorOrder) -> bool:
    """Returns True for axes that PyTorch has in the same order."""
    if not isinstance(order, tuple):
        return False
    positions = [position for position in order if position >= 0]
    return positions == sorted(positions)
