"""Replaces the tensors that TensorFlow keeps for backward.

The gradient of a product needs its factors. When it is built in a graph of its own, it takes them
from the forward graph by capturing them; what is captured is what is kept alive from forward to
backward. Here a capture is looked at: if the tensor was computed from chosen ones alone, by
operations that can be made again, they are made again on the replacements of these, and nothing is
captured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfwd._graph import graphs


@contextlib.contextmanager
def replaced(chosen: Sequence[tf.Tensor], replacements: Sequence[tf.Tensor]) -> Iterator[None]:
    """Inside, operations of the present function get the replacements of chosen outer tensors.

    It must be entered while a `tf.function` is traced. Not only the chosen tensors are replaced,
    but all that were computed from nothing else but them and constants.

    Args:
        chosen: tensors of a graph around that of the function.
        replacements: tensors of the function, of the same shapes and dtypes and, for the result to
            be right, values.

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
    with graphs.captures_from(tf.compat.v1.get_default_graph(), copies.find):
        yield


class _Copies:
    """Finds, and makes where needed, what stands for a tensor of the outer graph."""

    def __init__(self, chosen: Sequence[tf.Tensor], replacements: Sequence[tf.Tensor]) -> None:
        self._graph = tf.compat.v1.get_default_graph()
        self._known: dict[Any, tf.Tensor | None] = {
            tensor.ref(): other for tensor, other in zip(chosen, replacements, strict=True)
        }
        self._outer = {id(tensor.graph) for tensor in chosen}

    def find(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """What stands for the tensor, or None if it is to be captured."""
        if id(getattr(tensor, "graph", None)) not in self._outer or _is_constant(tensor):
            return None
        self._resolve(tensor)
        return self._known[tensor.ref()]

    def _resolve(self, wanted: tf.Tensor) -> None:
        # Not by recursion: the operations between may be many.
        stack = [wanted]
        while stack:
            tensor = stack[-1]
            if tensor.ref() in self._known:
                stack.pop()
                continue
            inputs = _inputs(tensor)
            pending = [t for t in inputs if t.ref() not in self._known and not _is_constant(t)]
            # One input that must be captured settles it.
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
    """Returns the tensors that it was computed from; none if it cannot be computed again."""
    operation = tensor.op
    if operation.type == "IdentityN":  # what a function with a gradient of its own returns
        return [operation.inputs[tensor.value_index]]
    if operation.type in _LOOPS:  # returns what it does not change, and its gradient asks for that
        unchanged = graphs.is_loop_invariant(operation, tensor.value_index)
        return [operation.inputs[tensor.value_index]] if unchanged else []
    if operation.op_def.is_stateful or operation.control_inputs or _calls_functions(operation):
        return []
    if operation.type == "PlaceholderWithDefault":  # the counter of a vectorized_map, say
        return []
    return list(operation.inputs)


def _calls_functions(operation: tf.Operation) -> bool:
    return any(value.HasField("func") for value in operation.node_def.attr.values())


def delay_to_use(operations_of: Sequence[tf.Tensor], tensors: Sequence[tf.Tensor]) -> None:
    """Lets what makes each seed wait for all that the tensor drawn from it is used with.

    So the draws for the layers of a model are not all made as the model is entered.

    Args:
        operations_of: the seeds, of the present graph.
        tensors: for each what was drawn from it.
    """
    for seed, tensor in zip(operations_of, tensors, strict=True):
        others = _used_with(tensor)
        delay([seed] * len(others), others)


def _used_with(tensor: tf.Tensor) -> list[tf.Tensor]:
    """What operations take besides a tensor, or besides what is computed from it alone."""
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
    """Lets what makes each tensor wait for another tensor, unless that depends on it.

    Args:
        operations_of: tensors of the present graph.
        until: for each a tensor of the same graph, or None.
    """
    for tensor, other in zip(operations_of, until, strict=True):
        if other is not None and not _depends(other, tensor.op):
            graphs.add_control_input(tensor.op, other.op)


def _depends(tensor: tf.Tensor, operation: tf.Operation) -> bool:
    seen, stack = set(), [tensor.op]
    while stack:
        present = stack.pop()
        if present is operation:
            return True
        if present not in seen:
            seen.add(present)
            stack.extend([t.op for t in present.inputs])
            stack.extend(present.control_inputs)
    return False
