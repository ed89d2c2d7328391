"""Assignments to variables that take effect only if a step is good.

A training step assigns to many variables: weights, slots and counters of an optimizer, statistics
of BatchNormalization, metrics, states of generators. When the step is known to be good or bad, each
assignment becomes

    v <- where(good, new, v)

This has no measurable cost. A `tf.cond` around an optimizer costs a fifth of a step under XLA. For
assignments before the decision, the earlier values are returned. The caller can then assign them
again.

TensorFlow has no public hook for this. So the methods of its variables are replaced while a step is
traced or runs eagerly, for the threads that take part. Assignments in a `tf.function` that the step
calls are made in any case, because the function may be used again. Their variables are read before
the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, ResourceVariable

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._graph.function_calls import VariableResource, before_calls

# Updates that change nothing, not even the sign of a zero.
_NOTHING = {"scatter_add": -0.0, "scatter_sub": 0.0, "scatter_mul": 1.0, "scatter_div": 1.0}
_assign = BaseResourceVariable.assign
_SCATTERS = (*_NOTHING, "scatter_max", "scatter_min", "scatter_update")

_steps: dict[int, list[Tentative]] = {}  # by thread id, outer steps first


class Tentative:
    """The assignments of one step, on all of its replicas.

    Args:
        known: Variables that are read in advance. They may be assigned to in a loop, in a branch,
            or by other means than the methods that are replaced here. A variable of several
            replicas represents all of its copies.

    Usage, in a function or eagerly:

        with Tentative(known) as step:
            ...                      # in each replica's thread: `with step.joined(): ...`
            step.decide(good)        # later assignments are made only if `good`
        ...                          # if not good: assign the values of `step.before()`
    """

    def __init__(self, known: Iterable[tf.Variable] = ()):
        self._graph = _keras.present_graph()
        self._good: dict[int, tf.Tensor] = {}
        # These two have the ids of handles as keys.
        self._before: dict[int, tuple[tf.Variable | VariableResource, tf.Tensor]] = {}
        self._assigned: set[int] = set()
        self._known = [part for variable in known for part in replica_parts(variable)]
        self._leaves_branches = False

    def __enter__(self) -> Tentative:
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(_replaced())
        self._stack.enter_context(self.joined())
        for variable in self._known:
            self._keep(variable)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Makes assignments of the current thread belong to this step, in the body."""
        steps = _steps.setdefault(threading.get_ident(), [])
        steps.append(self)
        try:
            yield
        finally:
            steps.remove(self)

    def decide(self, good: tf.Tensor) -> None:
        """Makes later assignments of the current thread only if `good`, a boolean tensor."""
        self._good[threading.get_ident()] = good

    def decide_after(self, good: tf.Tensor) -> None:
        """Does the same as `decide`, but does not change assignments inside branches."""
        self.decide(good)
        self._leaves_branches = True

    def keep(self, variable: tf.Variable) -> None:
        """Stores the value of a variable that is not assigned to yet, as for `known` variables."""
        for part in replica_parts(variable):
            self._keep(part)

    def has_assigned(self, variable: tf.Variable) -> bool:
        """Returns True if a method or a called function has assigned to a variable."""
        return id(variable.handle) in self._assigned

    def value_before(self, variable: tf.Variable) -> tf.Tensor | None:
        """Returns the value of a variable before the step. None if nothing has assigned to it."""
        kept = (self._before.get(id(part.handle)) for part in replica_parts(variable))
        return next((value for _, value in filter(None, kept)), None)

    def before(self, all_known: bool) -> list[tuple[tf.Variable | VariableResource, tf.Tensor]]:
        """Returns the variables that were assigned to before `decide`, with their earlier values.

        The caller assigns these values again if the step was not good. This method does not assign
        them, because XLA would then round some of the new values differently.

        Args:
            all_known: bool. Also returns the known floating variables that no method and no called
                function has assigned to, because operations may have assigned to them. Integer
                variables, such as states of generators, are always returned.
        """
        return [
            (variable, value)
            for key, (variable, value) in self._before.items()
            if all_known or key in self._assigned or not variable.dtype.is_floating
        ]

    def _graphs_inside(self) -> list[Any] | None:
        """Returns the graphs from the current graph to the step's graph, which is not included.

        Returns None if new operations are not added to the step. In an eager step, these are the
        operations of functions that are traced. Their calls are operations of the step.
        """
        graph: Any = _keras.present_graph()
        if self._graph is None:
            return [] if graph is None else None
        inside = []
        while graph is not None and graph is not self._graph:
            inside.append(graph)
            graph = getattr(graph, "outer_graph", None)
        return None if graph is None else inside

    def _decision(self) -> tf.Tensor | None:
        """Returns the decision of this thread, or of any thread while replicas are updated."""
        good = self._good.get(threading.get_ident())
        return good if good is not None else next(iter(self._good.values()), None)

    def _keep(self, variable: tf.Variable | VariableResource) -> None:
        key = id(variable.handle)
        if key in self._before or variable.dtype in (tf.resource, tf.variant):
            return
        # If this is a loop or a branch, the read is added before it, in the step's graph.
        place = contextlib.nullcontext() if self._graph is None else self._graph.as_default()
        with place, tf.device(None):
            self._before[key] = variable, variable.read_value()

    def _before_call(self, assigned: list[VariableResource]) -> None:
        """Reads the variables that a function is about to assign to."""
        if self._graphs_inside() is None:
            return
        for variable in assigned:
            self._assigned.add(id(variable.handle))
            self._keep(variable)

    def _note(self, variable: tf.Variable) -> tf.Tensor | None:
        """Records a coming assignment. Returns the decision, if it applies to the assignment."""
        inside = self._graphs_inside()
        if inside is None:
            return None
        self._assigned.add(id(variable.handle))
        good = self._decision()
        # A function is traced only once, and would always use the decision of this step.
        in_function = not all(map(private_graph_apis.is_branch_or_loop, inside))
        if good is None or in_function:
            self._keep(variable)
            return None
        if self._leaves_branches and inside:
            return None
        return good


