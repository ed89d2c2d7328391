"""`OptimizerWrapper`: an optimizer around another one."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer
from keras.src.utils import tracking

from tfwd._keras3.configs import deserialize
from tfwd._keras3.wrapped_optimizers import LossScale, Multi, chain, key, leaves
from tfwd._keras_shared.holding import Holder, SavesOwn


class OptimizerWrapper(Holder, SavesOwn, Optimizer):
    """An optimizer that holds another one and is in its place: same variables, rate and steps.

    Args:
        optimizer: the other one, a Keras optimizer or the name of one.
        name: of this one; Keras makes one up by default.

    Raises:
        TypeError: it is not a Keras optimizer.
    """

    built: bool
    _deserialize = staticmethod(deserialize)

    def __init__(self, optimizer: Any, name: str | None = None) -> None:
        inner = self._as_optimizer(optimizer)
        super().__init__(learning_rate=0.0, name=name)
        # The counter and the rate are those of the optimizer that is held, and its state.
        self._iterations = inner._iterations
        self._learning_rate = inner._learning_rate
        self._forget_variables()
        # What Keras's class sets to its defaults; __getattr__ then finds what is true.
        for name in inspect.signature(keras.optimizers.SGD).parameters:
            if name != "name" and name in vars(self):
                object.__delattr__(self, name)
        self._scaled_outside = False
        self.optimizer = inner

    def _forget_variables(self) -> None:
        """Begins a new list of own variables: TensorFlow cannot save one that lost an element."""
        tracker: Any = vars(self)["_tracker"]
        is_variable = tracker.config["variables"][0]
        object.__delattr__(self, "_tracker")
        self._variables: list[keras.Variable] = []
        self._tracker = type(tracker)({"variables": (is_variable, self._variables)})

    def _as_optimizer(self, optimizer: Any) -> Optimizer:
        def followed(optimizer: Optimizer) -> list[tuple[Any, str]]:
            methods = ("_backend_apply_gradients", "_backend_update_step")
            return [(leaf, method) for leaf in leaves(optimizer) for method in methods]

        overridden = "Keras's optimizers override update_step alone"
        return self._checked(type(self).__name__, optimizer, Optimizer, followed, overridden)

    @property
    def _model_variables_moving_average(self) -> list[keras.Variable]:
        return self.inner._model_variables_moving_average  # SwapEMAWeights reads it

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Makes the state for the variables: the held optimizer's, then its own."""
        variables = list(variables)
        if self.built or not variables:  # Keras builds with none when it reads an HDF5 file
            return
        self._check_variables(variables)
        if not self.inner.built:
            self.inner.build(variables)
        self._build(variables)
        if any(isinstance(held, Multi) for held in chain(self.inner)):
            # Keras keeps these where TensorFlow's checkpoints do not see them.
            for i, leaf in enumerate(leaves(self.inner)):
                self._track_trackable(leaf, f"_optimizer_{i}", overwrite=True)
        with tracking.DotNotTrackScope():  # the model's variables are none of the optimizer's
            self._trainable_variables = variables
            self._trainable_variables_indices = {key(self, v): i for i, v in enumerate(variables)}
        self.built = True

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """One step; see Keras."""
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
                f"{type(self).__name__}: give the variables with the gradients, or call "
                "build(variables) before"
            )
        variables = trainable_variables or list(self._trainable_variables)
        self._apply(grads, variables, lambda: self.inner.apply(grads, variables))

    def _add_variable(
        self, name: str, dtype: str, value: Any, like: Any = None, shape: Sequence[int] = ()
    ) -> keras.Variable:
        """A new variable of this optimizer itself.

        Args:
            name: its name.
            dtype: its dtype.
            value: what all of it is at first; None: what `like` is now.
            like: a variable of a layer whose shape and place it takes; without one it is the same
                on all replicas.
            shape: its shape, without `like`.
        """
        initial: Any = keras.initializers.Constant(value)
        if like is None:
            first = "only_first_replica"
            return self.add_variable(shape, initial, dtype, aggregation=first, name=name)
        held = getattr(like, "_value", like)  # which may be a variable of TensorFlow
        if value is None:
            with tf.init_scope():
                now = tf.cast(held, dtype)
            initial = lambda shape, dtype: now  # noqa: E731
        with tf.distribute.get_strategy().extended.colocate_vars_with(held):
            return self.add_variable(like.shape, initial, dtype, name=name)

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """One step, for pairs of a gradient and a variable; see Keras."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return self.inner._iterations

    @property
    def variables(self) -> list[keras.Variable]:
        return [*self._variables, *self.inner.variables]

    @property
    def iterations(self) -> Any:
        inner = self.inner  # a loss scale counts nothing in older releases
        return (
            inner.inner_optimizer.iterations if isinstance(inner, LossScale) else inner.iterations
        )

    @property
    def loss_scale_factor(self) -> float | None:
        if "optimizer" not in vars(self):
            return None
        if isinstance(self.optimizer, LossScale) and not self._scaled_outside:
            # Not None: Keras leaves out an assignment of what is there already.
            return self.optimizer.initial_scale
        return self.inner.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: float | None) -> None:
        if "optimizer" not in vars(self):  # set by the constructor of Keras's class
            return
        if not isinstance(self.optimizer, LossScale):
            self.optimizer.loss_scale_factor = value
            return
        # Whoever puts a loss scale around this one turns it off inside, or gradients would be
        # divided twice. Keras's `compile` does under mixed_float16.
        standard = inspect.signature(LossScale).parameters
        for argument in ("initial_scale", "dynamic_growth_steps"):
            if getattr(self.optimizer, argument) != standard[argument].default:
                warnings.warn(
                    f"{type(self).__name__} '{self.name}' holds a LossScaleOptimizer and is in "
                    "another one, which alone acts; its arguments are lost. Put the loss scale "
                    "around, or compile with auto_scale_loss=False",
                    stacklevel=2,
                )
                break
        self._scaled_outside = True

    def scale_loss(self, loss: Any) -> Any:
        return self.inner.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        self.inner.finalize_variable_values(var_list)
