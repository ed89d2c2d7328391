"""`OptimizerWrapper`: base class of optimizers that wrap another optimizer of either kind."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfwd._keras2 import wrapped_optimizers
from tfwd._keras2.configs import deserialize
from tfwd._keras2.optimizer_base import PicksOptimizerBase
from tfwd._keras_shared.holding import OptimizerHolder

# Methods that must be Keras's own in an optimizer. Otherwise its updates cannot be followed.
_FOLLOWED = {
    False: ("_internal_apply_gradients", "_distributed_apply_gradients_fn", "_update_step"),
    True: ("apply_gradients", "_distributed_apply"),
}
# Classes of tensorflow-addons that override these methods, but call Keras's.
_FOLLOWABLE = ("AveragedOptimizerWrapper", "DecoupledWeightDecayExtension", "Lookahead")


class OptimizerWrapper(OptimizerHolder, metaclass=PicksOptimizerBase):
    """An optimizer that replaces the one it holds, with the same variables, rate and steps.

    Args:
        optimizer: Keras optimizer, or the name of one (of the newer kind).
        name: str. Name of the wrapper. Default None, for a name by Keras.

    Raises:
        TypeError: If it is not a Keras optimizer.
    """

    built = False
    _deserialize = staticmethod(deserialize)
    # The base class of the kind defines:
    name: str
    variables: Any
    _variables: list[tf.Variable]
    _begin: Callable[[str | None], None]  # creates attributes that everything else needs
    _build_inner: Callable[[list[Any]], None]
    _track_trackable: Callable[..., Any]
    build: Callable[[Sequence[Any]], None]

    def __init__(self, optimizer: Any, name: str | None = None) -> None:
        inner = self._as_optimizer(optimizer)
        self._begin(name)
        object.__setattr__(self, "_scaled_outside", False)
        object.__setattr__(self, "optimizer", inner)
        self._track_trackable(inner, "optimizer")
        if not wrapped_optimizers.is_legacy(self):
            # In a loaded SavedModel, the replacement of a new optimizer has a counter.
            self._track_trackable(inner.iterations, "_iterations")

    def _as_optimizer(self, optimizer: Any) -> Any:
        def followed(optimizer: Any) -> list[tuple[Any, str]]:
            return [
                (leaf, method)
                for leaf in wrapped_optimizers.leaves(optimizer)
                for method in _FOLLOWED[wrapped_optimizers.is_legacy(leaf)]
                if not _goes_on_with_keras(leaf, method)
            ]

        kinds = (wrapped_optimizers.New, wrapped_optimizers.Legacy)
        overridden = "only update_step or _resource_apply_dense may be overridden"
        return self._checked(type(self).__name__, optimizer, kinds, followed, overridden)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self).from_config(copy.deepcopy(self.get_config(), memo))

    def __copy__(self) -> Any:
        return type(self).from_config(self.get_config())

    @property
    def _is_wrapped_by_loss_scale_optimizer(self) -> bool:
        return vars(self).get("_is_scaled", False)

    @_is_wrapped_by_loss_scale_optimizer.setter
    def _is_wrapped_by_loss_scale_optimizer(self, value: bool) -> None:
        if value and wrapped_optimizers.is_legacy(self) and vars(self).get("decay_unused"):
            raise ValueError(
                f"{type(self).__name__} '{self.name}' is in a LossScaleOptimizer, which does not "
                "pass variables without a gradient to a legacy optimizer: with decay_unused=True "
                "put the loss scale inside"
            )
        object.__setattr__(self, "_is_scaled", value)
        if value and isinstance(self.optimizer, wrapped_optimizers.LossScaleOptimizer):
            self._give_up_scale()

    def _give_up_scale(self) -> None:
        # A loss scale around this optimizer turns off the loss scale inside. Otherwise gradients
        # would be divided twice. Keras's `compile` sets this with mixed_float16.
        scale = self.optimizer
        if (scale.initial_scale, scale.dynamic_growth_steps) != (2.0**15, 2000):
            warnings.warn(
                f"{type(self).__name__} '{self.name}' holds a LossScaleOptimizer and is inside "
                "another one. Only the outer one acts, and the inner one's arguments are lost. "
                "Put the loss scale around",
                stacklevel=4,
            )
        object.__setattr__(self, "_scaled_outside", True)

    def _build_once(self, variables: Sequence[Any]) -> None:
        """Creates the state for the variables: the held optimizer's, then its own."""
        variables = list(variables)
        self._check_variables(variables)
        self._build_inner(variables)
        self._build(variables)
        # The optimizer does not own the model's variables.
        object.__setattr__(self, "_trainable_variables", variables)
        self.built = True

    def _add_variable(
        self, name: str, dtype: Any, value: Any, like: Any = None, shape: Sequence[int] = ()
    ) -> tf.Variable:
        """Creates a variable of this optimizer itself.

        Args:
            name: str. Name.
            dtype: str. dtype.
            value: Initial value of all elements. None means the present value of `like`.
            like: Variable of a layer whose shape and device it takes. Default None, for a variable
                that is the same on all replicas.
            shape: Shape, if there is no `like`. Default scalar.
        """
        strategy = tf.distribute.get_strategy()
        with tf.init_scope():
            if like is None:
                aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
                variable = tf.Variable(
                    tf.fill(shape, tf.cast(value, dtype)),
                    trainable=False,
                    name=name,
                    aggregation=aggregation,
                )
            else:
                with strategy.extended.colocate_vars_with(like):
                    initial = (
                        tf.cast(like, dtype)
                        if value is None
                        else tf.fill(like.shape, tf.cast(value, dtype))
                    )
                    variable = tf.Variable(initial, trainable=False, name=name)
        self._variables.append(variable)
        return variable

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Makes one step with gradients of a loss that `scale_loss` has scaled, as on Keras 3."""
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    f"{type(self).__name__} is not built: pass the variables with the "
                    "gradients, or call build(variables) before"
                )
            trainable_variables = self._trainable_variables
        wrapped_optimizers.apply(self, grads, list(trainable_variables))

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the scale of the held loss scale."""
        return wrapped_optimizers.scale_loss(self, loss)

    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Makes one step for pairs of a gradient and a variable; see Keras."""
        pairs = list(grads_and_vars)
        if not pairs:
            return self.iterations
        if self._is_wrapped_by_loss_scale_optimizer:
            given = {wrapped_optimizers.key(self, variable) for _, variable in pairs}
            announced = vars(self).get("_announced", ())
            pairs += [(None, v) for v in announced if wrapped_optimizers.key(self, v) not in given]
        grads, variables = (list(part) for part in zip(*pairs, strict=True))
        with tf.name_scope(self.name), tf.init_scope():
            self.build(variables)
        made = self._apply(grads, variables, lambda: self.inner.apply_gradients(pairs, **kwargs))
        return self.iterations if made is None else made

    @property
    def iterations(self) -> Any:
        return self.inner.iterations

    @iterations.setter
    def iterations(self, variable: Any) -> None:
        self.inner.iterations = variable

    @property
    def lr(self) -> Any:
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value


def _goes_on_with_keras(leaf: Any, method: str) -> bool:
    """Returns True if a method of tensorflow-addons calls Keras's own method."""
    definer = next(cls for cls in type(leaf).__mro__ if method in vars(cls))
    addons = definer.__module__.startswith("tensorflow_addons.")
    return addons and definer.__name__ in _FOLLOWABLE