def agreed(good: tf.Tensor) -> tf.Tensor:
    """Returns True if `good` is True on all replicas. All replicas must call it."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return good
    bad = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(~good, tf.float32))
    return bad == 0


def replica_parts(variable: Any) -> list[tf.Variable]:
    """Returns the copies of a variable on the replicas, or the variable if it has no copies."""
    variable = _keras.variables.tf_variable(variable)
    parts = getattr(variable, "values", None)
    return list(parts) if isinstance(parts, (list, tuple)) else [variable]


def _replaced() -> contextlib.AbstractContextManager[None]:
    """Replaces the assignment methods of variables in the body, for threads in a step."""
    makers: dict[str, Callable[[Any], Any]] = {
        "assign": _assigning(lambda variable, value: value),
        "assign_add": _assigning(lambda variable, value: variable.read_value() + value),
        "assign_sub": _assigning(lambda variable, value: variable.read_value() - value),
        **{name: _scattering(name) for name in _SCATTERS},
    }
    # Both classes define methods with these names.
    owners = (BaseResourceVariable, ResourceVariable)
    methods = [
        (cls, name, make) for cls in owners for name, make in makers.items() if name in vars(cls)
    ]
    return _keras.patched([*methods, before_calls(_announce)])


def _announce(assigned: list[VariableResource]) -> None:
    """Tells the current thread's steps what a function that is called will assign to."""
    for step in _steps.get(threading.get_ident(), []):
        step._before_call(assigned)


def _asked(variable: Any) -> tf.Tensor | None:
    """Returns the decision of the current thread's steps on a coming assignment, or None."""
    decisions = [
        good
        for step in _steps.get(threading.get_ident(), [])
        if (good := step._note(variable)) is not None
    ]
    return functools.reduce(tf.logical_and, decisions) if decisions else None


def _assigning(changed: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    def maker(own: Callable[..., Any]) -> Callable[..., Any]:
        def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            good = _asked(self)
            if good is None:
                return own(self, value, *args, **kwargs)
            new = changed(self, tf.convert_to_tensor(value, self.dtype))
            before = self.read_value()
            if new.shape == before.shape and new.shape.is_fully_defined():
                gated = tf.where(good, new, before)
            else:
                gated = tf.cond(good, lambda: new, lambda: before)
            return _assign(self, gated, *args, **kwargs)

        return assign

    return maker


def _scattering(name: str) -> Callable[[Any], Any]:
    def maker(own: Callable[..., Any]) -> Callable[..., Any]:
        def scatter(self: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
            good = _asked(self)
            if good is None:
                return own(self, rows, *args, **kwargs)
            values = tf.convert_to_tensor(rows.values, self.dtype)
            neutral: Any = _NOTHING.get(name)
            if neutral is None:
                neutral = tf.gather(self.read_value(), rows.indices)
            others = tf.cast(neutral, values.dtype)
            rows = tf.IndexedSlices(tf.where(good, values, others), rows.indices)
            return own(self, rows, *args, **kwargs)

        return scatter

    return maker
