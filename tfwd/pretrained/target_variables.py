"""Variables of a model, each with its path and the layer that owns it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import NORMALIZED_KERNELS


@dataclasses.dataclass(frozen=True)
class Target:
    """Variable of a model, with its path and the layer that owns it.

    Attributes:
        variable: The variable.
        owner: Layer that owns the variable, inside all wrappers.
        path: str. Names of the layers that contain the variable, and its own name, joined by "/".
            The model's name is not in the path.
    """

    variable: keras.Variable
    owner: keras.layers.Layer
    path: str

    @functools.cached_property
    def name(self) -> str:
        """Returns the variable's name in its layer."""
        return self.path.rpartition("/")[2]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """Returns the variable's shape."""
        return tuple(self.variable.shape)

    @functools.cached_property
    def dtype(self) -> str:
        """Returns the name of the variable's dtype."""
        return _keras.variables.dtype_name(self.variable)


def check_weights(model: keras.layers.Layer) -> None:
    """Checks that a model or layer has weights.

    Raises:
        ValueError: If the model has no weights, because it is not built, or because `build` of a
            subclassed model did not build its layers.
    """
    if not (model.built and _keras.variables.weights(model)):
        raise ValueError(
            f"'{model.name}' has no weights yet: call it on a batch before loading weights"
        )


def targets_of(model: keras.layers.Layer) -> list[Target]:
    """Returns the weights of a built model or layer, each once, with its first path.

    Raises:
        ValueError: As in `check_weights`.
    """
    check_weights(model)
    found: dict[int, Target] = {}
    weights = {id(variable) for variable in model.weights}
    for layer, prefix in paths_of(model):
        inside = layer.layer.weights if isinstance(layer, NORMALIZED_KERNELS) else ()
        of_inside = {id(variable) for variable in inside}
        for variable in _keras.layers.held_weights(layer):
            if id(variable) in weights - of_inside:
                path = prefix + _keras.variables.name(variable)
                found.setdefault(id(variable), Target(variable, layer, path))
    return list(found.values())


def paths_of(layer: keras.layers.Layer, prefix: str = "") -> Iterator[tuple[keras.Layer, str]]:
    """Yields a layer and all layers inside, each with the beginning of its variables' paths.

    A layer that is in several layers is yielded once for each.
    """
    yield layer, prefix
    for held in _keras.layers.sublayers(layer):
        yield from paths_of(held, _keras.path_below(prefix, layer, held))
