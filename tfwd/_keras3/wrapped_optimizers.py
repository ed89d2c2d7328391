"""Nested optimizers on Keras 3, and the base class of tfwd's optimizers that hold another one.

The functions look inside tfwd's wrappers, loss scales and Keras's `MultiOptimizer`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.src.utils import tracking

from tfwd._keras3.copies import deserialize
from tfwd._keras_shared.optimizer_holder import OptimizerHolder, SavesOwnVariables

LossScale: Any = keras.optimizers.LossScaleOptimizer
# Newer releases of Keras have an optimizer that holds several optimizers for different variables.
Multi: Any = getattr(keras.optimizers, "MultiOptimizer", ())


def leaves(optimizer: Optimizer) -> list[Optimizer]:
    """Returns the innermost optimizers, which make the updates. `build` may add more."""
    if isinstance(optimizer, LossScale):
        return leaves(optimizer.inner_optimizer)
    if isinstance(optimizer, OptimizerHolder):
        return leaves(optimizer.inner)
    if isinstance(optimizer, Multi):
        return [leaf for inner in optimizer.optimizers for leaf in leaves(inner)]
    return [optimizer]


def is_legacy(optimizer: Optimizer) -> bool:
    """Returns True for an optimizer of the legacy kind, which Keras 3 does not have."""
    return False


def leaf_of(optimizer: Optimizer, variable: keras.Variable) -> Optimizer:
    """Returns the optimizer that updates a variable. The optimizer need not be built."""
    if isinstance(optimizer, LossScale):
        return leaf_of(optimizer.inner_optimizer, variable)
    if isinstance(optimizer, OptimizerHolder):
        return leaf_of(optimizer.inner, variable)
    if isinstance(optimizer, Multi):
        if optimizer.built:  # a later call of the map may create new optimizers
            index = optimizer._var_to_optimizer_idx[key(optimizer, variable)]
            return leaf_of(optimizer.optimizers[index], variable)
        return leaf_of(optimizer._optimizer_map(variable), variable)
    return optimizer


def is_built_for(optimizer: Optimizer, variable: keras.Variable) -> bool:
    """Returns True if a built optimizer updates a variable."""
    return key(optimizer, variable) in optimizer._trainable_variables_indices


def chain(optimizer: Optimizer) -> Iterator[Optimizer]:
    """Yields the optimizer and all optimizers inside, outer optimizers first."""
    yield optimizer
    held: list[Optimizer] = []
    if isinstance(optimizer, LossScale):
        held = [optimizer.inner_optimizer]
    elif isinstance(optimizer, OptimizerHolder):
        held = [optimizer.optimizer]
    elif isinstance(optimizer, Multi):
        held = optimizer.optimizers
    for inner in held:
        yield from chain(inner)


def own_decays(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the arguments of a Keras optimizer's own weight decay, with their values."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name.endswith("weight_decay") and not name.startswith("_") and value
    }


def lowers_scale(optimizer: Optimizer) -> bool:
    """Returns True if an active loss scale inside reacts to gradients that are not finite."""
    while isinstance(optimizer, OptimizerHolder):
        optimizer = optimizer.inner
    return isinstance(optimizer, LossScale)


def gradient_scale(optimizer: Optimizer) -> tf.Tensor | float | None:
    """Returns the factor that `apply` expects in the gradients, and removes; None without one."""
    for held in chain(optimizer):
        if isinstance(held, LossScale):
            built = held.built
            return tf.convert_to_tensor(held.dynamic_scale) if built else held.initial_scale
    return optimizer.loss_scale_factor


def name(optimizer: Optimizer) -> str:
    """Returns the optimizer's name."""
    return optimizer.name


def accumulates(optimizer: Optimizer) -> bool:
    """Returns True if one update uses the gradients of several steps."""
    return bool(optimizer.gradient_accumulation_steps)


def accumulated_gradients(leaf: Optimizer) -> list[tuple[Any, Any]]:
    """Returns the weights of an optimizer that accumulates, each with its sum of gradients."""
    if not accumulates(leaf) or not leaf.built:
        return []
    return list(zip(leaf._trainable_variables, leaf._accumulated_gradients, strict=True))


def has_learning_rate(leaf: Optimizer) -> bool:
    """Returns True, because all optimizers of Keras 3 have a learning rate."""
    return True


def has_fixed_rate(leaf: Optimizer) -> bool:
    """Returns True if the learning rate is a number, not a schedule or a function."""
    return isinstance(leaf._learning_rate, keras.Variable)


def initial_rate(leaf: Optimizer) -> float:
    """Returns the learning rate of an optimizer's first update."""
    rate: Any = leaf._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return float(rate(tf.constant(0, tf.int64)))
    return float(tf.convert_to_tensor(rate() if callable(rate) else rate))


def learning_rate(leaf: Optimizer) -> Any:
    """Returns the learning rate of an update that is made now."""
    return leaf.learning_rate


def key(optimizer: Optimizer, variable: Any) -> Any:
    """Returns a key that a variable, its `tf.Variable` and its replicas' copies share."""
    return optimizer._var_key(variable)


