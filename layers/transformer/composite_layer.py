"""`Composite`: base class of layers that are made of plain Keras layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from tfwd import _keras

_FLAGS = "trainable_inside"  # key in configs


class Composite(keras.layers.Layer):
    """Base class of transformer layers. Their sublayers are built from shapes alone.

    A subclass stores each argument of its `__init__` as an attribute of the same name. The
    arguments are its config.

    Args:
        **kwargs: Arguments of every Keras layer, such as `name`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def inner(self, kind: type[keras.layers.Layer], *args: Any, **kwargs: Any) -> Any:
        """Creates a sublayer with this layer's dtype policy."""
        return kind(*args, dtype=self.dtype_policy, **kwargs)

    def dense(self, units: int, name: str, use_bias: bool = True) -> keras.layers.Dense:
        """Creates a `Dense` sublayer with this layer's `initializer`."""
        start = keras.initializers.get(_config_of(self.initializer))
        return self.inner(
            keras.layers.Dense, units, use_bias=use_bias, kernel_initializer=start, name=name
        )

    def norm(self, name: str) -> keras.layers.LayerNormalization:
        """Creates a `LayerNormalization` sublayer with this layer's `epsilon`."""
        return self.inner(keras.layers.LayerNormalization, epsilon=self.epsilon, name=name)

    def get_config(self) -> dict[str, Any]:
        own = {name: _config_of(getattr(self, name)) for name in self.arguments()}
        flags = _flags(self)
        return {**super().get_config(), **own, **({_FLAGS: flags} if flags else {})}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Creates a layer from its config, with the `trainable` flags of its sublayers."""
        return cls.with_flags(config, lambda own: cls(**own))

    @staticmethod
    def with_flags(config: Mapping[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
        """Creates a layer, and sets the `trainable` flags of its sublayers from a config.

        Args:
            config: Config of a layer.
            make: Function that creates the layer from the rest of the config.
        """
        own = dict(config)
        flags = own.pop(_FLAGS, {})
        layer = make(own)
        if not layer.trainable:  # its sublayers must be frozen too
            layer.trainable = True  # otherwise Keras 3 sees no change
            layer.trainable = False
        inside = dict(_inside(layer))
        for path, flag in flags.items():
            if path in inside:
                inside[path].trainable = flag
        return layer

    @classmethod
    def arguments(cls) -> list[str]:
        """Returns the names of this class's own arguments."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [p.name for p in parameters if p.name != "self" and p.kind != p.VAR_KEYWORD]


def _inside(layer: keras.layers.Layer, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the sublayers with their paths, each before its own sublayers."""
    for held in _keras.layers.sublayers(layer):
        there = f"{path}{held.name}"
        yield there, held
        yield from _inside(held, f"{there}/")


def _flags(layer: keras.layers.Layer, path: str = "") -> dict[str, bool]:
    """Returns the `trainable` flags that differ from the outer layer's flag, outer layers first.

    Setting a flag also sets the flags of all sublayers. So these flags describe all flags.
    """
    found: dict[str, bool] = {}
    for held in _keras.layers.sublayers(layer):
        there = f"{path}{held.name}"
        if held.trainable != layer.trainable:
            found[there] = held.trainable
        found |= _flags(held, f"{there}/")
    return found


def built(layer: keras.layers.Layer, *shape: int | None) -> None:
    """Builds a sublayer. Call it in `build` of the outer layer."""
    _keras.layer_building.build(layer, shape)


def initializer(value: Any) -> keras.initializers.Initializer:
    """Returns an initializer. A float is the stddev of a truncated normal distribution.

    An initializer is copied, because an initializer of Keras 2 without a seed returns the same
    numbers each time.
    """
    if isinstance(value, float):
        return keras.initializers.TruncatedNormal(stddev=value)
    if isinstance(value, keras.initializers.Initializer):
        return type(value).from_config(value.get_config())
    return keras.initializers.get(value)


def _config_of(value: Any) -> Any:
    is_initializer = isinstance(value, keras.initializers.Initializer)
    return keras.initializers.serialize(value) if is_initializer else value
