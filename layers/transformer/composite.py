"""`Composite`: a layer made of plain Keras layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfwd import _keras

_FLAGS = "trainable_inside"  # its key in configs


class Composite(keras.layers.Layer):
    """Base of the layers here: what it holds is built by shapes alone, its config is its arguments.

    A subclass keeps each argument of its `__init__` as an attribute of the same name.

    Args:
        **kwargs: as for any layer.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def inner(self, kind: type[keras.layers.Layer], *args: Any, **kwargs: Any) -> Any:
        """A layer to hold, of this layer's dtype policy."""
        return kind(*args, dtype=self.dtype_policy, **kwargs)

    def dense(self, units: int, name: str, use_bias: bool = True) -> keras.layers.Dense:
        """A `Dense` to hold, which starts as this layer's `initializer` says."""
        start = keras.initializers.get(_config_of(self.initializer))
        return self.inner(
            keras.layers.Dense, units, use_bias=use_bias, kernel_initializer=start, name=name
        )

    def norm(self, name: str) -> keras.layers.LayerNormalization:
        """A `LayerNormalization` to hold, with this layer's `epsilon`."""
        return self.inner(keras.layers.LayerNormalization, epsilon=self.epsilon, name=name)

    def get_config(self) -> dict[str, Any]:
        own = {name: _config_of(getattr(self, name)) for name in self.arguments()}
        flags = _flags(self)
        return {**super().get_config(), **own, **({_FLAGS: flags} if flags else {})}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Makes a layer from its config, with the `trainable` flags of the layers that it holds."""
        return cls.with_flags(config, lambda own: cls(**own))

    @staticmethod
    def with_flags(config: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
        """Makes a layer, and gives the layers that it holds the `trainable` flags of a config.

        Args:
            config: a layer's config.
            make: makes the layer from the rest of the config.
        """
        own = dict(config)
        flags = own.pop(_FLAGS, {})
        layer = make(own)
        if not layer.trainable:  # then the layers that it holds are frozen too
            layer.trainable = True  # else Keras 3 sees nothing to set
            layer.trainable = False
        inside = dict(_inside(layer))
        for path, flag in flags.items():
            if path in inside:
                inside[path].trainable = flag
        return layer

    @classmethod
    def arguments(cls) -> list[str]:
        """The names of the arguments that are this class's own."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [p.name for p in parameters if p.name != "self" and p.kind != p.VAR_KEYWORD]


def _inside(layer: keras.layers.Layer, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the layers that a layer holds with their paths, each before those that it holds."""
    for held in _keras.layers.sublayers(layer):
        there = f"{path}{held.name}"
        yield there, held
        yield from _inside(held, f"{there}/")


def _flags(layer: keras.layers.Layer, path: str = "") -> dict[str, bool]:
    """Returns the `trainable` flags that differ from those of the layer around, outer ones first.

    To set a flag sets those of all layers inside; so these tell all of them.
    """
    found: dict[str, bool] = {}
    for held in _keras.layers.sublayers(layer):
        there = f"{path}{held.name}"
        if held.trainable != layer.trainable:
            found[there] = held.trainable
        found |= _flags(held, f"{there}/")
    return found


def built(layer: keras.layers.Layer, *shape: int | None) -> None:
    """Builds a layer that another one holds, in whose `build` this is called."""
    _keras.layers.build(layer, shape)


def initializer(value: Any) -> keras.initializers.Initializer:
    """The initializer that is meant; a number is the deviation of normal values, cut at two."""
    if isinstance(value, float):
        return keras.initializers.TruncatedNormal(stddev=value)
    return keras.initializers.get(value)


def _config_of(value: Any) -> Any:
    is_initializer = isinstance(value, keras.initializers.Initializer)
    return keras.initializers.serialize(value) if is_initializer else value