class OptimizerWrapper(OptimizerHolder, SavesOwnVariables, Optimizer):
    """An optimizer that holds another optimizer, and has its variables, learning rate and steps.

    Args:
        optimizer: Keras optimizer, or its name.
        name: str. Name of the wrapper. Default None, for a name that Keras chooses.

    Raises:
        TypeError: If it is not a Keras optimizer.
    """

    built: bool
    _deserialize = staticmethod(deserialize)

    def __init__(self, optimizer: Any, name: str | None = None) -> None:
        inner = self._as_optimizer(optimizer)
        super().__init__(learning_rate=0.0, name=name)
        # The held optimizer has the counter and the rate, in its own state.
        self._iterations = inner._iterations
        self._learning_rate = inner._learning_rate
        self._forget_variables()
        # Remove the defaults that Keras's class sets. __getattr__ then finds the true values.
        for name in inspect.signature(keras.optimizers.SGD).parameters:
            if name != "name" and name in vars(self):
                object.__delattr__(self, name)
        self._scaled_outside = False
        self.optimizer = inner

    def _forget_variables(self) -> None:
        """Replaces the list of own variables, because TensorFlow cannot save a shortened list."""
        tracker: Any = vars(self)["_tracker"]
        is_variable = tracker.config["variables"][0]
        object.__delattr__(self, "_tracker")
        self._variables: list[keras.Variable] = []
        self._tracker = type(tracker)({"variables": (is_variable, self._variables)})

    def _as_optimizer(self, optimizer: Any) -> Optimizer:
        def followed(optimizer: Optimizer) -> list[tuple[Any, str]]:
            methods = ("_backend_apply_gradients", "_backend_update_step")
            return [(leaf, method) for leaf in leaves(optimizer) for method in methods]

        overridden = "Keras's optimizers override only update_step"
        return self._checked(type(self).__name__, optimizer, Optimizer, followed, overridden)

    @property
    def _model_variables_moving_average(self) -> list[keras.Variable]:
        return self.inner._model_variables_moving_average  # SwapEMAWeights reads it

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Creates the state for the variables, first in the held optimizer, then in this one."""
        variables = list(variables)
        if self.built or not variables:  # Keras builds without variables when it reads an HDF5 file
            return
        self._check_variables(variables)
        if not self.inner.built:
            self.inner.build(variables)
        self._build(variables)
        if any(isinstance(held, Multi) for held in chain(self.inner)):
            # Keras stores these where TensorFlow's checkpoints do not find them.
            for i, leaf in enumerate(leaves(self.inner)):
                self._track_trackable(leaf, f"_optimizer_{i}", overwrite=True)
        with tracking.DotNotTrackScope():  # the optimizer does not own the model's variables
            self._trainable_variables = variables
            self._trainable_variables_indices = {key(self, v): i for i, v in enumerate(variables)}
        self.built = True

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Makes one step; see Keras."""
        grads = list(grads)
        if not grads:
            return
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
            if not self.built:
                with keras.name_scope(self.name, caller=self):
                    self.build(trainable_variables)
        elif not self.built:
            raise ValueError(
                f"{type(self).__name__} is not built: pass the variables with the gradients, or "
                "call build(variables) first"
            )
        variables = trainable_variables or list(self._trainable_variables)
        self._apply(grads, variables, lambda: self.inner.apply(grads, variables))

    def _add_variable(
        self, name: str, dtype: str, value: Any, like: Any = None, shape: Sequence[int] = ()
    ) -> keras.Variable:
        """Creates a variable of this optimizer itself.

        Args:
            name: str. Name.
            dtype: str. dtype.
            value: Initial value of all elements. None means the current value of `like`.
            like: Variable of a layer. The new variable has its shape and device. Default None, for
                a variable that is the same on all replicas.
            shape: Shape, if `like` is None. Default scalar.
        """
        initial: Any = keras.initializers.Constant(value)
        if like is None:
            first = "only_first_replica"
            return self.add_variable(shape, initial, dtype, aggregation=first, name=name)
        held = getattr(like, "_value", like)  # `like` may be a variable of TensorFlow
        if value is None:
            with tf.init_scope():
                now = tf.cast(held, dtype)
            initial = lambda shape, dtype: now  # noqa: E731
        with tf.distribute.get_strategy().extended.colocate_vars_with(held):
            return self.add_variable(like.shape, initial, dtype, name=name)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """Makes one step for pairs of a gradient and a variable; see Keras."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return self.inner._iterations

    @property
    def variables(self) -> list[keras.Variable]:
        return [*self._variables, *self.inner.variables]

    @property
    def iterations(self) -> Any:
        inner = self.inner  # in older releases a loss scale counts no steps
        return (
            inner.inner_optimizer.iterations if isinstance(inner, LossScale) else inner.iterations
        )

    @property
    def loss_scale_factor(self) -> float | None:
        if "optimizer" not in vars(self):
            return None
        if isinstance(self.optimizer, LossScale) and not self._scaled_outside:
            # Not None, because Keras skips an assignment of the current value.
            return self.optimizer.initial_scale
        return self.inner.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if "optimizer" not in vars(self):  # set by the constructor of Keras's class
            return
        if not isinstance(self.optimizer, LossScale):
            self.optimizer.loss_scale_factor = value
            return
        # A loss scale around this optimizer turns off the loss scale inside. Otherwise gradients
        # would be divided twice. Keras's `compile` sets this with mixed_float16.
        standard = inspect.signature(LossScale).parameters
        for argument in ("initial_scale", "dynamic_growth_steps"):
            if getattr(self.optimizer, argument) != standard[argument].default:
                warnings.warn(
                    f"{type(self).__name__} '{self.name}' holds a LossScaleOptimizer and is inside "
                    "another LossScaleOptimizer. Only the outer one acts. The arguments of the "
                    f"inner one have no effect. Put the loss scale around {type(self).__name__}, "
                    "or compile with auto_scale_loss=False",
                    stacklevel=2,
                )
                break
        self._scaled_outside = True

    def scale_loss(self, loss: Any) -> Any:
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner.finalize_variable_values(var_list)


def steps(leaf: Any) -> int:
    """Returns the number of steps of an optimizer. Its learning-rate schedule gets this number.

    With gradient accumulation, `iterations` of Keras 3 counts updates, and each takes many steps.
    """
    own = getattr(leaf, "_iterations", None)
    return int(tf.convert_to_tensor(leaf.iterations if own is None else own).numpy())
