"""Layers of published models in a model: their rules for files, and checks of their arguments."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.path_patterns import path_ends
from tfwd.pretrained.key_rules import FamilyRules
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.sources.base import Source
from tfwd.pretrained.target_variables import Target, paths_of


def published_layers(model: keras.layers.Layer) -> list[tuple[Any, str]]:
    """Returns the outermost layers of published models, each with the beginning of its paths."""
    found: list[tuple[Any, str]] = []
    inside: set[int] = set()
    for layer, prefix in paths_of(model):
        if id(layer) not in inside and hasattr(layer, "family_rules"):
            found.append((layer, prefix))
            inside.update(map(id, _keras.layers.all_layers(layer)))
    return found


def rules_of_layers(
    layers: Sequence[tuple[Any, str]], targets: list[Target], source: Source
) -> FamilyRules | None:
    """Returns the rules of the layers in a model, or None if the file's keys are paths.

    The rules have no errors of the layers, because `argument_problems` returns them.

    Args:
        layers: Layers, from `published_layers`.
        targets: Variables of the model.
        source: The open file.
    """
    if not layers:
        return None
    # `tfwd-pretrained convert` writes files whose keys are paths.
    paths = {target.path for target in targets if "/" in target.path}
    if not paths.isdisjoint(end for key in source.entries for end in path_ends(key)):
        return None
    parts = [
        layer.family_rules(prefix) or _without_config(layer, prefix) for layer, prefix in layers
    ]
    return dataclasses.replace(FamilyRules.of_all(parts), problems=())


def notes_on_mapping(layers: Sequence[tuple[Any, str]], missing: Collection[str]) -> Iterator[str]:
    """Yields how a mapping for other layers keeps the keys of the layers in a model.

    Args:
        layers: Layers, from `published_layers`.
        missing: Paths of the variables without a key.
    """
    for layer, prefix in layers:
        if layer.family_rules(prefix) and any(path.startswith(prefix) for path in missing):
            yield (
                f"with a mapping, layer '{layer.name}' has no keys of its own: to keep them, give "
                f"family_rules=layer.family_rules({prefix!r}) too"
            )


def argument_problems(
    layers: Sequence[tuple[Any, str]], steps: Sequence[Step], source: Source, workers: Any
) -> list[str]:
    """Returns the errors of arguments that shapes do not show, such as `num_heads`.

    The arguments must equal the values of the published config beside the file. Without such a
    config, they must equal the values of the config that made the layer.

    Args:
        layers: Layers, from `published_layers`.
        steps: Variables that get values from the file. Other layers are not checked.
        source: The open file.
        workers: The lockstep of the workers.
    """
    owners = {id(step.target.owner) for step in steps}
    loaded = [
        layer
        for layer, _ in layers
        if not owners.isdisjoint(map(id, _keras.layers.all_layers(layer)))
    ]
    if not loaded:
        return []
    path = os.path.join(os.path.dirname(source.path), "config.json")
    config, error = workers.json_from_chief(lambda: _config_at(path))
    if error:
        return [error]
    problems = [each for layer in loaded for each in layer.argument_problems(path, config)]
    if problems and len(loaded) > 1:
        problems.append(
            "the file is for several layers: if a layer has another file, call load for each "
            "layer, not for the model"
        )
    return problems


def _config_at(path: str) -> tuple[Mapping[str, Any] | None, str | None]:
    """Returns the published config at a path, and the error if it cannot be read.

    Without a published config, both are None.
    """
    if not os.path.isfile(path):
        return None, None
    try:
        with open(path, encoding="utf-8") as opened:
            values = json.load(opened)
    except (OSError, ValueError, RecursionError) as error:
        return None, (
            f"{path} cannot be read: {error}: correct the file, or remove it if it is not the "
            "config of these weights"
        )
    return (values, None) if isinstance(values, dict) and "model_type" in values else (None, None)


def _without_config(layer: keras.layers.Layer, prefix: str) -> FamilyRules:
    """Returns rules without keys for a layer that was not made from a published config."""
    return FamilyRules(
        {},
        notes=(
            f"layer '{layer.name}' does not know the keys of a published model, because it was "
            "made from its arguments or is a copy: give family_rules="
            f"{type(layer).__name__}.from_config(folder).family_rules({prefix!r}). If the layer "
            "has only some published layers, or another order, give from_config the same layers=",
        ),
    )
