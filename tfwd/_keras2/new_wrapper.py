"""`NewWrapper`: base class of wrappers around optimizers in Keras 2.15's `keras.optimizers`.

`OptimizerWrapper` makes subclasses of it. Overrides of Keras's class are here, and everything that
Keras does not have is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from keras.src import backend
from keras.src.utils.generic_utils import to_snake_case

from tfwd._keras2 import wrapped_optimizers
from tfwd._keras_shared.holding import SavesOwnVariables


class NewWrapper(SavesOwnVariables, wrapped_optimizers.New):
    """A wrapper around an optimizer of `keras.optimizers`."""

    def _begin(self: Any, name: str | None) -> None:
        # Keras's constructor is not called. Properties and __getattr__ return the held optimizer's
        # step counter, rate and arguments.
        made_up = to_snake_case(type(self).__name__)
        self.name = name or backend.unique_object_name(made_up, zero_based=True)
        self._variables: list[Any] = []
        self._mesh, self._run_with_dtensor = None, False
        self._distribution_strategy = tf.distribute.get_strategy()

    @property
    def _iterations(self: Any) -> Any:
        return self.inner.iterations

    @property
    def variables(self: Any) -> list[Any]:
        """All variables: its own, then the held optimizer's."""
        return [*self._variables, *self.inner.variables]

    @property
    def _learning_rate(self: Any) -> Any:
        return self.inner._learning_rate

    @property
    def _model_variables_moving_average(self: Any) -> list[Any]:
        return self.inner._model_variables_moving_average

    def build(self: Any, var_list: Sequence[Any]) -> None:
        """Creates the state for the variables: the held optimizer's, then its own."""
        # An outer loss scale calls it in each step with all variables. Afterwards it removes the
        # variables without a gradient.
        object.__setattr__(self, "_announced", list(var_list))
        if not self.built:
            self._build_once(var_list)

    def _build_inner(self: Any, variables: list[Any]) -> None:
        self.inner.build(variables)

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Computes gradients. A loss scale inside computes them in its own way."""
        return self.inner.compute_gradients(loss, var_list, tape)

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return self.inner.aggregate_gradients(grads_and_vars)

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        self.inner.finalize_variable_values(var_list)
