"""Functions on private APIs of TensorFlow: captures, loops, branches, reads of variables.

They trace into a scratch graph for inspection. They replace outer tensors that a function requests,
for `saved_tensors`. They detect loops and branches. They find the variables that a function reads,
and run code outside a function.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import backprop_util, record
from tensorflow.python.ops import control_flow_util, control_flow_v2_func_graphs, gradients_util
from tensorflow.python.saved_model import save_context

from tfwd import _keras
from tfwd._graph import custom_gradient


class ScratchGraph(tf.__internal__.FuncGraph):
    """A graph to trace into for inspection.

    Attributes:
        taken: Outer tensors that its operations use.
        gradients_taken: Number of calls of `tf.GradientTape.gradient` in it.
    """

    def __init__(self) -> None:
        super().__init__("tfwd_inspection")
        self.taken: list[tf.Tensor] = []
        self.gradients_taken = 0

    def capture(self, tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        if getattr(tensor, "graph", None) is not self:
            self.taken.append(tensor)
        return super().capture(tensor, *args, **kwargs)

    @contextlib.contextmanager
    def traced_into(self) -> Iterator[None]:
        """Adds the operations of the body to this graph."""

        def counting(own: Callable[..., Any]) -> Callable[..., Any]:
            def gradient(tape: tf.GradientTape, *args: Any, **kwargs: Any) -> Any:
                self.gradients_taken += is_of_scratch(_keras.present_graph())
                return own(tape, *args, **kwargs)

            return gradient

        with _keras.patched([(tf.GradientTape, "gradient", counting)]), self.as_default():
            yield

    def variables_read(self) -> list[tf.Variable]:
        """Returns the TensorFlow variables that the graph has recorded as read."""
        return list(self._watched_variables)

    def reads(self, variable: keras.Variable) -> bool:
        """Returns True if the `tf.Variable` of a Keras variable is read or passed to a function."""
        parts = _keras.variables.tf_variables(variable)
        read = self.variables_read()
        return any(
            any(part is other for other in read) or any(part.handle is t for t in self.taken)
            for part in parts
        )

    def kept_by(self, layer: keras.Layer) -> str | None:
        """Returns the name of a layer's attribute that holds a tensor of this graph, or None."""
        for name, attribute in vars(layer).items():
            if isinstance(attribute, dict):
                attribute = list(attribute.values())
            items = attribute if isinstance(attribute, (list, tuple)) else [attribute]
            if any(isinstance(x, tf.Tensor) and self._holds(x) for x in items):
                return name
        return None

    def _holds(self, tensor: tf.Tensor) -> bool:
        return getattr(tensor, "graph", None) is self

    def differentiate(self, outputs: list[tf.Tensor]) -> None:
        """Builds the gradients of outputs, so that variables read in backward are found too."""
        operations = self.get_operations()
        sources = [op.outputs[0] for op in operations if op.type == "Placeholder"]
        # If it fails, the real gradient raises the error later.
        with self.as_default(), contextlib.suppress(Exception):
            gradients(outputs, [t for t in sources if t.dtype.is_floating], [None] * len(outputs))


def has_users_gradient(node: Any) -> bool:
    """Returns True if a user, and not TensorFlow or tfwd, wrote an operation's gradient.

    Args:
        node: Definition of the operation.
    """
    kind = node.attr["_gradient_op_type"].s.decode() if "_gradient_op_type" in node.attr else ""
    if not kind.startswith("CustomGradient"):
        return False
    # TensorFlow wraps a user's function in its own functions.
    registered = custom_gradient.registered_gradient(kind)
    inside = [f for around in _enclosed(registered) for f in _enclosed(around)]
    return not any(str(getattr(f, "__module__", "")).startswith("tfwd.") for f in inside)


def _enclosed(function: Any) -> list[Any]:
    """Returns the values that a function has captured."""
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def is_of_scratch(value: Any) -> bool:
    """Returns True for a scratch graph, and for a tensor or a function graph inside one."""
    graph = value if isinstance(value, tf.Graph) else None
    if isinstance(value, tf.Tensor):
        graph = getattr(value, "graph", None)
    while graph is not None and not isinstance(graph, ScratchGraph):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


