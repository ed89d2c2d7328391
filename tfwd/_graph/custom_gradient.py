"""`tf.custom_gradient` without its memory leak.

In a graph, `tf.custom_gradient` adds its gradient under a new name to a global table. The entry is
never removed. The gradient refers to tensors of the graph, and the graph refers to the variables
that it reads. So no traced model is ever freed. But only an operation of that graph needs the name.
In this module, the graph itself holds the gradient, and the table has a weak reference. The entry
is removed together with the graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

_PREFIX = "CustomGradient-"
_HELD = "_tfwd_gradients"  # attribute of a graph that holds its gradients by name
_VALUE = "type"  # key of the gradient in an entry of TensorFlow's table


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `tf.custom_gradient` so that the gradient lives only as long as its graph.

    Args:
        function: Function that returns one or more tensors, and a function that computes their
            gradient.

    Example:
        >>> import gc
        >>> @custom_gradient
        ... def square(x):
        ...     return x * x, lambda upstream: 2 * x * upstream
        >>> @tf.function
        ... def slope(x):
        ...     with tf.GradientTape() as tape:
        ...         tape.watch(x)
        ...         y = square(x)
        ...     return tape.gradient(y, x)
        >>> before = registered()
        >>> float(slope(tf.constant(3.0))), len(registered() - before)
        (6.0, 1)
        >>> del slope
        >>> _ = gc.collect()
        >>> len(registered() - before)
        0
    """
    run = tf.custom_gradient(function)

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        results = run(*args)
        for result in tf.nest.flatten(results):
            if _is_symbolic(result):  # all results come from one operation
                _hand_over(result.graph, result.op.get_attr("_gradient_op_type").decode())
                hand_over_gradients(result.graph)
                break
        return results

    return wrapped


def release_models() -> None:
    """Frees models that TensorFlow's table of custom gradients keeps alive.

    Afterwards each graph holds all gradients that were traced in it, also gradients of other code.
    An example is an optimizer's step in `fit`, which has a custom gradient of TensorFlow. So models
    without layers of tfwd are freed too. Existing functions still work. The next garbage collection
    frees the memory.

    Example:
        >>> import gc, keras, tensorflow as tf, tfwd
        >>> model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(tf.ones([4, 3]), tf.ones([4, 1]), verbose=0)
        >>> del model, history
        >>> keras.backend.clear_session()
        >>> tfwd.release_models()
        >>> _ = gc.collect()
    """
    for name in registered():
        _hand_over_if(name, lambda graph: True)


def registered() -> set[str]:
    """Returns the names of all custom gradients in TensorFlow's table."""
    # Copied in one operation, because a garbage collection during a loop may remove names.
    names = list(ops.gradient_registry._registry)
    return {name for name in names if name.startswith(_PREFIX)}


def registered_gradient(name: str) -> Callable[..., Any]:
    """Returns the gradient that was registered under a name, instead of a weak reference."""
    found = ops.gradient_registry.lookup(name)
    return found.held() or found if hasattr(found, "held") else found


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and not hasattr(value, "numpy")


def _hand_over(graph: tf.Graph, name: str) -> None:
    """Makes the graph hold a gradient, and the table refer to the gradient weakly."""
    entry = ops.gradient_registry._registry[name]
    gradient = entry[_VALUE]
    _held(graph)[name] = gradient
    entry[_VALUE] = _reference(name, gradient)
    # At the end of the process nothing needs to be removed.
    weakref.finalize(graph, _remove, name).atexit = False


def _held(graph: tf.Graph) -> dict[str, Callable[..., Any]]:
    """Returns the gradients that a graph holds. A graph with this attribute is followed."""
    if not hasattr(graph, _HELD):
        setattr(graph, _HELD, {})
    return getattr(graph, _HELD)


def _remove(name: str) -> None:
    ops.gradient_registry._registry.pop(name, None)


def _reference(name: str, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a gradient as long as another object holds the gradient."""
    held = weakref.ref(gradient)

    @tf.autograph.experimental.do_not_convert
    def referred(operation: Any, *upstream: Any) -> Any:
        found = held()
        if found is None:
            raise LookupError(
                f"the graph in which the gradient {name} was traced was deleted: keep the traced "
                "function until its gradient is computed"
            )
        return found(operation, *upstream)

    referred.held = held
    return referred


# The custom gradients that were in the table at the last call of `hand_over_gradients`, and its
# newest entry.
_known: set[str] = set()
_last: str | None = None


def hand_over_gradients(graph: tf.Graph | None = None) -> None:
    """Hands over gradients of other code that were traced in a graph, around it or inside it.

    One such entry of the table would keep the graph and all its tensors alive.

    Args:
        graph: Graph. Default None, for the current graph. Does nothing in eager mode.
    """
    global _known, _last
    if graph is None:
        if tf.executing_eagerly():
            return
        graph = tf.compat.v1.get_default_graph()
    for each in _functions(graph):
        _held(each)
    last = next(reversed(ops.gradient_registry._registry), None)
    if last == _last:
        return
    present = registered()
    for name in present - _known:
        _hand_over_if(name, lambda graph: any(hasattr(g, _HELD) for g in _functions(graph)))
    _known, _last = present, last


def _functions(graph: Any) -> Iterator[tf.Graph]:
    """Yields a function's graph and the function graphs around it, innermost first."""
    while isinstance(graph, tf.__internal__.FuncGraph):
        yield graph
        graph = graph.outer_graph


def _hand_over_if(name: str, chosen: Callable[[tf.Graph], bool]) -> None:
    entry = ops.gradient_registry._registry.get(name)
    if entry is None or hasattr(entry[_VALUE], "held"):
        return
    graph = _graph_of(entry[_VALUE])
    if graph is not None and chosen(graph):
        _hand_over(graph, name)


def _graph_of(gradient: Callable[..., Any]) -> tf.Graph | None:
    """Returns the graph in which a custom gradient was traced, or None if it is unknown."""
    results = _enclosed(_enclosed(gradient).get("tape_grad_fn")).get("result")
    tensors = tf.nest.flatten(results, expand_composites=True)
    graphs = {id(t.graph): t.graph for t in tensors if _is_symbolic(t)}
    return next(iter(graphs.values())) if len(graphs) == 1 else None


def _enclosed(function: Any) -> dict[str, Any]:
    """Returns the variables that a function has captured, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
