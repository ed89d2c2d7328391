"""Look at a layer's call before it is trusted to run on other weights, and twice.

The call is traced once into a graph that is thrown away. What it reads, updates and draws there
tells whether the effective weights reach it at all, and whether a second run in backward would
compute the same. Without this, a layer that reads a variable behind Keras's back would silently
train on its raw weights, and one that draws from a stateful generator would get the gradient of
another draw.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras

if TYPE_CHECKING:
    from tfwd.layers.perturbed import _Call

_NOT_REPEATABLE = {
    "EagerPyFunc",
    "Multinomial",
    "ParameterizedTruncatedNormal",
    "PyFunc",
    "RandomGamma",
    "RandomPoissonV2",
    "RandomShuffle",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}


class Verdict(NamedTuple):
    """What a call was seen to do.

    Attributes:
        impure: why the call cannot be run again, the end of a sentence; empty if it can.
        updated: the variables that it updates, under either training flag.
        losses: how many losses it adds, the larger number of the two flags.
    """

    impure: str
    updated: list[keras.Variable]
    losses: int


def inspect(name: str, parametrized: dict[int, str], call: _Call) -> Verdict:
    """Traces a call and says what it does.

    Args:
        name: the layer's name, for messages.
        parametrized: the names of the parametrized weights by the variables' ids.
        call: the call.

    Raises:
        ValueError: if it reads a parametrized weight in a way that cannot be substituted, or
            assigns to one.

    Warns:
        UserWarning: if it does not read a parametrized weight.
    """
    flags = [call.training] if isinstance(call.training, bool) else [True, False]
    graph = _keras.scratch_graph()
    with graph.as_default():
        results = [
            call.evaluate(
                flag,
                [tf.compat.v1.placeholder(t.dtype, t.shape) for t in call.tensors],
                [tf.compat.v1.placeholder(s.dtype, s.shape) for s in call.seeds],
                capture=True,
            )
            for flag in flags
        ]
    updated = {id(v): v for result in results for v, _ in result.updates}
    behind = [v for v in call.variables if _is_any(_keras.tf_variable(v), graph.variables)]
    for variable in behind:
        if id(variable) in parametrized:
            raise ValueError(
                f"layer '{name}' reads its weight '{parametrized[id(variable)]}' past Keras (a "
                "tf.Variable kept aside, or one that another function has captured), so that no "
                "other value can be given to it: read it as self.<weight> in call()"
            )
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
    escaped = [v.path for result in results for v in result.escaped]
    draws = sorted(_operations(graph) & _NOT_REPEATABLE)
    impure = ""
    if escaped:
        impure = f"it updates '{escaped[0]}' inside a loop or a branch"
    elif graph.variables:
        impure = f"it reads '{graph.variables[0].name}' past Keras or outside layer.variables"
    elif draws:
        impure = f"it draws from a stateful generator or runs Python code ({draws[0]})"
    return Verdict(impure, list(updated.values()), max(len(r.losses) for r in results))


def _is_any(variable: tf.Variable, others: list[tf.Variable]) -> bool:
    return any(variable is other for other in others)


def _operations(graph: tf.Graph) -> set[str]:
    """The types of all operations in the graph and in the functions that it calls."""
    definition = graph.as_graph_def()
    types = {node.op for node in definition.node}
    for function in definition.library.function:
        types.update(node.op for node in function.node_def)
    return types
