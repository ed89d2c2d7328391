"""Look at a layer's call before it is trusted to run on other weights, and twice.

The call is traced once into a graph that is thrown away. What it reads, updates and draws there
tells whether the effective weights reach it at all, and whether a second run in backward would
compute the same. Without this, a layer that reads a variable behind Keras's back would silently
train on its raw weights, and one that draws from a stateful generator would get the gradient of
another draw.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _graphs, _keras
from tfwd.substitute import Result

if TYPE_CHECKING:
    from tfwd.layers.perturbed import _Call

# Calls of Python may do anything.
_FREE = {"EagerPyFunc", "PyFunc"}


class Verdict(NamedTuple):
    """What a call was seen to do.

    Attributes:
        impure: why the call cannot be run again, the end of a sentence; empty if it can.
        updated: the variables that it updates, under either training flag.
        losses: how many losses it adds, the larger number of the two flags.
        extra: the variables that it reads besides those that its layer lists.
        seen: whether it could be looked at, so that it is known to read no weight past Keras.
    """

    impure: str
    updated: list[keras.Variable]
    losses: int
    extra: list[keras.Variable]
    seen: bool = True


def inspect(name: str, owner: keras.Layer, parametrized: dict[int, str], call: _Call) -> Verdict:
    """Traces a call and says what it does.

    Args:
        name: the layer's name, for messages.
        owner: the layer that is called, with all layers in it.
        parametrized: the names of the parametrized weights by the variables' ids.
        call: the call.

    Raises:
        ValueError: if it reads a parametrized weight in a way that cannot be substituted, or
            assigns to one.

    Warns:
        UserWarning: if it does not read a parametrized weight.
    """
    _check_calls(name, owner)
    with _attributes_restored(owner):
        return _inspected(name, owner, parametrized, call)


@contextlib.contextmanager
def _attributes_restored(owner: keras.Layer) -> Iterator[None]:
    """Afterwards no layer has a tensor of the inspection for an attribute, as it caches one."""
    before = [(layer, dict(vars(layer))) for layer in _keras.all_layers(owner)]
    try:
        yield
    finally:
        for layer, attributes in before:
            now = vars(layer)
            for name in [name for name, value in now.items() if _graphs.is_of_scratch(value)]:
                if name in attributes:
                    now[name] = attributes[name]
                else:
                    del now[name]


def _inspected(name: str, owner: keras.Layer, parametrized: dict[int, str], call: _Call) -> Verdict:
    """`inspect`, without what makes up for it."""
    # Otherwise, in a graph, only what the parametrizations do is done again in backward.
    runs_again = tf.executing_eagerly() or not isinstance(call.training, bool)
    graph = _graphs.ScratchGraph()
    try:
        results, draws = _trace(call, graph)
        known = {id(v) for v in call.variables}
        extra = {id(v): v for r in results for v in r.read.values() if id(v) not in known}
        if extra:
            # Keras does not list them, as the states of a stateful RNN; they are values too.
            call.extend(list(extra.values()))
            graph = _graphs.ScratchGraph()
            results, draws = _trace(call, graph)
    except Exception as error:
        # What is wrong with the call itself will be said when it is made in earnest.
        reason = f"it cannot be traced by itself ({type(error).__name__})"
        return Verdict(reason, [], 0, [], seen=False)
    updated = {id(v): v for result in results for v, _ in result.updates}
    given = [v for v in call.variables if id(v) in parametrized]
    check_reads(name, parametrized, given, graph.reads)
    for key in updated:
        if key in parametrized:
            raise ValueError(
                f"layer '{name}' assigns to its weight '{parametrized[key]}' when it is called; "
                "such a weight cannot be parametrized"
            )
    unread = [text for key, text in parametrized.items() if key not in results[0].read]
    if unread:
        warnings.warn(
            f"layer '{name}' does not read {', '.join(map(repr, unread))} when it is called, so "
            "that the parametrization there has no effect",
            stacklevel=2,
        )
    escaped = [_keras.path(v) for result in results for v in result.escaped]
    if runs_again:
        draws = _unrepeatable(graph)
    if python := [node.op for node in _nodes(graph) if node.op in _FREE]:
        warnings.warn(
            f"layer '{name}' calls Python as an operation ({python[0]}); a weight that is read in "
            "there has no gradient, and in a graph its raw value: give it to that function as an "
            "argument",
            stacklevel=2,
        )
    impure = ""
    if escaped:
        impure = f"it updates '{escaped[0]}' inside a loop or a branch"
    elif behind := graph.variables_read():
        impure = f"it reads the variable '{behind[0].name}' past Keras"
    elif kept := [n for inner in _keras.all_layers(owner) if (n := graph.kept_by(inner))]:
        impure = f"it keeps a tensor in its attribute '{kept[0]}'"
    elif graph.differentiable_taken():
        impure = "it uses a tensor that is not among its arguments"
    elif draws:
        impure = f"it, or a parametrization, uses what cannot be repeated ({draws[0]})"
    graph.differentiate(_differentiable(results))
    for variable in filter(graph.reads, given):
        raise ValueError(
            f"layer '{name}' reads its weight '{parametrized[id(variable)]}' in backward, in a "
            "tf.recompute_grad or tf.custom_gradient of its own, where no other value can be given "
            "to it: give it to that function as an argument, and not as self.<weight>"
        )
    if not impure and (behind := graph.variables_read()):
        impure = f"it reads the variable '{behind[0].name}' in backward, in a gradient of its own"
    losses = max(len(result.losses) for result in results)
    return Verdict(impure, list(updated.values()), losses, list(extra.values()))


def check_reads(
    name: str,
    parametrized: dict[int, str],
    given: Iterable[keras.Variable],
    reads: Callable[[keras.Variable], bool],
) -> None:
    """Raises a ValueError if a call has read the raw value of a weight that it was given another.

    Args:
        name: the layer's name.
        parametrized: the names of the parametrized weights by the variables' ids.
        given: these variables.
        reads: whether one was read.
    """
    for variable in filter(reads, given):
        raise ValueError(
            f"layer '{name}' reads its weight '{parametrized[id(variable)]}' past Keras (a "
            "tf.Variable kept aside, or one that another function has captured), so that no "
            "other value can be given to it: read it as self.<weight> in call()"
        )


@contextlib.contextmanager
def kept_tensors_explained(name: str) -> Iterator[None]:
    """Says more than TensorFlow where a call fails on a tensor that another call has left behind.

    Raises:
        ValueError: instead of TensorFlow's error.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise ValueError(
            f"layer '{name}', or one inside it, goes on with a tensor of an earlier call, most "
            "often because a method is a tf.function, which keeps the weights that it was traced "
            "with: take its decorator off, or give it the weights as arguments"
        ) from error


