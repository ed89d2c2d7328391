"""The two kinds of optimizers of Keras 2.15, and a base class for wrappers of each kind.

New optimizers (`keras.optimizers`) update with `update_step`. Legacy optimizers
(`keras.optimizers.legacy`, and all optimizers of tensorflow-addons) update with
`_resource_apply_dense` and similar methods. Keras, loss scales and tensorflow-addons distinguish
the two kinds by class. So a wrapper class of tfwd has two subclasses. `OptimizerWrapper` has the
common code. The kind of the held optimizer selects `NewWrapper` or `LegacyWrapper`, which override
the methods of Keras's class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.utils.generic_utils import to_snake_case

from tfwd._keras_shared.optimizer_holder import OptimizerHolder, SavesOwnVariables

New: Any = keras.optimizers.Optimizer
Legacy: Any = keras.optimizers.legacy.Optimizer
LossScaleOptimizer: Any = keras.mixed_precision.LossScaleOptimizer


def is_legacy(optimizer: Any) -> bool:
    """Returns True for an optimizer of the legacy kind."""
    return isinstance(optimizer, Legacy)


def leaves(optimizer: Any) -> list[Any]:
    """Returns the optimizers that make the updates. On Keras 2 the list has one optimizer.

    An average of tensorflow-addons counts as one optimizer, together with the optimizer inside.
    """
    while isinstance(optimizer, (OptimizerHolder, LossScaleOptimizer)):
        optimizer = optimizer.inner_optimizer
    return [optimizer]


def key(optimizer: Any, variable: Any) -> Any:
    """Returns a key that is the same for a variable and its copies on the replicas."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        for copy in (variable, getattr(variable, "handle", None)):
            container: Any = getattr(copy, "_distributed_container", None)
            if container is not None:
                return container()._unique_id
    return variable._unique_id


class NewWrapper(SavesOwnVariables, New):
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
        """All variables: the wrapper's own variables, then the held optimizer's variables."""
        return [*self._variables, *self.inner.variables]

    @property
    def _learning_rate(self: Any) -> Any:
        return self.inner._learning_rate

    @property
    def _model_variables_moving_average(self: Any) -> list[Any]:
        return self.inner._model_variables_moving_average

    def build(self: Any, var_list: Sequence[Any]) -> None:
        """Creates the state for the variables, first in the held optimizer, then in this one."""
        # An outer loss scale calls `build` in each step with all variables. Afterwards it removes
        # the variables without a gradient.
        object.__setattr__(self, "_announced", list(var_list))
        if not self.built:
            self._build_once(var_list)

    def _build_inner(self: Any, variables: list[Any]) -> None:
        self.inner.build(variables)

    def compute_gradients(self: Any, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """Computes gradients with the held optimizer, because a loss scale scales the loss."""
        return self.inner.compute_gradients(loss, var_list, tape)

    def aggregate_gradients(self: Any, grads_and_vars: Any) -> Any:
        return self.inner.aggregate_gradients(grads_and_vars)

    def finalize_variable_values(self: Any, var_list: Any) -> None:
        self.inner.finalize_variable_values(var_list)


class _Variables(list):
    """A list that can be called, because Keras 2 calls `variables` of a legacy optimizer."""

    def __call__(self) -> list[Any]:
        return self


class LegacyWrapper(Legacy):
    """A wrapper around an optimizer of `keras.optimizers.legacy` or of tensorflow-addons.

    It can be inside an average of tensorflow-addons. An average does not call `apply_gradients` of
    the optimizer that it holds. It calls the optimizer's methods for a single variable.
    """

    _HAS_AGGREGATE_GRAD = True

    def _begin(self: Any, name: str | None) -> None:
        # Keras's constructor is not called. The wrapper itself has no hyperparameters.
        object.__setattr__(self, "_hyper", {})
        self._init_set_name(name)
        object.__setattr__(self, "_weights", [])
        object.__setattr__(self, "_built_for", {})
        self._distribution_strategy = None
        if tf.distribute.has_strategy():
            self._distribution_strategy = tf.distribute.get_strategy()

    def __setattr__(self, name: str, value: Any) -> None:
        is_hyper = name in leaves(self)[0]._hyper if "optimizer" in vars(self) else False
        if is_hyper and not isinstance(getattr(type(self), name, None), property):
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
        """All variables: the wrapper's own variables, then the variables of inner optimizers."""
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
        """Creates the state for the variables, first in the held optimizer, then in this one.

        A legacy optimizer may get more variables later, for example from a layer that had no
        gradient before.
        """
        variables = {key(self, variable): variable for variable in var_list}
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
        # An outer average has its own step counter, and creates the learning rates separately.
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
        """Returns the held optimizer's method for one variable. Each call looks up the method."""
        kind = type(self).__name__
        if self._variables or vars(self).get("decay_unused"):
            cause = "decay_unused=True needs" if not self._variables else "its own state needs"
            raise ValueError(
                f"{kind} '{self.name}' is inside an average that updates one variable at a time, "
                f"but {cause} all variables at once: put {kind} around the average"
            )
        return lambda *args, **kwargs: getattr(self.inner, method)(*args, **kwargs)


class PicksOptimizerBase(type):
    """Metaclass that creates an instance of the held optimizer's kind, new or legacy."""

    _kinds: dict[bool, type]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if issubclass(cls, (New, Legacy)):
            return super().__call__(*args, **kwargs)
        extended = getattr(cls, "base_optimizer", None)
        given = kwargs.get("optimizer", args[0] if args else None)
        legacy = issubclass(extended, Legacy) if extended else is_legacy(given)
        return cls._of_kind(legacy)(*args, **kwargs)

    def _of_kind(cls, legacy: bool) -> Any:
        if "_kinds" not in vars(cls):
            cls._kinds = {}
        if legacy not in cls._kinds:
            names = {
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
                # Keras reads the class of an instance when it saves the instance.
                "__class__": property(lambda self: cls),
            }
            bases = (cls, LegacyWrapper if legacy else NewWrapper)
            cls._kinds[legacy] = type.__new__(type(cls), cls.__name__, bases, names)
        return cls._kinds[legacy]
