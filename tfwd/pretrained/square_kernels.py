"""Square kernels. Their shape does not show whether the file has the outputs first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras

from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.torch_layouts import CELLS, MATRICES


class Kernel(NamedTuple):
    """Matrix of a file, and how its key is understood.

    Attributes:
        step: The variable with its tensor.
        is_torch: bool. Style of the key: True for PyTorch's, False for Keras's. None: unclear.
        given: bool. `transposed` of its key in the mapping, or None.
        transposed: bool. True if the plan takes the outputs as the first axis in the file.
    """

    step: Step
    is_torch: bool | None
    given: bool | None
    transposed: bool

    @property
    def is_square(self) -> bool:
        """Returns True for a square kernel of a layer whose layout tfwd knows."""
        shape, target = self.step.entry.shape, self.step.target
        kinds = (keras.layers.Dense, keras.layers.EinsumDense, *CELLS)
        is_kernel = isinstance(target.owner, kinds) and target.name in MATRICES
        return is_kernel and len(shape) == 2 and shape[0] == shape[1] > 1

    @property
    def shown(self) -> bool | None:
        """Returns True if the shape shows that the file has the outputs first, False if inputs."""
        shape, layout = self.step.entry.shape, self.step.layout
        if len(shape) != 2 or shape[0] == shape[1] or math.prod(shape) != math.prod(layout.final):
            return None
        if layout.shape == shape:
            return self.transposed
        return not self.transposed if layout.shape == shape[::-1] else None


def is_matrix(step: Step) -> bool:
    """Returns True for a matrix in the file that multiplies a layer's inputs."""
    others = (keras.layers.Embedding, *ORDER_PRESERVING_LAYERS)
    return len(step.entry.shape) == 2 and not isinstance(step.target.owner, others)


def square_kernel_errors(kernels: Sequence[Kernel]) -> list[str]:
    """Returns an error for each square kernel whose order of axes is not known.

    The last component of the key decides, unless other matrices with such keys have the other
    order. Hugging Face's GPT-2 has `weight` with the inputs first. If the last component is no
    known name, as in a parameter of PyTorch, the shape of another kernel with such a key must show
    that outputs are first.

    Args:
        kernels: All matrices of the plan.
    """
    # For each style of key: matrices that show the outputs first (True) or the inputs first.
    shown: dict[bool | None, dict[bool, Kernel]] = {True: {}, False: {}, None: {}}
    told: dict[bool | None, dict[bool, Kernel]] = {True: {}, False: {}, None: {}}
    for kernel in kernels:
        by_shape = kernel.shown
        for found, value in ((shown, by_shape), (told, by_shape), (told, kernel.given)):
            if value is not None:
                found[kernel.is_torch].setdefault(value, kernel)
    errors = []
    for kernel in kernels:
        if kernel.given is not None or not kernel.is_square:
            continue
        against = told[kernel.is_torch].get(not kernel.transposed)
        is_clear = kernel.is_torch is not None or not kernel.transposed
        if against is None and (is_clear or kernel.transposed in shown[kernel.is_torch]):
            continue
        key, shape = kernel.step.key, kernel.step.entry.shape
        if against is not None:
            other = "inputs" if kernel.transposed else "outputs"
            why = f"'{against.step.key}' has the {other} first"
        else:
            why = f"the end of '{key}' does not show it"
        errors.append(
            f"'{kernel.step.target.path}': key '{key}' is {shape}, so its shape does not show its "
            f"order of axes, and {why}: map to Key({key!r}, transposed=True) if the file has the "
            "outputs first; otherwise map to Key(..., transposed=False)"
        )
    return errors
