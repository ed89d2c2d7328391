"""Finds the variables that a `tf.function` assigns to when it is called.

A function that was traced earlier assigns to variables without their Python methods. TensorFlow
itself knows which resources a function only reads, because it orders the operations by them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework import auto_control_deps_utils
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from tfwd import _keras

_READ_ONLY = "_tfwd_read_only_inputs"


class VariableResource(NamedTuple):
    """The resource of a variable, without the Python object of the variable.

    Attributes:
        handle: the resource, a tensor outside all functions.
        dtype: the dtype of the variable.
    """

    handle: tf.Tensor
    dtype: tf.DType

    def read_value(self) -> tf.Tensor:
        """Reads the variable."""
        return tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)

    def assign(self, value: Any) -> None:
        """Assigns to the variable."""
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)


def before_calls(before: Callable[[list[VariableResource]], None]) -> _keras.Patch:
    """Returns a patch that calls `before` with the variables that a called function assigns to.

    Args:
        before: function that is called before each call of a `tf.function`, eagerly or in a graph.
            It gets only variables that are initialized.
    """

    def calling(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
            before(list(_assigned(self._func_graph, [*tensor_inputs, *captured_inputs])))
            return own(self, tensor_inputs, captured_inputs)

        return call

    return ConcreteFunction, "_call_flat", calling


def _assigned(graph: Any, given: Sequence[Any]) -> Iterator[VariableResource]:
    """Yields the variables that a function's graph assigns to, for the inputs of a call."""
    read_only = getattr(graph, _READ_ONLY, None)
    if read_only is None:
        read_only = auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph)
        setattr(graph, _READ_ONLY, read_only)
    for i, (inner, outer) in enumerate(zip(graph.inputs, given, strict=False)):
        if inner.dtype != tf.resource or i in read_only:
            continue
        data = handle_data_util.get_resource_handle_data(inner)
        handle = _outside(outer)
        if handle is None or not data.is_set or len(data.shape_and_type) != 1:
            continue  # an argument of the function around the call, or a table
        dtype = tf.dtypes.as_dtype(data.shape_and_type[0].dtype)
        with tf.init_scope():
            is_ready = bool(resource_variable_ops.var_is_initialized_op(handle))
        if is_ready:
            yield VariableResource(handle, dtype)


def _outside(handle: Any) -> Any:
    """Returns the tensor outside all functions that a resource was captured from, or None."""
    while (graph := getattr(handle, "graph", None)) is not None:
        outer = [outer for outer, inner in getattr(graph, "captures", []) if inner is handle]
        if not outer:
            return None
        handle = outer[0]
    return handle
