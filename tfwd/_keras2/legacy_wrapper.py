"""`LegacyWrapper`: base class of wrappers around legacy optimizers on Keras 2.15.

`OptimizerWrapper` makes subclasses of it. Overrides of Keras's class are here, and everything that
Keras does not have is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd._keras2 import wrapped_optimizers


class _Variables(list):
    """A list that can be called, because Keras 2 calls `variables` of a legacy optimizer."""

    def __call__(self) -> list[Any]:
        return self


class LegacyWrapper(wrapped_optimizers.Legacy):
    """A wrapper around an optimizer of `keras.optimizers.legacy` or of tensorflow-addons.

    It can be inside tensorflow-addons' averages. They do not call `apply_gradients` of the
    optimizer that they hold. They call its methods for a single variable.
    """

    _HAS_AGGREGATE_GRAD = True

    def _begin(self: Any, name: str | None) -> None:
        # Keras's constructor is not called. The wrapper has no hyperparameters of its own.
        object.__setattr__(self, "_hyper", {})
        self._init_set_name(name)
        object.__setattr__(self, "_weights", [])
        object.__setattr__(self, "_built_for", {})
        self._distribution_strategy = None
        if tf.distribute.has_strategy():
            self._distribution_strategy = tf.distribute.get_strategy()

    def __setattr__(self, name: str, value: Any) -> None:
        theirs = (
            name in wrapped_optimizers.leaves(self)[0]._hyper
            if "optimizer" in vars(self)
            else False
        )
        if theirs and not isinstance(getattr(type(self), name, None), property):
            setattr(self.inner, name, value)  # optimizer.beta_1 = 0.8
        else:
            object.__setattr__(self, name, value)

    @property
    def name(self: Any) -> str:
        return self._name

    @property
    def _variables(self: Any) -> list[Any]:
        return self._weights

    @property
    def variables(self: Any) -> Any:
        """All variables: its own, then the held optimizer's, including optimizers inside it."""
        return _Variables([*self._weights, *self.inner.weights])

    @property
    def weights(self: Any) -> Any:
        return self.variables

    def get_weights(self: Any) -> list[Any]:
        """Returns the values of all `variables`."""
        return [variable.numpy() for variable in self.variables]

    @property
    def _iterations(self: Any) -> Any:
        return self.inner._iterations

    @_iterations.setter
    def _iterations(self: Any, variable: Any) -> None:
        self.inner._iterations = variable  # an outer average sets its own counter

    def build(self: Any, var_list: Sequence[Any]) -> None:
        """Creates the state for the variables: the held optimizer's, then its own.

        A legacy optimizer may get more variables later, for example of a layer without a gradient
        until then.
        """
        variables = {wrapped_optimizers.key(self, variable): variable for variable in var_list}
        if not variables.keys() - self._built_for.keys() and self.built:
            return
        if self._variables:
            raise ValueError(
                f"{type(self).__name__} '{self.name}' was built for other variables: call "
                "build(variables) with all of them before training begins"
            )
        self._built_for.update(variables)
        try:
            self._build_once(list(self._built_for.values()))
        except ValueError:
            self._built_for.clear()
            raise
        for i, variable in enumerate(self._variables):
            self._track_trackable(variable, f"own_{i}", overwrite=True)

    def _build_inner(self: Any, variables: list[Any]) -> None:
        # An outer average has its own step counter, and requests the rates separately.
        averaged = vars(self).get("_averaged", False)
        make = self.inner._create_slots if averaged else self.inner._create_all_weights
        make(variables)

    def _create_all_weights(self: Any, var_list: Any) -> None:
        self.build(var_list)

    def _create_slots(self: Any, var_list: Any) -> None:
        object.__setattr__(self, "_averaged", True)  # only an outer average calls this
        self.build(var_list)

    def _create_hypers(self: Any) -> None:
        self.inner._create_hypers()

    def _get_hyper(self: Any, name: str, dtype: Any = None) -> Any:
        return self.inner._get_hyper(name, dtype)

    def _set_hyper(self: Any, name: str, value: Any) -> None:
        self.inner._set_hyper(name, value)

    def _decayed_lr(self: Any, var_dtype: Any) -> Any:
        return self.inner._decayed_lr(var_dtype)

    def _prepare(self: Any, var_list: Any) -> Any:
        return self.inner._prepare(var_list)

    def _prepare_local(self: Any, var_device: Any, var_dtype: Any, apply_state: Any) -> None:
        self.inner._prepare_local(var_device, var_dtype, apply_state)

    def _compute_gradients(
        self: Any, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> Any:
        return self.inner._compute_gradients(loss, var_list, grad_loss, tape)

    def _transform_unaggregated_gradients(self: Any, grads_and_vars: Any) -> Any:
        return self.inner._transform_unaggregated_gradients(grads_and_vars)

    def _aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return self.inner._aggregate_gradients(grads_and_vars)

    # The held optimizer has the slots and saves them.
    def get_slot_names(self) -> list[str]:
        return []

    def get_slot(self: Any, var: Any, slot_name: str) -> Any:
        return self.inner.get_slot(var, slot_name)

    # An outer average calls these methods, for one variable at a time.

    @property
    def _dense_apply_args(self: Any) -> list[str]:
        return self.inner._dense_apply_args

    @property
    def _sparse_apply_args(self: Any) -> list[str]:
        return self.inner._sparse_apply_args

    def _resource_apply_dense(self: Any, grad: Any, var: Any, **kwargs: Any) -> Any:
        make = self._own("_resource_apply_dense")
        return self._apply([grad], [var], lambda: make(grad, var, **kwargs))

    def _resource_apply_sparse(self: Any, grad: Any, var: Any, indices: Any, **kwargs: Any) -> Any:
        return self._apply_sparse("_resource_apply_sparse", grad, var, indices, kwargs)

    def _resource_apply_sparse_duplicate_indices(
        self: Any, grad: Any, var: Any, indices: Any, **kwargs: Any
    ) -> Any:
        method = "_resource_apply_sparse_duplicate_indices"
        return self._apply_sparse(method, grad, var, indices, kwargs)

    def _apply_sparse(
        self: Any, method: str, grad: Any, var: Any, indices: Any, kwargs: dict[str, Any]
    ) -> Any:
        make = self._own(method)
        gradient = tf.IndexedSlices(grad, indices)
        return self._apply([gradient], [var], lambda: make(grad, var, indices, **kwargs))

    def _own(self: Any, method: str) -> Callable[..., Any]:
        """Returns the held optimizer's method for one variable. Each call looks it up."""
        kind = type(self).__name__
        if self._variables or vars(self).get("decay_unused"):
            cause = "decay_unused=True needs" if not self._variables else "its own state needs"
            raise ValueError(
                f"{kind} '{self.name}' is inside an average that updates one variable at a time, "
                f"but {cause} all variables at once: put {kind} around the average"
            )
        return lambda *args, **kwargs: getattr(self.inner, method)(*args, **kwargs)
