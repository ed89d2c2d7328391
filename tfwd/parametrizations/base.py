"""`Parametrization`: the base class."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import tensorflow as tf

from tfwd import _keras


class Parametrization:
    """Base class: a map from a weight to the effective weight.

    Subclasses define `__call__`, and `get_config` if their constructor takes arguments. A
    stochastic parametrization acts in training only; a deterministic one (`stochastic = False`)
    acts in evaluation too. Whatever is random must come from the seed, by a `tf.random.stateless_*`
    function: a draw is made a second time in backward. `elementwise = True` says that each entry of
    the result depends on that entry of the weight, the seed and its place alone; `tfwd.gradients`
    is cheaper then, and a subclass with another `__call__` says it anew.

    Example:

    >>> import keras
    >>> @keras.saving.register_keras_serializable("my_package")
    ... class UniformNoise(Parametrization):
    ...     elementwise = True
    ...     def __init__(self, width):
    ...         self.width = width
    ...     def __call__(self, weight, seed):
    ...         noise = tf.random.stateless_uniform(weight.shape, seed, dtype=weight.dtype)
    ...         return weight + self.width * (2 * noise - 1)
    ...     def get_config(self):
    ...         return {"width": self.width}
    >>> from tfwd import layers
    >>> dense = layers.Parametrized(keras.layers.Dense(2), {"kernel": UniformNoise(0.1)}, seed=1)
    >>> dense(tf.ones([1, 3]), training=True).shape
    TensorShape([1, 2])
    """

    stochastic = True
    elementwise = False
    by_rows = False  # whether there is an `of_rows`
    has_reference = False  # whether there is a `towards_tensor`, which layers call; see `Mixout`

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        # What a base class has beside its `__call__` does not hold for another `__call__`.
        if ("__call__" in own or "of_rows" in own) and "by_rows" not in own:
            cls.by_rows = "of_rows" in own
        if "__call__" in own and "elementwise" not in own:
            cls.elementwise = False

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the effective weight.

        Args:
            weight: a floating tensor.
            seed: int32 `[2]`. The result may depend on nothing else that is random.

        Returns:
            A tensor of the weight's shape and dtype, differentiable in the weight.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, places: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        """Rows of the effective weight, if that can be had without the rest of it.

        If a class defines it, an embedding computes the rows that are looked up and no others. A
        subclass with another `__call__` defines it anew, or has none.

        Args:
            rows: rows of a weight, `places.shape + shape[1:]`.
            seed: int32 `[2]`.
            places: integers, which rows these are.
            shape: the weight's shape.

        Returns:
            `tf.gather(self(weight, seed), places)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define of_rows")

    def at(self, call: tf.Tensor) -> Parametrization:
        """Returns the parametrization of one training call, with its schedules and variables read.

        Args:
            call: int64 scalar, the number of the training call, from 0.
        """
        return self

    def towards_tensor(self, reference: tf.Tensor) -> Parametrization:
        """Returns the same with a reference, a tensor beside the weight, if it `has_reference`.

        Args:
            reference: of the weight's shape; for `of_rows` the rows of it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no reference")

    def of_weight(self, raw: tf.Tensor) -> Parametrization:
        """Returns the same with what it needs to know of a whole weight, before it is applied to it.

        Args:
            raw: the raw weight, also where other elements of a chain come before this one, and
                where only rows are wanted.
        """
        return self

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        """Raises a ValueError that begins with `where` if the arguments cannot be used.

        Args:
            where: names the layer and the weight.
            shape: the weight's shape, or None if it is not known yet.
        """

    @property
    def is_identity(self) -> bool:
        """Whether the effective weight is known to be the weight itself, whatever the call."""
        return False

    def elements(self) -> list[Parametrization]:
        """Returns the parametrizations that this one applies one after the other."""
        return [self]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, in a form that Keras can serialize.

        Raises:
            NotImplementedError: if the constructor of a subclass takes arguments.
        """
        taken = list(inspect.signature(type(self)).parameters)
        if taken:
            raise NotImplementedError(
                f"{type(self).__name__} takes {', '.join(taken)}: define get_config(), so that a "
                "model that uses it can be saved"
            )
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Parametrization:
        """Builds the parametrization that `get_config` described."""
        return cls(**_keras.configs.deserialize(config))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


def changed(parametrization: Any, **attributes: Any) -> Any:
    """Returns a copy, of the same class, with other attributes."""
    changed = copy.copy(parametrization)
    vars(changed).update(attributes)
    return changed
