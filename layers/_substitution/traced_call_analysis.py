"""Traces a layer's first call to see whether it can run on other weights, and run again.

The call is traced once into a scratch graph. The graph shows which variables the call reads, which
it updates, and which random numbers it draws. The trace answers two questions:

- Do the effective weights reach the call? A layer that reads a variable without Keras would
  silently train on its raw weights.
- Would a second run in backward compute the same? A layer that draws from a stateful generator
  would otherwise get the gradient of another draw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._graph.stateless_call import Result
from tfwd.layers._substitution import (
    call_packing,
    keras_own_layers,
    unsupported_weight_reads,
)
from tfwd.layers._substitution.attribute_snapshots import AttributeSnapshot
from tfwd.layers._substitution.call_analysis import CallAnalysis
from tfwd.layers._substitution.substituted_call import SubstitutedCall

# Operations that call Python, which may do anything.
_PYTHON_OPS = {"EagerPyFunc", "PyFunc"}
# The operations of a `tf.cond` in a graph.
_BRANCH_OPS = {"If", "StatelessIf"}


# Analyses by signature. They contain no variables, and the keys contain neither layers nor tensors.
_shared: dict[tuple, CallAnalysis] = {}


def analyse(
    name: str, owner: keras.Layer, parametrized: dict[int, str], call: SubstitutedCall
) -> CallAnalysis:
    """Traces a call and reports what it does.

    Args:
        name: Name of the layer, for messages.
        owner: Layer that is called, with all layers in it.
        parametrized: Names of the parametrized weights, by the ids of the variables.
        call: The call.

    Returns:
        The analysis of the call.

    Raises:
        ValueError: If the call reads a parametrized weight in a way that cannot be substituted, or
            assigns to a parametrized weight.

    Warns:
        UserWarning: If the call does not read a parametrized weight.
    """
    unsupported_weight_reads.check_calls(name, owner)
    signature = keras_own_layers.signature(owner)
    key = None if signature is None or call.wrappers else (signature, call.shared_analysis_key())
    if key in _shared:
        return _shared[key]
    with AttributeSnapshot(owner).undoing_changes():
        analysis = _analysed(name, owner, parametrized, call)
    if key is not None and analysis.shared:
        _shared[key] = analysis
    return analysis


def _analysed(
    name: str, owner: keras.Layer, parametrized: dict[int, str], call: SubstitutedCall
) -> CallAnalysis:
    """Analyses the call as `analyse` does, but may change attributes of the layer."""
    # Otherwise, in a graph, backward repeats only the operations of the parametrizations.
    runs_again = call.runs_again()
    graph = private_graph_apis.ScratchGraph()
    try:
        results, draws = _trace(call, graph)
        known = {id(v) for v in call.variables}
        extra = {id(v): v for r in results for v in r.read.values() if id(v) not in known}
        if extra:
            # Keras does not list these variables. An example is the state of a stateful RNN.
            call.extend(list(extra.values()))
            graph = private_graph_apis.ScratchGraph()
            results, draws = _trace(call, graph)
    except Exception as error:
        # If the call itself is wrong, the real call will raise the error.
        reason = f"it cannot be traced by itself ({type(error).__name__})"
        return CallAnalysis(reason, [], 0, [], seen=False)
    updated = {id(v): v for result in results for v, _ in result.updates}
    unsupported_weight_reads.check(
        name, parametrized, filter(graph.reads, call.variables), unsupported_weight_reads.PAST_KERAS
    )
    unsupported_weight_reads.check(
        name, parametrized, updated.values(), unsupported_weight_reads.ASSIGNED
    )
    unsupported_weight_reads.warn_of_unread(name, parametrized, results[0].read)
    nodes = list(private_graph_apis.nodes(graph, graph.get_operations()))
    calls_python = sorted({node.op for node in nodes if node.op in _PYTHON_OPS})
    unsupported_weight_reads.warn_of_python(name, calls_python)
    if runs_again:
        draws = _unrepeatable(nodes)
    own_gradient = any(map(private_graph_apis.has_users_gradient, nodes))
    impure = _why_impure(owner, graph, results, draws) or _why_unrepeatable_in_context(
        call, graph, any(node.op in _BRANCH_OPS for node in nodes), own_gradient
    )
    if own_gradient:
        graph.differentiate(_differentiable(results))
    unsupported_weight_reads.check(
        name,
        parametrized,
        filter(graph.reads, call.variables),
        unsupported_weight_reads.IN_BACKWARD,
    )
    if not impure and (behind := graph.variables_read()):
        impure = f"it reads the variable '{behind[0].name}' in backward, in a custom gradient"
    losses = max(len(result.losses) for result in results)
    taken = any(t.dtype.is_floating or t.dtype.is_complex for t in graph.taken)
    has_warned = bool(calls_python) or any(key not in results[0].read for key in parametrized)
    shared = not (impure or updated or extra or taken or has_warned)
    return CallAnalysis(
        impure, list(updated.values()), losses, list(extra.values()), taken=taken, shared=shared
    )


def _why_impure(
    owner: keras.Layer,
    graph: private_graph_apis.ScratchGraph,
    results: list[Result],
    draws: list[str],
) -> str:
    """Returns the reason why a traced call cannot run again, or "" if it can.

    The reason is the end of a sentence.
    """
    if escaped := [_keras.variables.path(v) for result in results for v in result.escaped]:
        return f"it updates '{escaped[0]}' inside a loop or a branch"
    if behind := graph.variables_read():
        return f"it reads the variable '{behind[0].name}' without Keras"
    if kept := [n for inner in _keras.layers.all_layers(owner) if (n := graph.kept_by(inner))]:
        return f"it keeps a tensor in its attribute '{kept[0]}'"
    if draws:
        return f"it, or a parametrization, uses an operation that cannot be repeated ({draws[0]})"
    if kinds := [kind for result in results if (kind := call_packing.opaque_class(result.outputs))]:
        return f"it returns a {kinds[0]}, whose tensors a custom gradient cannot see"
    return ""


def _why_unrepeatable_in_context(
    call: SubstitutedCall, graph: private_graph_apis.ScratchGraph, branch: bool, own_gradient: bool
) -> str:
    """Returns the reason that depends on where the call is made, or "" if there is none."""
    if tf.executing_eagerly():
        # In eager mode no tape records the operations of the first run.
        return "it takes gradients itself" if graph.gradients_taken else ""
    if branch and not isinstance(call.training, bool):
        return "it has a branch inside the branch of the training flag, which is a tensor"
    if branch and own_gradient:
        return "it has a branch and a custom gradient"
    return ""


def _differentiable(results: list[Result]) -> list[tf.Tensor]:
    outputs = [t for r in results for t in call_packing.flatten((r.outputs, r.losses))]
    return [t for t in outputs if isinstance(t, tf.Tensor) and t.dtype.is_floating]


def _trace(
    call: SubstitutedCall, graph: private_graph_apis.ScratchGraph
) -> tuple[list[Result], list[str]]:
    """Evaluates a call in a scratch graph, once under each possible training flag.

    Returns:
        The result of each evaluation, and the types of the parametrizations' operations that cannot
        be repeated.
    """
    flags = [call.training] if isinstance(call.training, bool) else [True, False]
    given = call.tensors  # they are not in the scratch graph
    with graph.traced_into():
        results, draws = [], []
        for flag in flags:
            tensors = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in given]
            seeds = [tf.compat.v1.placeholder(s.dtype, s.shape) for s in call.seeds]
            before = len(graph.get_operations())
            weights = call.weights(flag, tensors, seeds)
            draws += _unrepeatable(private_graph_apis.nodes(graph, graph.get_operations()[before:]))
            results.append(call.evaluate(flag, tensors, seeds, weights, capture=True))
        return results, draws


def _unrepeatable(nodes: Iterable[Any]) -> list[str]:
    """Returns the types of the operations that draw from a state.

    These are the operations with the seeds of TensorFlow's legacy random operations. Stateless
    operations draw from an argument, and a `tf.random.Generator` is a variable.
    """
    return sorted({node.op for node in nodes if node.op in _PYTHON_OPS or _draws_from_state(node)})


def _draws_from_state(node: Any) -> bool:
    if "seed2" not in node.attr:
        return False
    # cuDNN's recurrent layers draw only if their dropout is above 0.
    return not node.op.startswith("CudnnRNN") or node.attr["dropout"].f > 0
