"""Orders of features, relative to PyTorch. They are the result of the search.

Shapes do not include the first axis, which is the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]
# Parts of reasons.
CHANGES_FEATURES = "changes flattened features"  # after the operation's name
MAY_EXCHANGE = "the model does not show whether PyTorch's model exchanges positions like"
MAY_BE_EXCHANGED = "that PyTorch may have exchanged"
HAS_STEPS = "has steps in an unknown order"
IS_RESHAPE = "is a reshape"
OTHER_CHANNELS = "has the channels in another order in PyTorch"
MAKES_CHANNELS = "makes the channels in Keras's order"
COMBINES = "combines the outputs with flattened features"
IS_PART = "a part of its outputs becomes an image"


@dataclasses.dataclass(frozen=True)
class FlattenedAxes:
    """Known order of the features on an axis that was flattened, or that will be reshaped.

    Attributes:
        shape: tuple of int. Sizes of the flattened axes in Keras's order.
        positions: tuple of int. Position of each of these axes in PyTorch's order.
    """

    shape: Shape
    positions: tuple[int, ...]

    @property
    def torch_shape(self) -> Shape:
        """Returns the sizes in PyTorch's order."""
        axes = sorted(range(len(self.positions)), key=self.positions.__getitem__)
        return tuple(self.shape[axis] for axis in axes)

    @property
    def rows(self) -> tuple[int, ...]:
        """Returns the position in PyTorch of each feature."""
        numbers = np.arange(int(np.prod(self.shape))).reshape(self.torch_shape)
        return tuple(numbers.transpose(self.positions).ravel().tolist())


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
            inside = range(size) if order is None else order.rows
            rows += [len(rows) + row for row in inside]
        return tuple(rows)


@dataclasses.dataclass(frozen=True)
class UnknownFeatureOrder:
    """Unknown order of flattened features. A layer with weights on these features is an error.

    Attributes:
        reason: str. Clause that says why the order is unknown.
    """

    reason: str

    @property
    def is_of_changed_features(self) -> bool:
        """Returns True if an operation on flattened features may have other results in PyTorch."""
        return self.reason.endswith(CHANGES_FEATURES)

    @property
    def is_of_steps(self) -> bool:
        """Returns True if a reshape, or steps, may have other features in PyTorch."""
        return IS_RESHAPE in self.reason or self.reason.endswith((HAS_STEPS, MAY_BE_EXCHANGED))

    @property
    def is_of_combination(self) -> bool:
        """Returns True if entries are added to flattened features, or multiplied by them."""
        return self.reason.endswith(COMBINES)

    @property
    def has_no_shape(self) -> bool:
        """Returns True if no shape of an image can give the order."""
        has_steps = self.reason.endswith(HAS_STEPS)
        return has_steps or self.is_of_parts or self.is_of_other_channels

    @property
    def is_of_parts(self) -> bool:
        """Returns True for outputs only parts of which become images."""
        return self.reason == IS_PART

    @property
    def is_of_other_channels(self) -> bool:
        """Returns True if PyTorch has the channels in another order."""
        return self.reason.endswith((OTHER_CHANNELS, MAKES_CHANNELS))

    @property
    def may_be_exchanged(self) -> bool:
        """Returns True if PyTorch may have height and width in the other order."""
        return self.reason.startswith(MAY_EXCHANGE) or self.reason.endswith(MAY_BE_EXCHANGED)


class JoinedPart(NamedTuple):
    """Part of joined features whose order may be unknown.

    Attributes:
        size: int. Number of features.
        order: Order of the features. None if PyTorch has the same.
        shape: tuple of int. Sizes of the axes that Keras flattens to this part; () if none or
            unknown.
    """

    size: int
    order: FlattenedAxes | UnknownFeatureOrder | None
    shape: Shape

    @property
    def is_unknown(self) -> bool:
        """Returns True if the order is unknown."""
        return isinstance(self.order, UnknownFeatureOrder)


# None: PyTorch has the same order, or nothing was flattened.
FeatureOrder = FlattenedAxes | JoinedFeatures | UnknownFeatureOrder | None


def flattened_axes(shape: Shape, order: Sequence[int]) -> FlattenedAxes | None:
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
    channels_last = (*range(1, len(torch_shape)), 0)
    return flattened_axes((*torch_shape[1:], torch_shape[0]), channels_last)
