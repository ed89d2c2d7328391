"""The variables of a model that are to be loaded, each with the layer that owns it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import keras

from tfwd import _keras


@dataclasses.dataclass(frozen=True)
class Target:
    """A variable of a model.

    Attributes:
        variable: the variable.
        owner: the layer whose own it is, below all wrappers.
        path: the names of the layers that hold it, from the model's parts on, and its own name.
    """

    variable: keras.Variable
    owner: keras.layers.Layer
    path: str

    @property
    def name(self) -> str:
        """Its own name in its layer."""
        return self.path.rpartition("/")[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.variable.shape)

    @property
    def dtype(self) -> str:
        """The name of the dtype in which it is held."""
        return _keras.variables.dtype_name(self.variable)


def targets_of(model: keras.layers.Layer) -> list[Target]:
    """The weights of a built model or layer, each once, by the first way there.

    Raises:
        ValueError: it is not built, and has no weights yet.
    """
    if not model.built:
        raise ValueError(
            f"'{model.name}' has no weights yet: build it, or call it on a batch, before weights "
            "are loaded"
        )
    found: dict[int, Target] = {}
    weights = {id(variable) for variable in model.weights}
    for layer, prefix in paths_of(model):
        for variable in _keras.layers.held_weights(layer):
            if id(variable) in weights:
                path = prefix + _keras.variables.name(variable)
                found.setdefault(id(variable), Target(variable, layer, path))
    return list(found.values())


def paths_of(layer: keras.layers.Layer, prefix: str = "") -> Iterator[tuple[keras.Layer, str]]:
    """Yields a layer and all in it, each way there, with what paths of its variables begin with."""
    yield layer, prefix
    for held in _keras.layers.sublayers(layer):
        # A wrapper that stands in a layer's place has its name.
        yield from paths_of(held, prefix if held.name == layer.name else f"{prefix}{held.name}/")
