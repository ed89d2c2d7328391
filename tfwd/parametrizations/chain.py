"""`Chain`: one parametrization after another; and how a layer's and its wrappers' are chained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd._random import seeds
from tfwd.parametrizations.base import Parametrization, changed


@keras.saving.register_keras_serializable("tfwd")
class Chain(Parametrization):
    """Several parametrizations, applied one after the other.

    Formula: `Chain([p, q])(w) = q(p(w))`. Each element draws from a seed of its own, so that two
    alike elements are independent.

    Args:
        parametrizations: the elements, the first applied first.

    Example:

    >>> from tfwd.parametrizations import Dropout, GaussianNoise
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

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """Whether all elements are."""
        return all(p.elementwise for p in self.parametrizations)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return apply(weight, [BoundParametrization(p, seed) for p in self.parametrizations])

    def at(self, call: tf.Tensor) -> Chain:
        return changed(self, parametrizations=[p.at(call) for p in self.parametrizations])

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


class BoundParametrization(NamedTuple):
    """One parametrization of a weight's chain, with what it needs for one call.

    Attributes:
        parametrization: what is applied.
        seed: int32 `[2]`, or None if nothing of it is stochastic.
        training: whether its stochastic elements act.
        references: the tensors of those of its elements that have one, in their order.
    """

    parametrization: Parametrization
    seed: tf.Tensor | None
    training: bool = True
    references: Sequence[tf.Tensor] = ()


def apply(
    weight: tf.Tensor,
    chain: Sequence[BoundParametrization],
    places: tf.Tensor | None = None,
    whole: tf.Tensor | None = None,
) -> tf.Tensor:
    """Applies the links of a chain one after the other.

    The element at index `k > 0` of the whole chain draws from `fold(seed, 0, k)`, so that elements
    that were given equal seeds are independent, and a chain of one draws as its element would.

    Args:
        weight: a floating tensor.
        chain: the links, the first applied first.
        places: integers, if `weight` is not a whole weight but those rows of one; every element of
            the chain must then be `by_rows`.
        whole: the whole raw weight, if `places` is given.

    Returns:
        The effective weight, or those rows of it.

    Raises:
        ValueError: if an element does not keep shape and dtype.
    """
    raw = weight if whole is None else whole
    elements = [(*pair, link) for link in chain for pair in _with_references(link)]
    for index, (element, reference, link) in enumerate(elements):
        if element.is_identity or (element.stochastic and not link.training):
            continue
        if reference is not None:
            reference = reference if places is None else tf.gather(reference, places)
            element = element.towards_tensor(reference)
        element = element.of_weight(raw)
        seed = link.seed
        if index and element.stochastic:
            seed = seeds.fold(seed, 0, index)
        if places is None:
            effective = element(weight, seed)
        else:
            effective = element.of_rows(weight, seed, places, tuple(raw.shape))
        if not tf.is_tensor(effective):
            raise ValueError(f"{element!r} made a {type(effective).__name__} that is no tensor")
        if effective.dtype != weight.dtype or not effective.shape.is_compatible_with(weight.shape):
            raise ValueError(
                f"{element!r} made {effective.dtype.name} {effective.shape} of a weight that is "
                f"{weight.dtype.name} {weight.shape}; it must keep shape and dtype"
            )
        weight = effective
    return weight


def _with_references(
    link: BoundParametrization,
) -> Iterator[tuple[Parametrization, tf.Tensor | None]]:
    """Returns the elements of a link, each with its reference if it has one."""
    given = iter(link.references)
    for element in link.parametrization.elements():
        yield element, next(given, None) if element.has_reference else None
