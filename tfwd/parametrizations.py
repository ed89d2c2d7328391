"""Parametrizations: how a weight becomes the effective weight that a layer computes with.

A parametrization is a small object that maps a tensor and a seed to a tensor of the same shape and
dtype. It knows nothing of layers; `tfwd.layers.Parametrized` applies it to a layer's weights. To
write one, subclass `Parametrization` and register it with Keras, as the classes below do.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import draws, rates, seeds


class Parametrization:
    """Base class: a map from a weight to the effective weight.

    Subclasses define `__call__`, and `get_config` if their constructor takes arguments. A
    stochastic parametrization acts in training only; a deterministic one (`stochastic = False`)
    acts in evaluation too. Whatever is random must come from the seed, by a `tf.random.stateless_*`
    function: a draw is made a second time in backward.

    Example:

    >>> @keras.saving.register_keras_serializable("my_package")
    ... class UniformNoise(Parametrization):
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
    by_rows = False

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

        A class that defines it sets `by_rows = True`. An embedding then computes the rows that are
        looked up and no others.

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
        """The parametrization of one training call, with its schedules and variables read.

        Args:
            call: int64 scalar, the number of the training call, from 0.
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
        """The parametrizations that this one applies one after the other."""
        return [self]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, in a form that Keras can serialize.

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
        return cls(**keras.saving.deserialize_keras_object(config))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


@keras.saving.register_keras_serializable("tfwd")
class Dropout(Parametrization):
    """Weight dropout (DropConnect): each entry is kept with probability `keep`, else exactly zero.

    Formula: `w'_i = m_i w_i / keep` with `m_i ~ Bernoulli(keep)`, where `keep` is `1 - rate`
    rounded to a multiple of 2^-16, so that `E[w'_i] = w_i` exactly.

    Args:
        rate: the drop rate, in [0, 1): a float, a schedule (a callable from the number of the
            training call to a scalar, such as a `keras.optimizers.schedules.LearningRateSchedule`)
            or a variable, read at every call. A rate of 0.0 is the identity and draws nothing. A
            variable is the caller's to save: a config holds its value of the moment.
        noise_shape: as in `keras.layers.Dropout`: the shape of the mask, where 1 shares it along an
            axis and None stands for the weight's own size. `(None, 1)` drops whole rows.

    Raises:
        ValueError: when it is applied, if the rate is not in [0, 1) or the noise shape does not fit
            the weight; by `Parametrized`, with the names of the layer and the weight.

    Example:

    >>> w = Dropout(0.5)(tf.ones([2, 4]), seed=tf.constant([1, 2]))
    >>> sorted(set(w.numpy().ravel().tolist()))
    [0.0, 2.0]

    References: Wan et al., "Regularization of Neural Networks using DropConnect" (2013); Merity et
    al., "Regularizing and Optimizing LSTM Language Models" (2017). DropConnect as published
    averages over masks at test time; here, as in the second paper, the raw weight is used.
    """

    by_rows = True

    def __init__(self, rate: rates.Scalar, noise_shape: Sequence[int | None] | None = None) -> None:
        self.rate = rates.constant(rate)
        self.noise_shape = None if noise_shape is None else tuple(noise_shape)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("Dropout", tuple(weight.shape))
        if self.is_identity:
            return weight
        return draws.dropout(weight, self.rate, seed, self._mask_shape(weight.shape))

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, places: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        return draws.dropout(rows, self.rate, seed, self._mask_shape(shape) or shape, places)

    def at(self, call: tf.Tensor) -> Dropout:
        return _changed(self, rate=rates.read(self.rate, call, below=1.0))

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        rates.check(where, "rate", self.rate, below=1.0)
        if shape is None or self.noise_shape is None:
            return
        fits = len(shape) == len(self.noise_shape) and all(
            n in (None, 1, size) for n, size in zip(self.noise_shape, shape, strict=True)
        )
        if not fits:
            raise ValueError(
                f"{where}: noise_shape {self.noise_shape} does not fit a weight of shape {shape}; "
                "it needs one entry an axis, each None, 1 or the axis's size"
            )

    @property
    def is_identity(self) -> bool:
        return rates.is_number(self.rate) and draws.keep_probability(float(self.rate)) == 1.0

    def get_config(self) -> dict[str, Any]:
        return {"rate": rates.serialized(self.rate), "noise_shape": self.noise_shape}

    def _mask_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        if self.noise_shape is None:
            return None
        sizes = zip(self.noise_shape, shape, strict=True)
        return tuple(size if n is None else n for n, size in sizes)


@keras.saving.register_keras_serializable("tfwd")
class GaussianNoise(Parametrization):
    """Variational noise: independent Gaussian noise on every entry.

    Formula: `w' = w + stddev * e` with `e ~ N(0, I)`, from training call `start_step` on; before,
    and where `stddev` is 0, `w' = w` bit for bit.

    Args:
        stddev: the standard deviation, at least 0: a float, a schedule or a variable, as the rate
            of `Dropout`. A float 0.0 draws nothing.
        start_step: the number of the first training call, counted from 0, that adds noise. Calls
            are counted by the layer that is wrapped, so that a layer called twice in a training
            step counts two.

    Raises:
        ValueError: when it is applied, if `stddev` is negative or not finite.

    Example:

    >>> w = GaussianNoise(0.1)(tf.zeros([1000]), seed=tf.constant([1, 2]))
    >>> round(float(tf.math.reduce_std(w)), 2)
    0.1

    References: Graves, "Practical Variational Inference for Neural Networks" (2011). One fixed
    deviation is used for all entries, as in speech recognition since; it is not learnt.
    """

    by_rows = True

    def __init__(self, stddev: rates.Scalar, start_step: int = 0) -> None:
        self.stddev = rates.constant(stddev)
        self.start_step = start_step

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        self.check("GaussianNoise")
        if self.is_identity:
            return weight
        return draws.noise(weight, self.stddev, seed)

    def of_rows(
        self, rows: tf.Tensor, seed: tf.Tensor, places: tf.Tensor, shape: tuple[int, ...]
    ) -> tf.Tensor:
        return draws.noise(rows, self.stddev, seed, places)

    def at(self, call: tf.Tensor) -> GaussianNoise:
        stddev = rates.read(self.stddev, call, below=math.inf)
        if self.start_step > 0 and not self.is_identity:
            started = tf.cast(call >= self.start_step, tf.float32)
            stddev = tf.stop_gradient(tf.cast(stddev, tf.float32) * started)
        return _changed(self, stddev=stddev, start_step=0)

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        rates.check(where, "stddev", self.stddev, below=math.inf)
        if not isinstance(self.start_step, int) or self.start_step < 0:
            raise ValueError(
                f"{where}: start_step must be an integer of at least 0, got {self.start_step!r}"
            )

    @property
    def is_identity(self) -> bool:
        return rates.is_number(self.stddev) and float(self.stddev) == 0.0

    def get_config(self) -> dict[str, Any]:
        return {"stddev": rates.serialized(self.stddev), "start_step": self.start_step}


@keras.saving.register_keras_serializable("tfwd")
class WeightNorm(Parametrization):
    """Weight normalization without a gain: every slice along `axis` has unit Euclidean length.

    Formula: `w'_k = w_k / max(||w_k||, epsilon)` for each index `k` of `axis`, the norm taken over
    all other axes. It is deterministic, and acts in training and in evaluation alike.

    Args:
        axis: the axis of the output features, which are normalized one by one.
        epsilon: the least norm that is divided by.

    Example:

    >>> w = WeightNorm()(tf.constant([[3.0], [4.0]]), seed=None)
    >>> [round(float(entry), 2) for entry in w.numpy().ravel()]
    [0.6, 0.8]

    References: Salimans and Kingma, "Weight Normalization" (2016). The published gain `g` would be
    a new weight, which a parametrization does not add; a gain that is wanted can follow as a layer.
    """

    stochastic = False

    def __init__(self, axis: int = -1, epsilon: float = 1e-6) -> None:
        self.axis = axis
        self.epsilon = epsilon

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        self.check("WeightNorm", tuple(weight.shape))
        rank = len(weight.shape)
        others = [axis for axis in range(rank) if axis != self.axis % rank]
        wide = weight.dtype if weight.dtype.size >= 4 else tf.float32
        squares = tf.reduce_sum(tf.square(tf.cast(weight, wide)), others, keepdims=True)
        # The root is taken after the maximum: its slope at zero is infinite.
        scale = tf.math.rsqrt(tf.maximum(squares, tf.cast(self.epsilon, wide) ** 2))
        return tf.cast(tf.cast(weight, wide) * scale, weight.dtype)

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        if shape is not None and not -len(shape) <= self.axis < len(shape):
            raise ValueError(
                f"{where}: axis {self.axis} does not exist in a weight of shape {shape}"
            )

    def get_config(self) -> dict[str, Any]:
        return {"axis": self.axis, "epsilon": self.epsilon}


@keras.saving.register_keras_serializable("tfwd")
class Chain(Parametrization):
    """Several parametrizations, applied one after the other.

    Formula: `Chain([p, q])(w) = q(p(w))`. Each element draws from a seed of its own, so that two
    alike elements are independent.

    Args:
        parametrizations: the elements, the first applied first.

    Example:

    >>> p = Chain([GaussianNoise(0.1), Dropout(0.5)])
    >>> w = p(tf.ones([1000]), seed=tf.constant([1, 2]))
    >>> 0.45 < float(tf.reduce_mean(tf.cast(w == 0.0, tf.float32))) < 0.55
    True
    """

    def __init__(self, parametrizations: Sequence[Parametrization]) -> None:
        self.parametrizations = list(parametrizations)
        for p in self.parametrizations:
            if not isinstance(p, Parametrization):
                raise TypeError(
                    "Chain takes parametrizations such as Dropout(0.5), got "
                    f"{p!r} of type {type(p).__name__}"
                )

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        """Whether any element is."""
        return any(p.stochastic for p in self.parametrizations)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return apply(weight, [Link(p, seed) for p in self.parametrizations])

    def at(self, call: tf.Tensor) -> Chain:
        return _changed(self, parametrizations=[p.at(call) for p in self.parametrizations])

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        for p in self.parametrizations:
            p.check(where, shape)

    @property
    def is_identity(self) -> bool:
        return all(p.is_identity for p in self.parametrizations)

    def elements(self) -> list[Parametrization]:
        if type(self).__call__ is not Chain.__call__:  # a subclass that does something else
            return [self]
        return [element for p in self.parametrizations for element in p.elements()]

    def get_config(self) -> dict[str, Any]:
        return {
            "parametrizations": [
                keras.saving.serialize_keras_object(p) for p in self.parametrizations
            ]
        }


class Link(NamedTuple):
    """One parametrization of a weight's chain, with what it needs for one call.

    Attributes:
        parametrization: what is applied.
        seed: int32 `[2]`, or None if nothing of it is stochastic.
        training: whether its stochastic elements act.
    """

    parametrization: Parametrization
    seed: tf.Tensor | None
    training: bool = True


def apply(
    weight: tf.Tensor,
    chain: Sequence[Link],
    places: tf.Tensor | None = None,
    shape: tuple[int, ...] = (),
) -> tf.Tensor:
    """Applies the links of a chain one after the other.

    The element at index `k > 0` of the whole chain draws from `fold(seed, 0, k)`, so that elements
    that were given equal seeds are independent, and a chain of one draws as its element would.

    Args:
        weight: a floating tensor.
        chain: the links, the first applied first.
        places: integers, if `weight` is not a whole weight but those rows of one; every element of
            the chain must then be `by_rows`.
        shape: the shape of the whole weight, if `places` is given.

    Returns:
        The effective weight, or those rows of it.

    Raises:
        ValueError: if an element does not keep shape and dtype.
    """
    elements = [(element, link) for link in chain for element in link.parametrization.elements()]
    for index, (element, link) in enumerate(elements):
        if element.is_identity or (element.stochastic and not link.training):
            continue
        seed = link.seed
        if index and element.stochastic:
            seed = seeds.fold(seed, 0, index)
        if places is None:
            effective = element(weight, seed)
        else:
            effective = element.of_rows(weight, seed, places, shape)
        if not tf.is_tensor(effective):
            raise ValueError(f"{element!r} made a {type(effective).__name__} that is no tensor")
        if effective.dtype != weight.dtype or not effective.shape.is_compatible_with(weight.shape):
            raise ValueError(
                f"{element!r} made {effective.dtype.name} {effective.shape} of a weight that is "
                f"{weight.dtype.name} {weight.shape}; it must keep shape and dtype"
            )
        weight = effective
    return weight


def _changed(parametrization: Any, **attributes: Any) -> Any:
    """A copy, of the same class, with other attributes."""
    changed = copy.copy(parametrization)
    vars(changed).update(attributes)
    return changed
