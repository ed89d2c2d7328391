"""Rules for reads and assignments inside a substitution. Both versions of Keras share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf


def present_graph() -> tf.Graph | None:
    """Returns the graph to which operations are added now, or None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Scope:
    """A scope in which reads of chosen variables return tensors. Other reads are not changed.

    An update of another variable has its usual target: the outer scope, or the variable itself.
    With `capture=True` the update is stored in `updates` instead, for functions without side
    effects.

    Attributes:
        state_mapping: dict `id -> tensor` of the substituted variables.
        updates: dict `id -> (variable, value)` with the last value assigned to each variable.
        inner_updates: Variables that were updated in an inner graph, of a loop or a branch. Their
            stored values cannot be used outside that graph.
        read: dict `id -> variable` of the variables that were read.
    """

    original_scope: Any
    _make: Callable[[Any, Any], None]  # assigns to a variable directly, without any scope

    def _begin(self, values: Iterable[tuple[Any, tf.Tensor]], capture: bool) -> None:
        self.state_mapping = {id(variable): value for variable, value in values}
        self.capture = capture
        self.updates: dict[int, tuple[Any, tf.Tensor]] = {}
        self.inner_updates: list[Any] = []
        self.read: dict[int, Any] = {}
        self._graph = present_graph()

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        """Records or makes an assignment. Keras calls it."""
        variable, value = update
        if self.capture:
            if present_graph() is not self._graph:
                self.inner_updates.append(variable)
            self.updates[id(variable)] = (variable, value)
            # A read after an assignment has no gradient to the assigned value.
            self.state_mapping[id(variable)] = tf.stop_gradient(value)
        elif self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            self._make(variable, value)

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        """Returns the substitute for a read, or None for the variable's own value."""
        value = self.state_mapping.get(id(variable))
        self.read[id(variable)] = variable
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value


class Observing:
    """Mixin for a substitution that reports every read, update and loss.

    Args:
        values: Pairs of a variable and its substitute.
        on_read: Function that is called with each variable that is read. If it returns a tensor,
            and `values` has no substitute, that tensor is read.
        on_update: Function that is called with each variable that is updated.
        on_loss: Function that is called with each loss that a layer adds.
    """

    def __init__(
        self,
        values: list[tuple[Any, tf.Tensor]],
        on_read: Callable[[Any], tf.Tensor | None],
        on_update: Callable[[Any], None],
        on_loss: Callable[[tf.Tensor], None],
    ) -> None:
        super().__init__(values, capture=False)  # type: ignore[call-arg]
        self._on_read, self._on_update, self._on_loss = on_read, on_update, on_loss

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        fallback = self._on_read(variable)
        value = super().get_current_value(variable)  # type: ignore[misc]
        return fallback if value is None else value

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        self._on_update(update[0])
        super().add_update(update)  # type: ignore[misc]

    def add_loss(self, loss: tf.Tensor) -> None:
        self._on_loss(loss)


class Discarding:
    """Mixin for a substitution that discards all updates, except of chosen variables.

    A read after a discarded update, in the same graph, returns the assigned value.

    Args:
        kept: Variables whose updates are made.
    """

    _graph: tf.Graph | None
    _make: Callable[[Any, Any], None]

    def __init__(self, kept: Iterable[Any]) -> None:
        super().__init__([], capture=True)  # type: ignore[call-arg]
        self._kept = {id(variable) for variable in kept}

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        if id(update[0]) in self._kept:
            self._make(*update)
        elif present_graph() is self._graph:
            super().add_update(update)  # type: ignore[misc]


class Capturing:
    """Mixin for a substitution that stores all updates, except in functions traced in its body.

    Such functions exist longer than the substitution. They read and update the variables
    themselves.
    """

    _graph: tf.Graph | None
    _make: Callable[[Any, Any], None]

    def __init__(self) -> None:
        super().__init__([], capture=True)  # type: ignore[call-arg]

    def get_current_value(self, variable: Any) -> tf.Tensor | None:
        return super().get_current_value(variable) if self._is_here() else None  # type: ignore[misc]

    def add_update(self, update: tuple[Any, tf.Tensor]) -> None:
        if self._is_here():
            super().add_update(update)  # type: ignore[misc]
        else:
            self._make(*update)

    def _is_here(self) -> bool:
        return present_graph() is self._graph
