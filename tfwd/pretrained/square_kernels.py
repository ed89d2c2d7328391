"""Square kernels. Their shape does not show whether the file has the outputs first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import keras

from tfwd.pretrained.layouts import Step


class Kernel(NamedTuple):
    """Kernel of a `Dense` or `EinsumDense` layer, and how its key is understood.

    Attributes:
        step: The kernel with its tensor.
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
        """Returns True if the tensor in the file has the same shape with its axes exchanged."""
        shape = self.step.entry.shape
        return len(shape) == 2 and shape[0] == shape[1] > 1

    @property
    def shown(self) -> bool | None:
        """Returns True if the file has the outputs first, as far as mapping and shape show it."""
        if self.given is not None or self.is_square:
            return self.given
        shape, final = self.step.entry.shape, self.step.layout.final
        if len(shape) != 2:
            return None
        if math.prod(shape) != math.prod(final):
            return None
        if self.step.layout.shape == shape:
            return self.transposed
        return not self.transposed if self.step.layout.shape == shape[::-1] else None


def is_kernel(step: Step) -> bool:
    """Returns True for the kernel of a `Dense` or `EinsumDense` layer."""
    kinds = (keras.layers.Dense, keras.layers.EinsumDense)
    return isinstance(step.target.owner, kinds) and step.target.name == "kernel"


def square_kernel_errors(kernels: Sequence[Kernel]) -> list[str]:
    """Returns an error for each square kernel whose order of axes is not known.

    The last component of the key decides, unless other kernels with such keys have the other order.
    Hugging Face's GPT-2 has `weight` with the inputs first. If the last component is no known name,
    as in a parameter of PyTorch, another kernel with such a key must show that outputs are first.
    """
    errors = []
    for kernel in kernels:
        if kernel.given is not None or not kernel.is_square:
            continue
        others = [one for one in kernels if one.is_torch is kernel.is_torch]
        against = next((one for one in others if one.shown is (not kernel.transposed)), None)
        confirmed = any(one.shown is kernel.transposed for one in others)
        is_clear = kernel.is_torch is not None or not kernel.transposed
        if against is None and (is_clear or confirmed):
            continue
        key, shape = kernel.step.key, kernel.step.entry.shape
        has, name = ("outputs", "True") if kernel.transposed else ("inputs", "False")
        if against is not None:
            other = "inputs" if kernel.transposed else "outputs"
            why = f"'{against.step.key}' has the {other} first"
        else:
            why = f"the end of '{key}' does not show it"
        rest = "False" if kernel.transposed else "True"
        errors.append(
            f"'{kernel.step.target.path}': key '{key}' is {shape}, so its shape does not show its "
            f"order of axes, and {why}: map to Key({key!r}, transposed={name}) if the file has the "
            f"{has} first; otherwise map to Key(..., transposed={rest})"
        )
    return errors