def taken(
    outputs: Iterable[tf.Tensor], known: Iterable[tf.Tensor], before: tf.Operation
) -> list[tf.Tensor]:
    """Returns the tensors, except known tensors, from which outputs of the graph were computed.

    Args:
        outputs: Tensors. Their operations are followed back to `before`.
        known: Tensors that are not followed.
        before: Operation. Tensors of this or of an earlier operation are not followed.

    Returns:
        Differentiable tensors that existed before, or that come from outside the graph.
    """
    graph = before.graph
    given = {tensor.ref() for tensor in known}
    seen = set(given)
    found, stack = [], [t for t in outputs if getattr(t, "graph", None) is graph]
    while stack:
        tensor = stack.pop()
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        operation = tensor.op
        if operation._id > before._id and operation.type != "Placeholder":
            stack.extend(operation.inputs)
            continue
        # A tensor that was captured from the outer graph may be a known tensor there.
        known_outside = gradients_util._MaybeCaptured(tensor).ref() in given
        constant = operation.type in ("Const", "StopGradient")
        if _is_differentiable(tensor) and not constant and not known_outside:
            found.append(tensor)
    return found


def _is_differentiable(tensor: tf.Tensor) -> bool:
    return tensor.dtype.is_floating or tensor.dtype.is_complex


def nodes(graph: tf.Graph, operations: Iterable[tf.Operation]) -> Iterator[Any]:
    """Yields the definitions of operations, and of the operations in functions that they call."""
    found = [operation.node_def for operation in operations]
    yield from found
    functions: dict[str, Any] | None = None
    seen: set[str] = set()
    while names := {name for node in found for name in _called(node)} - seen:
        if functions is None:  # the conversion of the whole graph is slow: only if needed
            functions = {f.signature.name: f for f in graph.as_graph_def().library.function}
        seen |= names
        found = [n for name in names if name in functions for n in functions[name].node_def]
        yield from found


def _called(node: Any) -> Iterator[str]:
    for attribute in node.attr.values():
        called = [attribute.func, *attribute.list.func]
        yield from (function.name for function in called if function.name)


