"""`tf.custom_gradient` without its memory leak.

`tf.custom_gradient`, traced in a graph, enters its gradient under a new name into a global table
that nothing is ever removed from. The gradient refers to tensors of the graph, the graph to the
variables that it reads: so no traced model is ever freed. An operation of that graph is all that
asks for the name. Here the graph itself holds the gradient, the table has a weak reference, and
the entry goes when the graph does.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops

_PREFIX = "CustomGradient-"
_HELD = "_tfwd_gradients"  # the attribute of a graph: its gradients by name
_VALUE = "type"  # the key of what an entry of TensorFlow's table is about


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`tf.custom_gradient`, whose gradient lives as long as the graph that it was traced in.

    Args:
        function: returns one or more tensors, and the function that computes their gradient.

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
            if _is_symbolic(result):  # all come from one operation
                _hand_over(result.graph, result.op.get_attr("_gradient_op_type").decode())
                follow(result.graph)
                break
        return results

    return wrapped


def release() -> None:
    """Lets graphs hold the gradients that were traced in them, whoever wrote these.

    TensorFlow's table then keeps no model that was dropped, be it one without any layer of tfwd:
    an optimizer's step in `fit` has such a gradient, TensorFlow's own. All that exists goes on
    working. What is freed is freed by the next garbage collection.

    Example:

    >>> import gc, keras
    >>> model = keras.Sequential([keras.layers.Input([3]), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> before = registered()
    >>> history = model.fit(tf.ones([4, 3]), tf.ones([4, 1]), verbose=0)
    >>> del model, history
    >>> keras.backend.clear_session()
    >>> len(registered() - before) > 0
    True
    >>> release()
    >>> _ = gc.collect()
    >>> len(registered() - before)
    0
    """
    for name in registered():
        _hand_over_if(name, lambda graph: True)


def registered() -> set[str]:
    """Returns the names of all custom gradients in TensorFlow's table."""
    # A copy first, in one go: a garbage collection inside a loop may take names out.
    names = list(ops.gradient_registry._registry)
    return {name for name in names if name.startswith(_PREFIX)}


def find(name: str) -> Callable[..., Any]:
    """Returns the gradient that was registered under a name, and not a reference to it."""
    found = ops.gradient_registry.lookup(name)
    return found.held() or found if hasattr(found, "held") else found


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and not hasattr(value, "numpy")


def _hand_over(graph: tf.Graph, name: str) -> None:
    """Lets the graph hold the gradient, and the table refer to it."""
    entry = ops.gradient_registry._registry[name]
    gradient = entry[_VALUE]
    _held(graph)[name] = gradient
    entry[_VALUE] = _reference(name, gradient)
    # At the end of the process nothing needs to be removed.
    weakref.finalize(graph, _remove, name).atexit = False


def _held(graph: tf.Graph) -> dict[str, Callable[..., Any]]:
    """What a graph holds. A graph that holds something, or nothing yet, is followed."""
    if not hasattr(graph, _HELD):
        setattr(graph, _HELD, {})
    return getattr(graph, _HELD)


def _remove(name: str) -> None:
    ops.gradient_registry._registry.pop(name, None)


def _reference(name: str, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that calls a gradient as long as something else holds that."""
    held = weakref.ref(gradient)

    @tf.autograph.experimental.do_not_convert
    def referred(operation: Any, *upstream: Any) -> Any:
        found = held()
        if found is None:
            raise LookupError(f"the graph in which the gradient {name} was traced is gone")
        return found(operation, *upstream)

    referred.held = held
    return referred


# The custom gradients that were in the table when `follow` last looked, and its newest entry.
_known: set[str] = set()
_last: str | None = None


def follow(graph: tf.Graph | None = None) -> None:
    """Hands over what others have traced, or will, in a graph, around it or inside it.

    One entry of theirs would keep the graph, and with it all that tfwd has put into it.

    Args:
        graph: by default the present one; in eager mode there is none.
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
    """Returns the graphs of the functions around an operation, from within."""
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
    """Returns the graph in which TensorFlow has traced a custom gradient, None if that cannot be told."""
    results = _enclosed(_enclosed(gradient).get("tape_grad_fn")).get("result")
    tensors = tf.nest.flatten(results, expand_composites=True)
    graphs = {id(t.graph): t.graph for t in tensors if _is_symbolic(t)}
    return next(iter(graphs.values())) if len(graphs) == 1 else None


def _enclosed(function: Any) -> dict[str, Any]:
    """What a function has of the one around it, by name."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = getattr(function, "__closure__", None) or ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
