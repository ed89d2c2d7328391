"""`Chain`: several parametrizations, one after the other. Nested wrappers of a layer use it too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from tfwd._random import seeds
from tfwd.parametrizations.base import Parametrization, copy_with


@keras.saving.register_keras_serializable("tfwd")
class Chain(Parametrization):
    """A sequence of parametrizations, applied one after the other.

    Formula: `Chain([p, q])(w) = q(p(w))`. Each element draws from its own seed, so that two equal
    elements are independent.

    Args:
        parametrizations: List of parametrizations. The first is applied first.

    Example:
        >>> import tensorflow as tf
        >>> from tfwd.parametrizations import Chain, Dropout, GaussianNoise
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
                    "Chain expects parametrizations such as Dropout(0.5), got "
                    f"{p!r} of type {type(p).__name__}"
                )

    @property
    def stochastic(self) -> bool:  # type: ignore[override]
        """True if an element is stochastic."""
        return any(p.stochastic for p in self.parametrizations)

    @property
    def elementwise(self) -> bool:  # type: ignore[override]
        """True if all elements are elementwise."""
        return all(p.elementwise for p in self.parametrizations)

    def __call__(self, weight: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        return apply(weight, [BoundParametrization(p, seed) for p in self.parametrizations])

    def at(self, call: tf.Tensor) -> Chain:
        return copy_with(self, parametrizations=[p.at(call) for p in self.parametrizations])

    def check(self, where: str, shape: tuple[int, ...] | None = None) -> None:
        for p in self.parametrizations:
            p.check(where, shape)

    @property
    def is_identity(self) -> bool:
        return all(p.is_identity for p in self.parametrizations)

    def elements(self) -> list[Parametrization]:
        if type(self).__call__ is not Chain.__call__:  # a subclass that computes something else
            return [self]
        return [element for p in self.parametrizations for element in p.elements()]

    def get_config(self) -> dict[str, Any]:
        return {
            "parametrizations": [
                keras.saving.serialize_keras_object(p) for p in self.parametrizations
            ]
        }


class BoundParametrization(NamedTuple):
    """One parametrization of a weight's chain, with its inputs for one call.

    Attributes:
        parametrization: Parametrization to apply.
        seed: int32 `[2]`, or None if no element is stochastic.
        training: bool. Stochastic elements act.
        references: Reference tensors of the elements with a reference, in the elements' order.
    """

    parametrization: Parametrization
    seed: tf.Tensor | None
    training: bool = True
    references: Sequence[tf.Tensor] = ()


_Link = TypeVar("_Link")


def in_order(links: Sequence[tuple[int | None, _Link]]) -> list[_Link]:
    """Returns the links of a chain in the order in which they act.

    Args:
        links: Pairs of a number and a link, from the innermost layer to the outermost layer. The
            number of a parametrization in place counts the calls of `tfwd.parametrize`. A
            parametrization of a wrapper has None. It acts after all links inside the wrapper, and
            before all links around the wrapper.
    """
    ordered: list[tuple[int | None, _Link]] = []
    for is_wrapper, run in itertools.groupby(links, key=lambda pair: pair[0] is None):
        pairs = list(run)
        ordered += pairs if is_wrapper else sorted(pairs, key=lambda pair: pair[0] or 0)
    return [link for _, link in ordered]


def apply(
    weight: tf.Tensor,
    chain: Sequence[BoundParametrization],
    indices: tf.Tensor | None = None,
    whole: tf.Tensor | None = None,
) -> tf.Tensor:
    """Applies the links of a chain one after the other.

    The element at index `k > 0` of the whole chain draws from `fold_in(seed, 0, k)`. So elements
    with equal seeds are independent, and a chain with one element draws like the element itself.

    Args:
        weight: Floating tensor.
        chain: Links. The first is applied first.
        indices: Integers. Indices of rows, if `weight` has only these rows of the whole weight. All
            elements of the chain must then have `by_rows`. Default None, for all rows.
        whole: Whole raw weight, if `indices` is given. Default None.

    Returns:
        The effective weight, or its rows.

    Raises:
        ValueError: If an element changes the shape or the dtype.
    """
    raw = weight if whole is None else whole
    elements = [(*pair, link) for link in chain for pair in _with_references(link)]
    for index, (element, reference, link) in enumerate(elements):
        if element.is_identity or (element.stochastic and not link.training):
            continue
        if reference is not None:
            reference = reference if indices is None else tf.gather(reference, indices)
            element = element.towards_tensor(reference)
        element = element.of_weight(raw)
        seed = link.seed
        if index and element.stochastic:
            seed = seeds.fold_in(seed, 0, index)
        if indices is None:
            effective = element(weight, seed)
        else:
            effective = element.of_rows(weight, seed, indices, tuple(raw.shape))
        if not tf.is_tensor(effective):
            raise ValueError(
                f"{element!r} returned a {type(effective).__name__}; expected a tensor of the "
                "weight's shape and dtype"
            )
        if effective.dtype != weight.dtype or not effective.shape.is_compatible_with(weight.shape):
            raise ValueError(
                f"{element!r} returned {effective.dtype.name} {effective.shape} for a weight that "
                f"is {weight.dtype.name} {weight.shape}; it must keep shape and dtype of the weight"
            )
        weight = effective
    return weight


def per_example(
    chain: Sequence[BoundParametrization],
) -> tuple[list[BoundParametrization], tuple[Parametrization, tf.Tensor] | None]:
    """Separates the element of a chain that gives each example its own effective weight.

    Args:
        chain: Links. Such an element must be the last element that acts.

    Returns:
        A tuple of two: the chain without the element, for `apply`; and the element with its seed,
        or None if no such element acts.

    Raises:
        ValueError: If another element acts after it.
    """
    shared, found, index = [], None, 0
    for link in chain:
        elements = link.parametrization.elements()
        for element in elements:
            acts = not element.is_identity and (link.training or not element.stochastic)
            if acts and found is not None:
                raise ValueError(
                    f"{found[0]!r} must be the last parametrization of a weight; here {element!r} "
                    "comes after it"
                )
            if acts and element.per_example:
                seed = seeds.fold_in(link.seed, 0, index) if index else link.seed
                found = element, seed
            index += 1
        if any(element.per_example for element in elements):
            rest = Chain([element for element in elements if not element.per_example])
            link = link._replace(parametrization=rest)
        shared.append(link)
    return shared, found


def _with_references(
    link: BoundParametrization,
) -> Iterator[tuple[Parametrization, tf.Tensor | None]]:
    """Yields the elements of a link, each with its reference or None."""
    given = iter(link.references)
    for element in link.parametrization.elements():
        yield element, next(given, None) if element.has_reference else None
