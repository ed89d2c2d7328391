"""Base classes of optimizers that hold another optimizer. Both versions of Keras share them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfwd._keras_shared.keras_own_code import is_of_keras


class OptimizerHolder:
    """An optimizer of tfwd that holds another optimizer as `optimizer` and calls it as `inner`.

    Attributes:
        leaves_out_steps: bool. A step of this optimizer may make no update.
    """

    name: Any
    optimizer: Any
    _deserialize: Callable[[Any, Any], Any]  # creates the object of a config's value
    _scaled_outside: bool
    _variables: Any  # own variables
    leaves_out_steps = False

    @staticmethod
    def _checked(
        kind: str,
        optimizer: Any,
        kinds: Any,
        followed: Callable[[Any], list[tuple[Any, str]]],
        overridden: str,
    ) -> Any:
        """Returns the optimizer, or the optimizer of a name, if its updates can be followed.

        Args:
            kind: Name of the class that asks.
            optimizer: Optimizer or name.
            kinds: Allowed classes.
            followed: Function that lists the innermost optimizers of an optimizer, each with the
                name of a method that Keras itself must define.
            overridden: Methods that an optimizer may override, for the message.

        Raises:
            TypeError: If it is not a Keras optimizer, or if it overrides such a method.
        """
        if isinstance(optimizer, str):
            optimizer = keras.optimizers.get(optimizer)
        if not isinstance(optimizer, kinds):
            raise TypeError(
                f"{kind} needs an optimizer of keras.optimizers, but {optimizer!r} is a "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            )
        for leaf, method in followed(optimizer):
            if not is_of_keras(type(leaf), method):
                raise TypeError(
                    f"{kind} cannot follow the updates of {type(leaf).__name__}: it has its own "
                    f"{method}, but {overridden}"
                )
        return optimizer

    @property
    def inner(self) -> Any:
        """The optimizer that is called: the held optimizer, without an inactive loss scale."""
        return self.optimizer.inner_optimizer if self._scaled_outside else self.optimizer

    @property
    def inner_optimizer(self) -> Any:
        """The called optimizer, under the name that loss scales and Keras's callbacks use."""
        return self.inner

    def __getattr__(self, name: str) -> Any:
        # Called for other attributes: momentum, beta_1, clipnorm, dynamic_scale, ...
        if name.startswith("_") or "optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def _check_variables(self, variables: list[Any]) -> None:
        """Raises an error for unsuitable variables, before anything is created."""

    def _build(self, variables: list[Any]) -> None:
        """Creates the own state of this optimizer for the variables."""

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        """Makes a step. Subclasses add their own work.

        Args:
            grads: Gradients, with None for a missing gradient.
            variables: Variables.
            make: Function that makes the step of the held optimizer.
        """
        return make()

    @property
    def learning_rate(self) -> Any:
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner.learning_rate = value

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets all `variables`; see Keras."""
        own = len(self._variables)
        for variable, value in zip(self._variables, weights[:own], strict=True):
            variable.assign(value)
        self.inner.set_weights(list(weights[own:]))

    def get_config(self) -> dict[str, Any]:
        return {
            "optimizer": keras.saving.serialize_keras_object(self.optimizer),
            "name": self.name,
        }

    @classmethod
    def _deserialized(cls, config: dict[str, Any], custom_objects: Any = None) -> dict[str, Any]:
        """Returns a config in which the configs of objects are replaced by the objects."""
        return {name: cls._deserialize(value, custom_objects) for name, value in config.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        return cls(**cls._deserialized(config, custom_objects))


class SavesOwnVariables:
    """Mixin that saves an optimizer's own variables. Keras saves the held optimizer."""

    name: Any
    _variables: Any

    def save_own_variables(self, store: Any) -> None:
        for i, variable in enumerate(self._variables):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        if len(store.keys()) != len(self._variables):
            warnings.warn(
                f"the saved state of optimizer '{self.name}' has {len(store.keys())} variables, "
                f"but the optimizer has {len(self._variables)}; the state is not loaded",
                stacklevel=2,
            )
            return
        for i, variable in enumerate(self._variables):
            variable.assign(store[str(i)])
