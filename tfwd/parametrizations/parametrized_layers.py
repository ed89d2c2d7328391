"""Finds the layers of a model that compute with functions of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from tfwd import _keras
from tfwd.parametrizations.base import Parametrization

# Attribute of a layer that holds the parametrizations that were added to the layer in place.
IN_PLACE = "_tfwd_in_place"


def added_in_place(layer: keras.Layer) -> list[Any]:
    """Returns the parametrizations that were added to a layer in place, in their order."""
    held = vars(layer).get(IN_PLACE)
    return [] if held is None else list(held.all)


class ParametrizedWeight(NamedTuple):
    """A weight that a layer parametrizes.

    Attributes:
        pattern: Pattern that selected the weight, or None for a default weight.
        target: The weight, with its name and its position in the layer.
        parametrization: Parametrization of the weight.
    """

    pattern: str | None
    target: Any  # a Target of tfwd.layers, which imports this package
    parametrization: Parametrization


class ParametrizedLayer(NamedTuple):
    """A layer with parametrized weights.

    Attributes:
        name: Path of the layer in the model, without the model's name: the names of the outer
            layers and the layer's own name, joined by `/`.
        weights: Parametrized weights.
        draws: The layer's training-call counter and seeds, a `SeedStream` of `tfwd.layers`.
    """

    name: str
    weights: list[ParametrizedWeight]
    draws: Any


def _by_layer(
    target: keras.Layer, weights: list[ParametrizedWeight]
) -> list[tuple[str, list[ParametrizedWeight]]]:
    """Groups weights by the layer that has them.

    Args:
        target: Layer whose weights are parametrized in place.
        weights: Parametrized weights.

    Returns:
        Names of the layers between the target and the weight, joined by `/`, each with its weights.
    """
    found: dict[str, list[ParametrizedWeight]] = {}
    for weight in weights:
        place = weight.target.path.rpartition("/")[0]
        inside = place.removeprefix(target.name).removeprefix("/")
        found.setdefault(inside, []).append(weight)
    return list(found.items())


def parametrized_layers(model: keras.Layer) -> Iterator[ParametrizedLayer]:
    """Yields the layers of a model that parametrize weights, each once, outer layers first.

    Args:
        model: Model or layer. It may be such a layer itself.

    Raises:
        ValueError: If such a layer has no weights yet.
    """
    seen: set[int] = set()

    def walk(layer: Any, name: str) -> Iterator[ParametrizedLayer]:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        if hasattr(layer, "_parametrized_weights"):
            yield ParametrizedLayer(name or layer.name, layer._parametrized_weights(), layer.draws)
        for added in added_in_place(layer):
            for place, weights in _by_layer(layer, added._parametrized_weights()):
                path = "/".join(part for part in (name, place) if part)
                yield ParametrizedLayer(path or layer.name, weights, added.draws)
        for inner in _keras.layers.sublayers(layer):
            yield from walk(inner, f"{name}/{inner.name}" if name else inner.name)

    yield from walk(model, "")
