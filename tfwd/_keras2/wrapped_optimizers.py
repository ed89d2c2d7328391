"""Nested optimizers on Keras 2.15, and the base class of tfwd's optimizers that hold another one.

The functions look inside tfwd's wrappers, loss scales, and tensorflow-addons' averages.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras2.copies import deserialize
from tfwd._keras2.optimizer_kinds import (
    Legacy,
    LossScaleOptimizer,
    New,
    PicksOptimizerBase,
    is_legacy,
    key,
    leaves,
)
from tfwd._keras_shared.keras_own_code import defining_class
from tfwd._keras_shared.optimizer_holder import OptimizerHolder


def name(optimizer: Any) -> str:
    """Returns the optimizer's name."""
    return optimizer._name if is_legacy(optimizer) else optimizer.name


def leaf_of(optimizer: Any, variable: Any) -> Any:
    """Returns the optimizer that updates a variable."""
    return leaves(optimizer)[0]


def is_built_for(optimizer: Any, variable: Any) -> bool:
    """Returns True if a built optimizer updates a variable."""
    return is_legacy(optimizer) or key(optimizer, variable) in optimizer._index_dict


def chain(optimizer: Any) -> Iterator[Any]:
    """Yields the optimizer and all optimizers inside, outer optimizers first."""
    while optimizer is not None:
        yield optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        elif isinstance(optimizer, OptimizerHolder):
            optimizer = optimizer.optimizer
        else:
            optimizer = _averaged(optimizer)


def _averaged(optimizer: Any) -> Any:
    """Returns the optimizer in Lookahead, SWA and MovingAverage of tensorflow-addons."""
    held = vars(optimizer).get("_optimizer")
    return held if is_legacy(held) else None


def own_decays(optimizer: Any) -> dict[str, Any]:
    """Returns the arguments of an optimizer's own weight decay, with their values."""
    arguments = vars(optimizer).get("_hyper", {}) if is_legacy(optimizer) else vars(optimizer)
    decays = {
        argument: float(value.numpy()) if isinstance(value, tf.Variable) else value
        for argument, value in arguments.items()
        if argument.endswith("weight_decay") and not argument.startswith("_")
    }
    return {argument: value for argument, value in decays.items() if value}


def lowers_scale(optimizer: Any) -> bool:
    """Returns True if an active loss scale inside reacts to gradients that are not finite."""
    scale = _scale(optimizer)
    return scale is not None and scale.dynamic


def gradient_scale(optimizer: Any) -> None:
    """Returns None, because Keras 2 removes the loss scale before it applies the gradients."""
    return None


def accumulates(optimizer: Any) -> bool:
    """Returns True if one update uses the gradients of several steps. Keras 2 never does."""
    return False


def accumulated_gradients(leaf: Any) -> list[tuple[Any, Any]]:
    """Returns the sums of gradients of an optimizer that accumulates. Keras 2 has none."""
    return []


def _rate_of(leaf: Any) -> Any:
    """Returns the optimizer that has the learning rate. An average uses its inner optimizer."""
    return next((held for held in reversed(list(chain(leaf))) if is_legacy(held)), leaf)


def has_learning_rate(leaf: Any) -> bool:
    """Returns True if an optimizer has a learning rate. COCOB has no learning rate."""
    return not is_legacy(leaf) or "learning_rate" in _rate_of(leaf)._hyper


def has_fixed_rate(leaf: Any) -> bool:
    """Returns True if the learning rate is a number, not a schedule or a function."""
    if not is_legacy(leaf):
        return isinstance(leaf._learning_rate, tf.Variable)
    rate = _rate_of(leaf)._hyper.get("learning_rate")
    return isinstance(rate, (int, float, tf.Variable))


def initial_rate(leaf: Any) -> float:
    """Returns the learning rate of an optimizer's first update."""
    source = _rate_of(leaf)
    rate = source._hyper["learning_rate"] if is_legacy(leaf) else source._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(tf.constant(0, tf.int64)))
    value = rate() if callable(rate) and not tf.is_tensor(rate) else rate
    return float(tf.convert_to_tensor(value))


def learning_rate(leaf: Any) -> Any:
    """Returns the learning rate of an update that is made now, or None if it has no rate."""
    if not is_legacy(leaf):
        rate = leaf._learning_rate
        schedule = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
        return rate(leaf.iterations) if schedule else rate
    if not has_learning_rate(leaf):
        return None
    return _rate_of(leaf)._decayed_lr(tf.as_dtype(keras.backend.floatx()))


