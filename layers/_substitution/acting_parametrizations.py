"""Lists the parametrizations that act on a weight: of wrappers and in place, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution import method_hooks
from tfwd.layers._substitution.weight_selection import Target
from tfwd.parametrizations import Parametrization, chain
from tfwd.parametrizations.chain import BoundParametrization


class _Owned(NamedTuple):
    """A weight's parametrization with its owner, a wrapper or an `InPlace`."""

    owner: Any
    target: Target
    parametrization: Parametrization


# Pairs of a wrapper or an `InPlace`, and its parametrization in one call.
Acting = list[tuple[Any, BoundParametrization]]


def acting(
    layer: keras.Layer,
    variables: Iterable[keras.Variable],
    ahead: int | tf.Tensor,
    within: Any = None,
) -> dict[int, Acting]:
    """Returns the parametrizations of a layer and of the layers inside it that act on weights.

    One walk over the layers finds the parametrizations of all weights.

    Args:
        layer: Layer.
        variables: Weights of the layer.
        ahead: int. Number of training calls from now.
        within: `InPlace` that targets the layer and parametrizes all of the weights. The walk then
            skips layers without these weights. Default None.

    Returns:
        dict from a variable's id to pairs. The first acts first.
    """
    keys = frozenset(map(id, variables))
    found: dict[tuple[int, int], _Owned] = {}
    _collect(layer, keys, within, set(), found)
    bound = _bound(found.values(), ahead)
    chains: dict[int, list[tuple[int | None, _Owned]]] = {key: [] for key in keys}
    for one in found.values():
        chains[id(one.target.variable)].append((one.owner.addition_number, one))
    return {
        key: [(one.owner, bound[id(one)]) for one in chain.in_order(links)]
        for key, links in chains.items()
    }


def _collect(
    layer: Any,
    keys: frozenset[int],
    within: Any,
    applied: set[tuple[int, Any]],
    found: dict[tuple[int, int], _Owned],
) -> None:
    """Adds the parametrizations of weights, from the innermost layer to the outermost layer.

    Args:
        layer: Layer.
        keys: Ids of the weights to look for.
        within: As in `acting`.
        applied: Pairs of a weight's id and an `InPlace` that a layer around this layer has applied.
        found: Parametrizations by the weight's id and the owner's id. New ones are added.
    """
    new = [(key, link.in_place) for link in _links(layer) for key in link.substituted & keys]
    new = [pair for pair in new if pair not in applied]
    applied.update(new)
    for inner in _keras.layers.sublayers(layer):
        there = keys if within is None else _weights_inside(inner, within) & keys
        if there:
            _collect(inner, there, within, applied, found)
    applied.difference_update(new)
    own = layer._present_targets() if hasattr(layer, "_present_targets") else []
    owned = [_Owned(layer, *pair) for pair in own if id(pair[0].variable) in keys]
    owned += [_Owned(in_place, *in_place.by_id[key]) for key, in_place in new]
    for one in owned:
        if not one.parametrization.is_identity:
            found.setdefault((id(one.target.variable), id(one.owner)), one)


def _links(layer: Any) -> list[Any]:
    hook = method_hooks.hook_of(layer)
    return [] if hook is None else hook.links


def _weights_inside(layer: Any, in_place: Any) -> frozenset[int]:
    """Returns the ids of an `InPlace`'s weights that a layer has or contains."""
    found = (frozenset(link.inside) for link in _links(layer) if link.in_place is in_place)
    return next(found, frozenset())


def _bound(owned: Iterable[_Owned], ahead: int | tf.Tensor) -> dict[int, BoundParametrization]:
    """Returns parametrizations `ahead` calls from now, by the ids of their `_Owned`.

    One draw gives all seeds of an owner.
    """
    by_owner: dict[int, list[_Owned]] = {}
    for one in owned:
        by_owner.setdefault(id(one.owner), []).append(one)
    found = {}
    for group in by_owner.values():
        owner = group[0].owner
        number = tf.cast(ahead + owner.calls, tf.int64)
        seeds = owner.draws.seeds_of_call(number, [one.target.position for one in group])
        for one, seed in zip(group, seeds, strict=True):
            held = owner.references
            values = () if held is None else held.current_values(one.target, one.parametrization)
            found[id(one)] = BoundParametrization(
                one.parametrization.at(number), seed, True, values
            )
    return found
