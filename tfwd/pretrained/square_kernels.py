"""Square kernels. Their shape does not show whether the file has the outputs first."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras

from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.key_rules import last_component
from tfwd.pretrained.known_weights import CELLS, CONVOLUTIONS, MATRICES, is_known_layout
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Entry
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import torch_shape


class Kernel(NamedTuple):
    """Kernel in a file, and how its key is understood.

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
    def fits_both_orders(self) -> bool:
        """Returns True for a kernel in a known layout whose shape fits both orders of axes."""
        shape, target = self.step.entry.shape, self.step.target
        if is_convolution(target):
            return shape == target.shape == torch_shape(target)
        kinds = (keras.layers.Dense, keras.layers.EinsumDense, *CELLS)
        is_known = isinstance(target.owner, kinds) and target.name in MATRICES
        return is_known and len(shape) == 2 and shape[0] == shape[1] > 1

    @property
    def shown(self) -> bool | None:
        """Returns True if the shape shows that the file has the outputs first, False if inputs.

        A convolution's kernel shows PyTorch's order of axes, or Keras's.
        """
        shape, layout, target = self.step.entry.shape, self.step.layout, self.step.target
        if is_convolution(target):
            in_torch = torch_shape(target)
            return None if target.shape == in_torch else shape == in_torch
        if len(shape) != 2 or shape[0] == shape[1] or math.prod(shape) != math.prod(layout.final):
            return None
        if layout.shape == shape:
            return self.transposed
        return not self.transposed if layout.shape == shape[::-1] else None


def is_convolution(target: Target) -> bool:
    """Returns True for the kernel of a convolution whose order of axes in PyTorch is known."""
    is_convolving = isinstance(target.owner, CONVOLUTIONS) and target.name in MATRICES
    return is_convolving and len(target.shape) > 2 and is_known_layout(target)


def is_kernel(step: Step) -> bool:
    """Returns True for a matrix or kernel in the file that multiplies a layer's inputs.

    A table of embeddings has the same order in PyTorch and Keras. A custom layer for positions,
    such as keras-hub's `PositionEmbedding`, is known by its name or key. The two biases of a GRU
    are no matrix either.
    """
    if is_convolution(step.target):
        return True
    others = (keras.layers.Embedding, *ORDER_PRESERVING_LAYERS)
    names = f"{step.target.path} {step.key}".lower()
    is_table = isinstance(step.target.owner, others) or "embed" in names
    is_other = step.target.name == "bias" or (is_table and step.target.name not in MATRICES)
    return len(step.entry.shape) == 2 and not is_other


def square_kernel_errors(
    kernels: Sequence[Kernel], entries: Mapping[str, Entry], names_show: bool
) -> list[str]:
    """Returns an error for each square kernel whose order of axes is not known.

    The last component of the key decides, unless other matrices with such keys have the other
    order. Hugging Face's GPT-2 has `weight` with the inputs first. If the last component is no
    known name, as in a parameter of PyTorch, the code of the model may multiply from either side.
    Convolutions of PyTorch and their kernels have one order.

    Args:
        kernels: All kernels of the plan.
        entries: The tensors of the file.
        names_show: bool. True if a key without a known name shows Keras's order, as in files of
            NumPy.
    """
    # For each style of key: keys of matrices that have the outputs first (True) or the inputs.
    told: dict[bool | None, dict[bool, str]] = {True: {}, False: {}, None: {}}
    for kernel in kernels:
        for value in (kernel.shown, kernel.given):
            if value is not None:
                told[kernel.is_torch].setdefault(value, kernel.step.key)
    for key, is_torch, value in _shown_by_biases(entries, {kernel.step.key for kernel in kernels}):
        told[is_torch].setdefault(value, key)
    errors = []
    for kernel in kernels:
        if kernel.given is not None or not kernel.fits_both_orders:
            continue
        against = told[kernel.is_torch].get(not kernel.transposed)
        is_conv = is_convolution(kernel.step.target)
        if against is None and (kernel.is_torch is not None or names_show or is_conv):
            continue
        key, shape = kernel.step.key, kernel.step.entry.shape
        outputs_first, inputs_first = "the outputs first", "the inputs first"
        if is_conv:
            outputs_first, inputs_first = "PyTorch's order of axes", "Keras's order of axes"
        if against is not None:
            why = f"'{against}' has {inputs_first if kernel.transposed else outputs_first}"
        else:
            why = f"the end of '{key}' does not show it"
        errors.append(
            f"'{kernel.step.target.path}': key '{key}' is {shape}, so its shape does not show its "
            f"order of axes, and {why}: map to Key({key!r}, transposed=True) if the file has "
            f"{outputs_first}; otherwise map to Key(..., transposed=False)"
        )
    return errors


def _shown_by_biases(
    entries: Mapping[str, Entry], loaded: Collection[str]
) -> Iterator[tuple[str, bool, bool]]:
    """Yields matrices that no variable takes, and whose bias shows which axis has the outputs.

    Args:
        entries: The tensors of the file.
        loaded: Keys of the matrices that variables take.

    Yields:
        The key, its style as in `Kernel`, and True if the outputs are first.
    """
    for key, entry in entries.items():
        last = last_component(key)
        bias = entries.get(f"{key.removesuffix(last)}bias")
        if key in loaded or bias is None or last not in ("weight", "kernel"):
            continue
        if len(entry.shape) != 2 or len(bias.shape) != 1 or entry.shape[0] == entry.shape[1]:
            continue
        if bias.shape[0] in entry.shape:
            yield key, last == "weight", bias.shape[0] == entry.shape[0]
