"""Replaces the tensors that TensorFlow stores for backward.

The gradient of a product needs its factors. If the gradient is built in a separate graph, it
captures the factors from the forward graph. A captured tensor stays alive from forward to backward.
This module checks each capture. The tensor may have been computed only from chosen tensors, by
repeatable operations. These operations then run again on replacements of the chosen tensors, and
nothing is captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfwd._graph import private_graph_apis


@contextlib.contextmanager
def replaced(chosen: Sequence[tf.Tensor], replacements: Sequence[tf.Tensor]) -> Iterator[None]:
    """Makes operations of the current function use replacements of chosen outer tensors.

    It must be entered while a `tf.function` is traced. It also replaces tensors that were computed
    only from chosen tensors and constants.

    Args:
        chosen: Tensors of a graph around the function.
        replacements: Tensors of the function, of the same shapes and dtypes. They must have the
            same values.

    Example:
        >>> @tf.function
        ... def outer(x):
        ...     transposed = tf.transpose(x)
        ...     @tf.function
        ...     def inner(y):
        ...         with replaced([x], [y]):
        ...             return tf.identity(transposed)
        ...     return inner(x + 1.0)
        >>> outer(tf.constant([[1.0, 2.0]])).numpy().tolist()
        [[2.0], [3.0]]
    """
    copies = _Copies(chosen, replacements)
    with private_graph_apis.captures_from(tf.compat.v1.get_default_graph(), copies.find):
        yield


class _Copies:
    """The replacements of outer tensors, created when they are needed."""

    def __init__(self, chosen: Sequence[tf.Tensor], replacements: Sequence[tf.Tensor]) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._known: dict[Any, tf.Tensor | None] = {
            tensor.ref(): other for tensor, other in zip(chosen, replacements, strict=True)
        }
        self._outer = {id(tensor.graph) for tensor in chosen}

    def find(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the replacement of a tensor, or None if it must be captured."""
        if id(getattr(tensor, "graph", None)) not in self._outer or _is_constant(tensor):
            return None
        self._resolve(tensor)
        return self._known[tensor.ref()]

    def _resolve(self, wanted: tf.Tensor) -> None:
        # A loop instead of recursion, because a tensor may depend on many operations.
        stack = [wanted]
        while stack:
            tensor = stack[-1]
            if tensor.ref() in self._known:
                stack.pop()
                continue
            inputs = _inputs(tensor)
            pending = [t for t in inputs if t.ref() not in self._known and not _is_constant(t)]
            # If one input must be captured, the tensor itself is captured.
            if any(self._known.get(t.ref(), t) is None for t in inputs) or not inputs:
                self._known[tensor.ref()] = None
            elif pending:
                stack.append(pending[0])
            else:
                self._copy(tensor)

    def _copy(self, tensor: tf.Tensor) -> None:
        if tensor.op.type in ("Identity", "IdentityN", *_LOOPS):
            self._known[tensor.ref()] = self._known.get(_inputs(tensor)[0].ref())
            return
        operation = tensor.op
        inputs = [self._known.get(t.ref(), t) for t in operation.inputs]
        with self._graph.as_default(), tf.control_dependencies(None):
            copy = self._graph.create_op(
                operation.type,
                inputs,
                [output.dtype for output in operation.outputs],
                attrs=dict(operation.node_def.attr),
                op_def=operation.op_def,
            )
        for output, other in zip(operation.outputs, copy.outputs, strict=True):
            other.set_shape(output.shape)
            self._known[output.ref()] = other


_LOOPS = ("While", "StatelessWhile")


def _is_constant(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "Const"


def _inputs(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors from which a tensor was computed, or [] if it cannot be recomputed."""
    operation = tensor.op
    if operation.type == "IdentityN":  # the result of a function with a custom gradient
        return [operation.inputs[tensor.value_index]]
    if operation.type in _LOOPS:  # a loop also returns unchanged tensors, which its gradient uses
        unchanged = private_graph_apis.is_loop_invariant(operation, tensor.value_index)
        return [operation.inputs[tensor.value_index]] if unchanged else []
    if operation.op_def.is_stateful or operation.control_inputs or _calls_functions(operation):
        return []
    if operation.type == "PlaceholderWithDefault":  # for example the counter of a vectorized_map
        return []
    return list(operation.inputs)


def _calls_functions(operation: tf.Operation) -> bool:
    return any(value.HasField("func") for value in operation.node_def.attr.values())


def delay_to_use(operations_of: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> None:
    """Makes each seed wait for the tensors with which its draw is used.

    Otherwise the draws of all layers would run when the model begins.

    Args:
        operations_of: Seeds in the current graph.
        tensors: Tensors that were drawn from the seeds.
    """
    for seed, tensor in zip(operations_of, tensors, strict=True):
        others = _used_with(tensor)
        delay([seed] * len(others), others)


def _used_with(tensor: tf.Tensor) -> list[tf.Tensor]:
    """Returns the other inputs of operations that use a tensor or a result of only that tensor."""
    found, alone, queue = [], {tensor.ref()}, [tensor]
    while queue:
        for operation in queue.pop().consumers():
            others = [t for t in operation.inputs if t.ref() not in alone and not _is_constant(t)]
            found += others
            if not others:
                queue += [output for output in operation.outputs if output.ref() not in alone]
                alone |= {output.ref() for output in operation.outputs}
    return found


def delay(operations_of: Sequence[tf.Tensor], until: Sequence[tf.Tensor | None]) -> None:
    """Makes the operation of each tensor wait for another tensor that does not depend on it.

    Args:
        operations_of: Tensors of the current graph.
        until: For each tensor, a tensor of the same graph or None.
    """
    for tensor, other in zip(operations_of, until, strict=True):
        if other is not None and not _depends(other, tensor.op):
            private_graph_apis.add_control_input(tensor.op, other.op)


def _depends(tensor: tf.Tensor, operation: tf.Operation) -> bool:
    seen, stack = set(), [tensor.op]
    while stack:
        current = stack.pop()
        if current is operation:
            return True
        if current not in seen:
            seen.add(current)
            stack.extend([t.op for t in current.inputs])
            stack.extend(current.control_inputs)
    return False
