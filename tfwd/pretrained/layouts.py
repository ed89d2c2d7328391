"""Conversion of a file's tensor to a variable's value: reshape, permute the axes, reshape."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from tfwd.pretrained.sources.base import Entry
from tfwd.pretrained.target_variables import Target


@dataclasses.dataclass(frozen=True)
class Layout:
    """Conversion of a file's tensor to a variable: reshape, permute the axes, reshape.

    Attributes:
        shape: tuple of int. Required shape in the file.
        split: tuple of int. Shape after the first reshape.
        axes: tuple of int. For each axis after the permutation, its number in `split`.
        final: tuple of int. Shape of the variable.
        order: tuple of int. Order of the entries on the first axis of `split`. Default None, for
            the file's order.
        rows: tuple of int. For each entry on the variable's first axis, its position before.
            Default None, for the order that the permutation gives.
    """

    shape: tuple[int, ...]
    split: tuple[int, ...]
    axes: tuple[int, ...]
    final: tuple[int, ...]
    order: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @staticmethod
    def unchanged(shape: tuple[int, ...]) -> Layout:
        """Returns the layout of a tensor that the file has like the variable."""
        return Layout(shape, shape, tuple(range(len(shape))), shape)

    @staticmethod
    def permuted(shape: tuple[int, ...], axes: tuple[int, ...]) -> Layout:
        """Returns the layout of a variable of some shape whose file has the axes in other order.

        Args:
            shape: Shape of the variable.
            axes: For each axis of the variable, its number in the file.
        """
        in_file = tuple(shape[axes.index(i)] for i in range(len(axes)))
        return Layout(in_file, in_file, axes, shape)

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
        if self.rows is not None:
            steps.append("features reordered" if len(self.final) == 1 else "reordered")
        return ", ".join(steps) or "as it is"

    def merged(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Returns the same permutation with as few axes as possible.

        Neighbours that stay neighbours are merged. One axis remains if the file has the tensor like
        the variable.

        Returns:
            The sizes of the file's axes, and their order in the variable. None if the first axis is
            not the file's rows, or if the rows are reordered.
        """
        if self.order is not None or self.rows is not None:
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
        in_file = sorted(groups)
        sizes = tuple(math.prod(self.split[axis] for axis in group) for group in in_file)
        if sizes[0] != self.shape[0]:
            return None
        return sizes, tuple(in_file.index(group) for group in groups)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Returns the value of the variable."""
        split = values.reshape(self.split)
        if self.order is not None:
            split = split[list(self.order)]
        value = np.transpose(split, self.axes).reshape(self.final)
        return value if self.rows is None else value[list(self.rows)]


@dataclasses.dataclass(frozen=True)
class Step:
    """Variable, and the tensor that is loaded into it.

    Attributes:
        target: The variable.
        key: str. Name of the tensor in the file.
        entry: Shape and dtype of the tensor in the file.
        layout: Conversion of the tensor.
        copies: tuple of str. Keys that must hold equal tensors. Default empty.
    """

    target: Target
    key: str
    entry: Entry
    layout: Layout
    copies: tuple[str, ...] = ()
