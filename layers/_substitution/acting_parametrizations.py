"""Lists the parametrizations that act on a weight: of wrappers and in place, in their order."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution import method_hooks
from tfwd.layers._substitution.weight_selection import Target
from tfwd.parametrizations import Parametrization, chain
from tfwd.parametrizations.chain import BoundParametrization


def acting(
    layer: keras.Layer, variable: keras.Variable, ahead: int | tf.Tensor
) -> list[tuple[Any, BoundParametrization]]:
    """Returns the parametrizations of a layer and of the layers inside it that act on a weight.

    Args:
        layer: Layer.
        variable: Weight of the layer.
        ahead: int. Number of training calls from now.

    Returns:
        Pairs of a wrapper or an `InPlace`, and its parametrization. The first acts first.
    """
    found = _from_inside(layer, variable, ahead, frozenset())
    distinct = {id(owner): (owner, bound) for owner, bound in found}.values()
    return chain.in_order([(owner.addition_number, (owner, bound)) for owner, bound in distinct])


def _from_inside(
    layer: Any, variable: keras.Variable, ahead: int | tf.Tensor, outside: frozenset
) -> list[tuple[Any, BoundParametrization]]:
    """Returns the pairs of `acting`, from the innermost layer to the outermost layer.

    Args:
        layer: Layer.
        variable: Weight of the layer.
        ahead: int. Number of training calls from now.
        outside: `InPlace` objects that a layer around this layer has already applied.
    """
    hook = method_hooks.hook_of(layer)
    links = [] if hook is None else hook.links
    links = [x for x in links if id(variable) in x.substituted and x.in_place not in outside]
    outside = outside | {link.in_place for link in links}
    found = [
        pair
        for inner in _keras.layers.sublayers(layer)
        for pair in _from_inside(inner, variable, ahead, outside)
    ]
    owners = [layer] if hasattr(layer, "_parametrization_of") else []
    owners += [link.in_place for link in links]
    return found + [
        (owner, _bound(owner, target, parametrization, ahead))
        for owner in owners
        for target, parametrization in owner._parametrization_of(variable)
        if not parametrization.is_identity
    ]


def _bound(
    owner: Any, target: Target, parametrization: Parametrization, ahead: int | tf.Tensor
) -> BoundParametrization:
    """Returns a parametrization of a wrapper or an `InPlace` in the call `ahead` calls from now."""
    number = tf.cast(ahead + owner.calls, tf.int64)
    seed = owner.draws.seed_at(number, target.position)
    held = owner.references
    values = () if held is None else held.current_values(target, parametrization)
    return BoundParametrization(parametrization.at(number), seed, True, values)
