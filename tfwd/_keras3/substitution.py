"""Substitution on Keras 3: a `keras.StatelessScope` that lets through what is not substituted."""

from __future__ import annotations

import keras
import tensorflow as tf


def present_graph() -> tf.Graph | None:
    """The graph that operations are added to now; None in eager mode."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


class Substitution(keras.StatelessScope):
    """Reads of chosen variables see chosen tensors; everything else passes through.

    `keras.StatelessScope` captures every update that is made inside it. Here an update of any other
    variable goes where it would have gone without the scope: to the scope around this one, or to
    the variable itself. With `capture=True` it is kept in `updates` instead, for functions that
    must have no side effects.

    Args:
        values: pairs of a variable and the tensor to be read in its place.
        capture: whether updates are kept in `updates` and not made.

    Attributes:
        updates: dict `id -> (variable, value)`, the last value assigned to each variable.
        inner_updates: variables that were updated in a graph inside this one, a loop's or a
            branch's, so that the value kept for them is of no use outside.
        losses: the losses that layers added inside the scope.
        read: dict `id -> variable` of the variables that were read.
    """

    def __init__(self, values: list[tuple[keras.Variable, tf.Tensor]], capture: bool) -> None:
        super().__init__(collect_losses=True)
        # Not through the constructor: it converts each tensor, which costs an op where the static
        # shape is known and an error where it is not.
        self.state_mapping = {id(variable): value for variable, value in values}
        self.capture = capture
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        self.inner_updates: list[keras.Variable] = []
        self.read: dict[int, keras.Variable] = {}
        self._graph = present_graph()

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if self.capture:
            if present_graph() is not self._graph:
                self.inner_updates.append(variable)
            self.updates[id(variable)] = (variable, value)
            self.state_mapping[id(variable)] = value
        elif self.original_scope is not None:
            self.original_scope.add_update(update)
        else:
            variable._direct_assign(value)

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        value = self.state_mapping.get(id(variable))
        self.read[id(variable)] = variable
        if value is None and self.original_scope is not None:
            return self.original_scope.get_current_value(variable)
        return value
