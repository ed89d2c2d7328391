"""Finds which of some named tensors another tensor is computed from.

In a graph, the inputs of operations are followed back. In eager mode a tensor does not know its
operation, so the operations are recorded while they run.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_callbacks

# The results of these operations depend only on the shape of their inputs.
_READ_SHAPES = ("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike")
_NONE: frozenset[str] = frozenset()


class TensorOrigins:
    """Names of the tensors that other tensors of the same graph are computed from.

    Values that go through a variable or through NumPy, and conditions in eager mode, are not
    followed. Each result of a function or a loop counts as computed from all of its inputs.
    """

    def __init__(self) -> None:
        # By id of a tensor, because tensors have no hash.
        self._known: dict[int, tuple[weakref.ref[Any], frozenset[str]]] = {}

    def add(self, name: str, tensor: Any) -> None:
        """Gives a tensor a name. The parts of a ragged or sparse tensor get the same name."""
        for part in tf.nest.flatten(tensor, expand_composites=True):
            if tf.is_tensor(part):
                self._set(part, (self._get(part) or _NONE) | {name})

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Records the operations that run in the body. In a graph, this is not necessary."""
        if not tf.executing_eagerly():
            yield
            return
        op_callbacks.add_op_callback(self._record)
        try:
            yield
        finally:
            op_callbacks.remove_op_callback(self._record)

    def of(self, tensor: Any) -> tuple[str, ...]:
        """Returns the names of the tensors from which a tensor is computed, in alphabetical order.

        Args:
            tensor: Tensor, or a `tf.IndexedSlices`.
        """
        parts = tf.nest.flatten(tensor, expand_composites=True)
        return tuple(sorted(_NONE.union(*map(self._of_one, parts))))

    def _of_one(self, tensor: Any) -> frozenset[str]:
        waiting = [] if isinstance(tensor, tf.__internal__.EagerTensor) else [tensor]
        while waiting:  # a recursion would be too deep
            one = waiting[-1]
            if self._get(one) is None:
                self._set(one, _NONE)  # until its inputs are known
                waiting += [x for x in _inputs_in_graph(one) if self._get(x) is None]
            else:
                waiting.pop()
                found = (self._get(x) or _NONE for x in _inputs_in_graph(one))
                self._set(one, (self._get(one) or _NONE).union(*found))
        return self._get(tensor) or _NONE

    def _get(self, tensor: Any) -> frozenset[str] | None:
        reference, names = self._known.get(id(tensor), (None, None))
        return names if reference is not None and reference() is tensor else None

    def _set(self, tensor: Any, names: frozenset[str]) -> None:
        self._known[id(tensor)] = weakref.ref(tensor), names

    def _record(
        self,
        kind: str,
        inputs: Sequence[Any],
        attributes: Any,
        outputs: Sequence[Any],
        op_name: str | None = None,
        graph: Any = None,
    ) -> None:
        if graph is not None:  # an operation of a function that is traced
            return
        for i, output in enumerate(outputs):
            given = _used(kind, inputs, i)
            names = _NONE.union(*(self._get(one) or _NONE for one in given))
            if names:
                self._set(output, names)


def _inputs_in_graph(tensor: Any) -> Sequence[Any]:
    return _used(tensor.op.type, tensor.op.inputs, tensor.value_index)


def _used(kind: str, inputs: Sequence[Any], output: int) -> Sequence[Any]:
    """Returns the inputs of an operation whose elements one of its outputs depends on."""
    if kind in _READ_SHAPES:
        return ()
    return inputs[output : output + 1] if kind == "IdentityN" else inputs
