"""Installs a parametrization on a single layer or weight, removes it, and finds it."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd.layers._substitution import acting_parametrizations, method_hooks, weight_patterns
from tfwd.layers._substitution.in_place.layer_call import (
    distinct_layers,
    links_of,
    links_that_share,
)
from tfwd.layers._substitution.in_place.parametrization_in_place import InPlace
from tfwd.parametrizations import chain
from tfwd.parametrizations.parametrized_layers import IN_PLACE, added_in_place


def add(owner: InPlace) -> None:
    """Adds a parametrization to its target. Restores the target if this fails."""
    owner.links = links_of(owner)
    held = vars(owner.target).get(IN_PLACE)
    if held is None:
        held = _Held()
        # Keras would track the attribute otherwise.
        object.__setattr__(owner.target, IN_PLACE, held)
    held.all.append(owner)
    try:
        for link in owner.links:
            method_hooks.add(
                link.layer, link, weight_patterns.QUANTIZED if link.is_effective else ""
            )
            for other, larger in links_that_share(link):
                method_hooks.replace(link.layer, other, larger)
                held_by = other.in_place
                held_by.links = [larger if x is other else x for x in held_by.links]
        _track(owner.target, held)
    except BaseException:  # such as Ctrl-C
        remove(owner)
        raise


def remove(owner: InPlace) -> None:
    """Removes a parametrization from its target."""
    for link in owner.links:
        method_hooks.remove(link.layer, link)
    held = vars(owner.target)[IN_PLACE]
    held.all.remove(owner)
    _track(owner.target, held)
    if not held.all:
        object.__delattr__(owner.target, IN_PLACE)


def inside(layer: keras.Layer) -> list[InPlace]:
    """Returns the parametrizations whose target is a layer, or a layer inside it."""
    return [one for inner in distinct_layers(layer) for one in added_in_place(inner)]


def evaluation_weights(layer: keras.Layer) -> list[tuple[keras.Variable, tf.Tensor]]:
    """Returns the weights that evaluation parametrizes in place, with their effective values.

    Raises:
        ValueError: If a wrapper of the same weight also acts in evaluation.
    """
    found = []
    targeted = {id(t.variable): t for one in inside(layer) for t, _ in one.targeted}
    variables = [target.variable for target in targeted.values()]
    all_acting = acting_parametrizations.acting(layer, variables, 0)
    for key, target in targeted.items():
        acting = [
            (owner, bound._replace(training=False))
            for owner, bound in all_acting[key]
            if not all(element.stochastic for element in bound.parametrization.elements())
        ]
        wrappers = [owner for owner, _ in acting if not isinstance(owner, InPlace)]
        if len(wrappers) == len(acting):
            continue
        if wrappers:
            raise ValueError(
                f"weight '{target.name}' of layer '{layer.name}' cannot be folded, because wrapper "
                f"'{wrappers[0].name}' also acts in evaluation: use one parametrization with "
                "Chain([p, q])"
            )
        raw = _keras.variables.value(target.variable)
        found.append((target.variable, chain.apply(raw, [bound for _, bound in acting])))
    return found


class _Held:
    """The parametrizations of one target, in the order in which they are applied."""

    def __init__(self) -> None:
        self.all: list[InPlace] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Held:
        return _Held()

    def __reduce__(self) -> Any:
        return _Held, ()


class _States(tf.Module):
    """The states of a target's parametrizations, for TensorFlow's checkpoints."""

    def __init__(self, held: _Held) -> None:
        super().__init__()
        self.draws = [one.draws for one in held.all]
        self.references = [one.references for one in held.all if one.references is not None]


def _track(target: keras.Layer, held: _Held) -> None:
    _keras.untrack(target, IN_PLACE)
    if held.all:
        _keras.track(target, IN_PLACE, _States(held))
