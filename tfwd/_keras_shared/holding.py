"""An optimizer around another one: what is alike on both Kerases."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras


class Holder:
    """An optimizer of tfwd that holds another as `optimizer` and calls it as `inner`."""

    name: Any
    optimizer: Any
    _deserialize: Callable[[Any, Any], Any]  # what a value of a config stands for
    _scaled_outside: bool
    _variables: Any  # its own
    leaves_out_steps = False  # whether a step of this one may make no update

    @staticmethod
    def _checked(
        kind: str,
        optimizer: Any,
        kinds: Any,
        followed: Callable[[Any], list[tuple[Any, str]]],
        overridden: str,
    ) -> Any:
        """The optimizer, or that of the name, if its updates can be followed.

        Args:
            kind: who asks.
            optimizer: what was given.
            kinds: the classes of which it must be one.
            followed: the leaves in an optimizer, each with a method that must be Keras's.
            overridden: for the message, what an optimizer may override.

        Raises:
            TypeError: it is not a Keras optimizer, or has such a method of its own.
        """
        if isinstance(optimizer, str):
            optimizer = keras.optimizers.get(optimizer)
        if not isinstance(optimizer, kinds):
            raise TypeError(
                f"{kind} needs an optimizer of keras.optimizers, and {optimizer!r} is a "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}"
            )
        for leaf, method in followed(optimizer):
            definer = next(cls for cls in type(leaf).__mro__ if method in vars(cls))
            if not definer.__module__.startswith("keras."):
                raise TypeError(
                    f"{kind} cannot follow the updates of {type(leaf).__name__}: it has a "
                    f"{method} of its own, and {overridden}"
                )
        return optimizer

    @property
    def inner(self) -> Any:
        """The optimizer that is called: the one held, without a loss scale that is not needed."""
        return self.optimizer.inner_optimizer if self._scaled_outside else self.optimizer

    @property
    def inner_optimizer(self) -> Any:
        """The same, by the name that loss scales and Keras's callbacks know."""
        return self.inner

    def __getattr__(self, name: str) -> Any:
        # Called for what is not found here: momentum, beta_1, clipnorm, dynamic_scale, ...
        if name.startswith("_") or "optimizer" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def _check_variables(self, variables: list[Any]) -> None:
        """Raises before anything is made, if these variables will not do."""

    def _build(self, variables: list[Any]) -> None:
        """Makes what this optimizer itself needs for the variables."""

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        """Makes a step; subclasses do what they do around it.

        Args:
            grads: the gradients, None where there is none.
            variables: the variables.
            make: makes the step of the optimizer that is held.
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
        """A config with the objects in it made from their own configs."""
        return {name: cls._deserialize(value, custom_objects) for name, value in config.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        return cls(**cls._deserialized(config, custom_objects))


class SavesOwn:
    """Saves an optimizer's own variables by their numbers; Keras saves the one that is held."""

    name: Any
    _variables: Any

    def save_own_variables(self, store: Any) -> None:
        for i, variable in enumerate(self._variables):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        if len(store.keys()) != len(self._variables):
            warnings.warn(
                f"the saved state of optimizer '{self.name}' has {len(store.keys())} variables and "
                f"the optimizer has {len(self._variables)}; it is not loaded",
                stacklevel=2,
            )
            return
        for i, variable in enumerate(self._variables):
            variable.assign(store[str(i)])
