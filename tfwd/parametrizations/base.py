"""`Parametrization`: the base class."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import tensorflow as tf

from tfwd import _keras


class Parametrization:
    """Base class of parametrizations: functions from a weight to the effective weight.

    Subclasses define `__call__`, and `get_config` if their constructor has arguments.

    - A stochastic parametrization acts only in training. A deterministic one (`stochastic = False`)
      also acts in evaluation.
    - All random numbers must come from the seed, through a `tf.random.stateless_*` function,
      because backward repeats a draw. With `jit_compile=True`, TensorFlow's functions draw other
      numbers than without.
    - `elementwise = True` promises that each entry of the result depends only on the same entry of
      the weight, the seed and the position. It makes `tfwd.gradients` cheaper. A subclass with
      another `__call__` must set it again.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd.parametrizations import Parametrization
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
        >>> noise = {"kernel": UniformNoise(0.1)}
        >>> dense = layers.Parametrized(keras.layers.Dense(2), noise, seed=1)
        >>> dense(tf.ones([1, 3]), training=True).shape
        TensorShape([1, 2])
    """

    stochastic = True
    elementwise = False
    by_rows = False  # True if the class defines `of_rows`
    per_example = False  # True if each example has its own effective weight; see `Dropout`
    has_reference = (
        False  # True if the class defines `towards_tensor`, which layers call; see `Mixout`
    )
    # True if the reference is a trainable weight that begins as `first_reference`; see `WeightNorm`
    trains_reference = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        # Properties of a base class's `__call__` do not hold for another `__call__`.
        if ("__call__" in own or "of_rows" in own) and "by_rows" not in own:
            cls.by_rows = "of_rows" in own
        if "__call__" in own and "elementwise" not in own:
            cls.elementwise = False

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the effective weight.

        Args:
            weight: Floating tensor.
            seed: int32 `[2]`. The only source of randomness.

        Returns:
            A tensor of the weight's shape and dtype, differentiable in the weight.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__")

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, indices: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        """Returns rows of the effective weight without computing the other rows.

        If a class defines it, an embedding computes only the rows that are looked up. A subclass
        that overrides `__call__` must define `of_rows` again. Otherwise it does not have `of_rows`.

        Args:
            rows: Rows of a weight, `indices.shape + shape[1:]`.
            seed: int32 `[2]`.
            indices: Integers. Indices of the rows.
            shape: Shape of the whole weight.

        Returns:
            `tf.gather(self(weight, seed), indices)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define of_rows")

    def of_examples(self, weight: tf.Tensor, seed: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
        """Returns the effective weight of each example, if the parametrization is `per_example`.

        Args:
            weight: Floating tensor.
            seed: int32 `[2]`.
            count: Number of examples in the batch.

        Returns:
            `[count, *weight.shape]` in the weight's dtype.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define of_examples")

    def at(self, call: tf.Tensor) -> Parametrization:
        """Returns the parametrization of one training call, with schedules and variables read.

        Args:
            call: int64 scalar. Number of the training call, from 0.
        """
        return self

    def towards_tensor(self, reference: tf.Tensor) -> Parametrization:
        """Returns a copy with a reference tensor, if the class has `has_reference`.

        Args:
            reference: Tensor of the weight's shape. For `of_rows`, only the rows of this tensor. If
                `trains_reference` is True, a tensor of the shape of `first_reference(weight)`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define towards_tensor")

    def first_reference(self, weight: tf.Tensor) -> tf.Tensor:
        """Returns the initial value of a trainable reference.

        Args:
            weight: Raw weight.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define first_reference")

    def of_weight(self, raw: tf.Tensor) -> Parametrization:
        """Returns a copy that has information on the whole raw weight. It is called before use.

        Args:
            raw: Raw weight with all its rows, even if other elements of a chain come first, or if
                only some rows are needed.
        """
        return self

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        """Raises a ValueError that begins with `where` if the arguments are not usable.

        Args:
            where: Beginning of the message, which names the layer and the weight.
            shape: Shape of the weight, or None if it is not known yet.
        """

    @property
    def is_identity(self) -> bool:
        """True if the effective weight always equals the weight."""
        return False

    def elements(self) -> list[Parametrization]:
        """Returns the parametrizations that this parametrization applies, in their order."""
        return [self]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments, in a form that Keras can serialize.

        Raises:
            NotImplementedError: If the constructor of a subclass has arguments.
        """
        names = list(inspect.signature(type(self)).parameters)
        if names:
            raise NotImplementedError(
                f"{type(self).__name__} has the arguments {', '.join(names)}: define get_config(), "
                "so that a model with it can be saved"
            )
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Parametrization:
        """Creates the parametrization from a config of `get_config`."""
        return cls(**_keras.copies.deserialize(config))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


def copy_with(parametrization: Any, **attributes: Any) -> Any:
    """Returns a copy, of the same class, with other attributes."""
    changed = copy.copy(parametrization)
    vars(changed).update(attributes)
    return changed