@contextlib.contextmanager
def captures_from(graph: tf.Graph, find: Callable[[tf.Tensor], tf.Tensor | None]) -> Iterator[None]:
    """Makes a function's graph call `find` for an inner tensor before it captures an outer tensor.

    Args:
        graph: Graph of a function that is being traced.
        find: Function that is called with each outer tensor. It returns the inner tensor to use, or
            None to capture the outer tensor.
    """

    def capture(tensor: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        if tf.is_tensor(tensor) and getattr(tensor, "graph", graph) is not graph:
            found = find(tensor)
            if found is not None:
                # As in a capture, a tape that watches the outer tensor watches the inner tensor.
                record.record_operation("captured_value", [found], [tensor], lambda x: [x])
                return found
        return type(graph).capture(graph, tensor, *args, **kwargs)

    graph.capture = capture
    try:
        yield
    finally:
        del graph.capture


def gradients(
    outputs: list[tf.Tensor], sources: list[tf.Tensor], upstream: list[tf.Tensor]
) -> list[Any]:
    """Returns the partial derivatives of a graph's outputs, built in the current function's graph.

    A tape would compute the same. But under a second tape, TensorFlow wraps loops in functions that
    keep their arguments alive.

    Returns:
        A gradient or None for each source. Each source is treated as independent of the others.
    """
    with _bounded_search([output.op for output in outputs]):
        return gradients_util._GradientsHelper(
            outputs,
            sources,
            grad_ys=upstream,
            stop_gradients=sources,
            src_graph=outputs[0].graph if outputs else tf.compat.v1.get_default_graph(),
        )


_here = threading.local()


@contextlib.contextmanager
def _bounded_search(ends: list[tf.Operation]) -> Iterator[None]:
    """Limits TensorFlow's search from the sources to operations that are not after the outputs.

    Otherwise TensorFlow searches the whole graph again for each layer of a model. The time for a
    model's gradients would then grow with the square of its layers.
    """

    def bounded(own: Callable[..., None]) -> Callable[..., None]:
        def mark(sources: list[tf.Operation], reached: set, graphs: list[Any]) -> None:
            ends = getattr(_here, "ends", [])
            if len({id(op.graph) for op in (*ends, *sources)}) != 1:
                own(sources, reached, graphs)
                return
            last = max(op._id for op in ends)
            queue = list(sources)
            while queue:
                operation = queue.pop()
                if operation in reached:
                    continue
                reached.add(operation)
                found = [t for t in operation.outputs if backprop_util.IsTrainable(t)]
                queue += [op for t in found for op in t.consumers() if op._id <= last]

        return mark

    before, _here.ends = getattr(_here, "ends", []), ends
    try:
        with _keras.patched([(gradients_util, "_MarkReachedOps", bounded)]):
            yield
    finally:
        _here.ends = before


def is_loop_invariant(loop: tf.Operation, index: int) -> bool:
    """Returns True if each iteration of a loop returns this loop variable unchanged."""
    body = getattr(loop, "_body_graph", None)
    if body is None or index >= len(body.inputs):
        return False
    output = body.outputs[index]
    while output.op.type == "Identity":
        output = output.op.inputs[0]
    return output is body.inputs[index]


def _present_and_around() -> Iterator[Any]:
    """Yields the current graph and the graphs around it, innermost first."""
    graph: Any = _keras.present_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def in_branch() -> bool:
    """Returns True if the current graph is in a branch of a `tf.cond`.

    In a branch, a hand-written gradient fails for a tape outside the branch. The tensors that it
    stores have no static shape outside, and XLA needs static shapes. TensorFlow's own gradients
    work in a branch.
    """
    return any(map(_is_branch, _present_and_around()))


def in_branch_of_loop() -> bool:
    """Returns True if the current graph is in a branch of a `tf.cond` inside a `tf.while_loop`.

    TensorFlow's gradient of such a branch fails if a hand-written gradient in it requests a tensor.
    """
    around = itertools.dropwhile(lambda graph: not _is_branch(graph), _present_and_around())
    loop = control_flow_v2_func_graphs.WhileBodyFuncGraph
    return any(isinstance(graph, loop) for graph in around)


def _is_branch(graph: Any) -> bool:
    return isinstance(graph, control_flow_v2_func_graphs.CondBranchFuncGraph)


def is_branch_or_loop(graph: Any) -> bool:
    """Returns True for the graph of a branch or loop, and False for the graph of a function."""
    loop = control_flow_v2_func_graphs.WhileBodyFuncGraph
    condition = control_flow_v2_func_graphs.WhileCondFuncGraph
    return _is_branch(graph) or isinstance(graph, (loop, condition))


def held_here(variable: tf.Variable) -> tf.Tensor | None:
    """Returns a variable's resource inside the current loop or branch, or None outside both.

    TensorFlow's gradient of a loop or branch can use only resources that the loop or branch has
    captured.
    """
    kinds = (
        control_flow_v2_func_graphs.WhileBodyFuncGraph,
        control_flow_v2_func_graphs.CondBranchFuncGraph,
    )
    if not any(isinstance(graph, kinds) for graph in _present_and_around()):
        return None
    return tf.compat.v1.get_default_graph().capture(variable.handle)


def is_saving() -> bool:
    """Returns True if functions are traced for a SavedModel, with their gradients.

    TensorFlow cannot save a hand-written gradient that needs tensors stored by a loop.
    """
    return save_context.in_save_context()


def add_control_input(operation: tf.Operation, other: tf.Operation) -> None:
    """Makes an operation of a graph wait for another operation."""
    operation._add_control_input(other)


class Accesses(record.VariableWatcher):
    """Record of the `tf.Variable`s that are read in its body, also by traced functions."""

    def has(self, variable: keras.Variable) -> bool:
        """Returns True if the `tf.Variable` of a Keras variable was read."""
        parts = _keras.variables.tf_variables(variable)
        return any(part is other for other in self.watched_variables() for part in parts)


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Runs the body eagerly, and lets it use tapes, even while a function is traced."""
    if tf.executing_eagerly():
        yield
        return
    with tf.init_scope():
        # This scope stops all tapes of the thread, including tapes that begin inside it.
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def unrecorded() -> contextlib.AbstractContextManager[None]:
    """Makes tapes ignore the operations of the body, which has a hand-written gradient.

    In eager mode, a tape would store the tensors of these operations. In a graph, TensorFlow would
    build a loop's gradient immediately. The loop would then store the tensors of all its steps.
    """
    return record.stop_recording()


def in_xla() -> bool:
    """Returns True if operations are currently traced for compilation by XLA."""
    graph = _keras.present_graph()
    return graph is not None and control_flow_util.GraphOrParentsInXlaContext(graph)
