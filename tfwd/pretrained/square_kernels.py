"""Square kernels. Their shape does not show whether the file has the outputs first."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import keras

from tfwd.pretrained.flatten_order.layer_groups import ORDER_PRESERVING_LAYERS
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.known_weights import CELLS, CONVOLUTIONS, MATRICES, is_known_layout
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Entry
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import layout_of


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
        """Returns True for a kernel in a known layout whose shape fits both orders of axes."""
        shape, target = self.step.entry.shape, self.step.target
        if is_convolution(target):
            return shape == target.shape == layout_of(target, LayerOrders()).shape
        kinds = (keras.layers.Dense, keras.layers.EinsumDense, *CELLS)
        is_kernel = isinstance(target.owner, kinds) and target.name in MATRICES
        return is_kernel and len(shape) == 2 and shape[0] == shape[1] > 1

    @property
    def shown(self) -> bool | None:
        """Returns True if the shape shows that the file has the outputs first, False if inputs.

        A convolution's kernel shows PyTorch's order of axes, or Keras's.
        """
        shape, layout, target = self.step.entry.shape, self.step.layout, self.step.target
        if is_convolution(target):
            in_torch = layout_of(target, LayerOrders()).shape
            return None if target.shape == in_torch else shape == in_torch
        if len(shape) != 2 or shape[0] == shape[1] or math.prod(shape) != math.prod(layout.final):
            return None
        if layout.shape == shape:
            return self.transposed
        return not self.transposed if layout.shape == shape[::-1] else None


class _Evidence:
    """Keys of matrices of which something shows or tells whether the outputs are first."""

    def __init__(self) -> None:
        self._keys: dict[tuple[object, bool], str] = {}

    def add(self, key: str, is_torch: bool | None, outputs_first: bool) -> None:
        """Adds a matrix.

        Args:
            key: str. Its key.
            is_torch: As in `Kernel`.
            outputs_first: bool. True if the file has its outputs first.
        """
        for group in (is_torch, *_similar_keys(key)):
            self._keys.setdefault((group, outputs_first), key)

    def of_style(self, kernel: Kernel, outputs_first: bool) -> str | None:
        """Returns the key of a matrix with this order whose key has the same style, or None."""
        return self._keys.get((kernel.is_torch, outputs_first))

    def of_similar_key(self, kernel: Kernel, outputs_first: bool) -> str | None:
        """Returns the key of a matrix with this order whose key is similar, or None."""
        found = (self._keys.get((g, outputs_first)) for g in _similar_keys(kernel.step.key))
        return next((key for key in found if key is not None), None)


def _similar_keys(key: str) -> tuple[object, object]:
    """Returns the names of the two groups of similar keys to which a key belongs.

    Keys are similar if the first or the last words of their last components are equal, as in
    `q_proj_weight` and `k_proj_weight`, or `W_1` and `W_2`.
    """
    words = re.findall("[a-z]+", re.split(r"[./]", key)[-1].lower()) or [""]
    return ("first word", words[0]), ("last word", words[-1])


def is_convolution(target: Target) -> bool:
    """Returns True for the kernel of a convolution whose order of axes in PyTorch is known."""
    is_kernel = len(target.shape) > 2 and target.name in MATRICES
    return is_kernel and isinstance(target.owner, CONVOLUTIONS) and is_known_layout(target)


def is_matrix(step: Step) -> bool:
    """Returns True for a matrix or kernel in the file that multiplies a layer's inputs.

    A table of embeddings has the same order in all libraries. A custom layer for positions, such as
    keras-hub's `PositionEmbedding`, is known by its name or key. The two biases of a GRU are no
    matrix either.
    """
    if is_convolution(step.target):
        return True
    others = (keras.layers.Embedding, *ORDER_PRESERVING_LAYERS)
    names = f"{step.target.path} {step.key}".lower()
    is_table = isinstance(step.target.owner, others) or "embed" in names
    is_other = step.target.name == "bias" or (is_table and step.target.name not in MATRICES)
    return len(step.entry.shape) == 2 and not is_other


def square_kernel_errors(kernels: Sequence[Kernel], entries: Mapping[str, Entry]) -> list[str]:
    """Returns an error for each square kernel whose order of axes is not known.

    The last component of the key decides, unless other matrices with such keys have the other
    order. Hugging Face's GPT-2 has `weight` with the inputs first. If the last component is no
    known name, as in a parameter of PyTorch, the shape of another matrix with a similar key must
    show that outputs are first. The kernel of a convolution is no such matrix, and needs none.

    Args:
        kernels: All matrices of the plan.
        entries: The tensors of the file.
    """
    shown, told = _Evidence(), _Evidence()
    for kernel in kernels:
        by_shape = kernel.shown
        # PyTorch's functions take the kernels of convolutions in one order, but matrices in both.
        of_matrix = None if is_convolution(kernel.step.target) else by_shape
        for found, value in ((shown, of_matrix), (told, by_shape), (told, kernel.given)):
            if value is not None:
                found.add(kernel.step.key, kernel.is_torch, value)
    for key, is_torch, value in _shown_by_biases(entries, {kernel.step.key for kernel in kernels}):
        told.add(key, is_torch, value)
    errors = []
    for kernel in kernels:
        if kernel.given is not None or not kernel.is_square:
            continue
        is_shown = shown.of_similar_key(kernel, kernel.transposed) is not None
        against = told.of_similar_key(kernel, not kernel.transposed)
        if against is None and not is_shown:
            against = told.of_style(kernel, not kernel.transposed)
        is_clear = (
            kernel.is_torch is not None
            or not kernel.transposed
            or is_convolution(kernel.step.target)
        )
        if against is None and (is_clear or is_shown):
            continue
        key, shape = kernel.step.key, kernel.step.entry.shape
        outputs_first, inputs_first = "the outputs first", "the inputs first"
        if is_convolution(kernel.step.target):
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
        last = re.split(r"[./]", key)[-1]
        bias = entries.get(f"{key.removesuffix(last)}bias")
        if key in loaded or bias is None or last not in ("weight", "kernel"):
            continue
        if len(entry.shape) != 2 or len(bias.shape) != 1 or entry.shape[0] == entry.shape[1]:
            continue
        if bias.shape[0] in entry.shape:
            yield key, last == "weight", bias.shape[0] == entry.shape[0]