def _differentiable(results: list[Result]) -> list[tf.Tensor]:
    outputs = [t for r in results for t in tf.nest.flatten((r.outputs, r.losses))]
    return [t for t in outputs if isinstance(t, tf.Tensor) and t.dtype.is_floating]


def _check_calls(name: str, owner: keras.Layer) -> None:
    """Raises a ValueError if a layer's call is a tf.function, which keeps what it once read."""
    for layer in _keras.all_layers(owner):
        if isinstance(layer.call, tf.types.experimental.PolymorphicFunction):
            raise ValueError(
                f"the call of layer '{layer.name}', inside '{name}', is itself a tf.function and "
                "goes on with the weights that it was traced with: take the decorator off, and "
                "put a tf.function around the training step"
            )


def _trace(call: _Call, graph: tf.Graph) -> tuple[list[Result], list[str]]:
    """Evaluates a call in a graph that is thrown away, under each flag that it may have.

    Returns:
        What each evaluation gave, and what the parametrizations used that cannot be repeated.
    """
    flags = [call.training] if isinstance(call.training, bool) else [True, False]
    with graph.as_default():
        results, draws = [], []
        for flag in flags:
            tensors = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in call.tensors]
            seeds = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in call.seeds]
            before = len(graph.get_operations())
            weights = call.weights(flag, tensors, seeds)
            draws += _unrepeatable(graph, before)
            results.append(call.evaluate(flag, tensors, seeds, weights, capture=True))
        return results, draws


def _unrepeatable(graph: tf.Graph, since: int = 0) -> list[str]:
    """The types of the operations in the graph, and in its functions, that draw from a state.

    Of the graph's own operations those from the given number on count.

    These are the ones with the seeds of TensorFlow's first random operations; what the stateless
    ones draw from is an argument, and a `tf.random.Generator` is a variable.
    """
    nodes = _nodes(graph, since)
    return sorted({node.op for node in nodes if node.op in _FREE or _draws(node)})


def _nodes(graph: tf.Graph, since: int = 0) -> Iterator[Any]:
    return _graphs.nodes(graph, graph.get_operations()[since:])


def _draws(node: Any) -> bool:
    if "seed2" not in node.attr:
        return False
    # cuDNN's recurrent layers draw if they drop something.
    return not node.op.startswith("CudnnRNN") or node.attr["dropout"].f > 0
