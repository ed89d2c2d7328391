"""`Composite`: a layer made of plain Keras layers."""

from __future__ import annotations

import inspect
from typing import Any

import keras

from tfwd import _keras


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
        return {**super().get_config(), **own}

    @classmethod
    def arguments(cls) -> list[str]:
        """The names of the arguments that are this class's own."""
        parameters = inspect.signature(cls.__init__).parameters.values()
        return [p.name for p in parameters if p.name != "self" and p.kind != p.VAR_KEYWORD]


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