def _scale(optimizer: Any) -> Any:
    while isinstance(optimizer, OptimizerHolder):
        optimizer = optimizer.inner
    return optimizer if isinstance(optimizer, LossScaleOptimizer) else None


# Methods that must be Keras's own in an optimizer. Otherwise its updates cannot be followed.
_FOLLOWED = {
    False: ("_internal_apply_gradients", "_distributed_apply_gradients_fn", "_update_step"),
    True: ("apply_gradients", "_distributed_apply"),
}
# Classes of tensorflow-addons that override these methods, but call Keras's methods.
_FOLLOWABLE = ("AveragedOptimizerWrapper", "DecoupledWeightDecayExtension", "Lookahead")


class OptimizerWrapper(OptimizerHolder, metaclass=PicksOptimizerBase):
    """An optimizer that holds another optimizer, and has its variables, learning rate and steps.

    Args:
        optimizer: Keras optimizer, or the name of a new (not legacy) optimizer.
        name: str. Name of the wrapper. Default None, for a name that Keras chooses.

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
        if not is_legacy(self):
            # In a loaded SavedModel, the replacement of a new optimizer has a counter.
            self._track_trackable(inner.iterations, "_iterations")

    def _as_optimizer(self, optimizer: Any) -> Any:
        def followed(optimizer: Any) -> list[tuple[Any, str]]:
            return [
                (leaf, method)
                for leaf in leaves(optimizer)
                for method in _FOLLOWED[is_legacy(leaf)]
                if not _goes_on_with_keras(leaf, method)
            ]

        kinds = (New, Legacy)
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
        if value and is_legacy(self) and vars(self).get("decay_unused"):
            raise ValueError(
                f"{type(self).__name__} '{self.name}' is in a LossScaleOptimizer, which does not "
                "pass variables without a gradient to a legacy optimizer: put the loss scale "
                f"inside {type(self).__name__}, or set decay_unused=False"
            )
        object.__setattr__(self, "_is_scaled", value)
        if value and isinstance(self.optimizer, LossScaleOptimizer):
            self._give_up_scale()

    def _give_up_scale(self) -> None:
        # A loss scale around this optimizer turns off the loss scale inside. Otherwise gradients
        # would be divided twice. Keras's `compile` sets this with mixed_float16.
        scale = self.optimizer
        if (scale.initial_scale, scale.dynamic_growth_steps) != (2.0**15, 2000):
            warnings.warn(
                f"{type(self).__name__} '{self.name}' holds a LossScaleOptimizer and is inside "
                "another LossScaleOptimizer. Only the outer one acts. The arguments of the inner "
                f"one have no effect. Put the loss scale around {type(self).__name__}",
                stacklevel=4,
            )
        object.__setattr__(self, "_scaled_outside", True)

    def _build_once(self, variables: Sequence[Any]) -> None:
        """Creates the state for the variables, first in the held optimizer, then in this one."""
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
            value: Initial value of all elements. None means the current value of `like`.
            like: Variable of a layer. The new variable has its shape and device. Default None, for
                a variable that is the same on all replicas.
            shape: Shape, if `like` is None. Default scalar.
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
                    "gradients, or call build(variables) first"
                )
            trainable_variables = self._trainable_variables
        scale = _scale(self)
        if scale is not None:
            grads = scale.get_unscaled_gradients(grads)
        self.apply_gradients(list(zip(grads, trainable_variables, strict=True)))

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the scale of the held loss scale."""
        scale = _scale(self)
        return loss if scale is None else scale.get_scaled_loss(loss)

    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Makes one step for pairs of a gradient and a variable; see Keras."""
        pairs = list(grads_and_vars)
        if not pairs:
            return self.iterations
        if self._is_wrapped_by_loss_scale_optimizer:
            given = {key(self, variable) for _, variable in pairs}
            announced = vars(self).get("_announced", ())
            pairs += [(None, v) for v in announced if key(self, v) not in given]
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
    definer = defining_class(type(leaf), method)
    addons = definer.__module__.startswith("tensorflow_addons.")
    return addons and definer.__name__ in _FOLLOWABLE


def steps(leaf: Any) -> int:
    """Returns the number of steps of an optimizer. Its learning-rate schedule gets this number."""
    return int(tf.convert_to_tensor(leaf.iterations).numpy())
