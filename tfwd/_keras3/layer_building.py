"""Building of layers on Keras 3: by a shape, by a config or by a call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state

from tfwd._keras3.layers import sublayers
from tfwd._keras_shared.keras_own_code import is_of_keras

_SCOPE = "stateless_scope"


@contextlib.contextmanager
def building_outside(layer: keras.Layer) -> Iterator[None]:
    """Makes layers inside `layer` build outside inner scopes, if they are built in the body.

    `compute_output_spec` calls a layer in a scratch graph and in a `StatelessScope`. In this scope,
    Keras does not create a variable from a value. Stateful recurrent layers need such variables for
    their states. A build needs only shapes, so it needs neither the graph nor the scope.
    """
    around = _global_state.get_global_attribute(_SCOPE)
    builds = {}
    for inner in layer._flatten_layers():
        build = vars(inner).get("build")  # Keras wraps it on the instance
        is_default = keras.src.utils.python_utils.is_default
        if build is not None and not inner.built and not is_default(build):
            builds[inner] = build, _outside(build, around)
    for inner, (_, outside) in builds.items():
        # `object.__setattr__` avoids Keras's tracking of attributes.
        object.__setattr__(inner, "build", outside)
    try:
        yield
    finally:
        for inner, (build, outside) in builds.items():
            if vars(inner).get("build") is outside:
                object.__setattr__(inner, "build", build)


def _outside(build: Callable[..., None], around: Any) -> Callable[..., None]:
    @functools.wraps(build)
    def outside(*args: Any, **kwargs: Any) -> None:
        within = _global_state.get_global_attribute(_SCOPE)
        _global_state.set_global_attribute(_SCOPE, around)
        try:
            # In a scope that already existed, variables are created at the end of that scope.
            with tf.init_scope() if around is None else contextlib.nullcontext():
                build(*args, **kwargs)
        finally:
            _global_state.set_global_attribute(_SCOPE, within)

    return outside


def build_by_call(layer: keras.Layer, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build. The result of the call is discarded."""
    with building_outside(layer):
        keras.src.backend.compute_output_spec(layer.__call__, *args, **kwargs)


def has_default_build(layer: keras.Layer) -> bool:
    """Returns True if the layer does not define `build`, so only a call creates its weights."""
    return keras.src.utils.python_utils.is_default(layer.build) and bool(layer._layers)


def builds_by_shape(layer: keras.Layer) -> bool:
    """Returns True if the layer can create its weights from the shape of its inputs alone."""
    return not has_default_build(layer)


def called_shape(layer: keras.Layer) -> Any:
    """Returns the shape of the inputs with which a layer was first called, or None."""
    return (layer.get_build_config() or {}).get("input_shape")


def call_signature(layer: keras.Layer) -> tuple[tuple, dict[str, Any]] | None:
    """Returns the arguments of a layer's first call, as specifications, or None.

    Keras 3 does not store dtypes. All specifications have float32.
    """
    config = layer.get_build_config() or {}
    if config.get("input_shape") is not None:
        return (_specs(config["input_shape"]),), {}
    shapes = config.get("shapes_dict") or {}
    # Each name is the name of an argument, followed by an ending.
    named = {name.rpartition("_")[0]: shape for name, shape in shapes.items() if shape}
    return ((), {name: _specs(shape) for name, shape in named.items()}) if named else None


def _specs(shape: Any) -> Any:
    """Returns a specification for each shape in a structure. None stays None."""
    if shape is None:
        return None
    if isinstance(shape, dict):
        return {name: _specs(each) for name, each in shape.items()}
    if shape and all(size is None or isinstance(size, int) for size in shape):
        return tf.TensorSpec(shape)
    return [_specs(each) for each in shape]


def build(layer: keras.Layer, *args: Any, **kwargs: Any) -> None:
    """Builds a layer with its own `build`."""
    layer.build(*args, **kwargs)
    layer.built = True


def build_from_config(layer: keras.Layer, config: dict[str, Any]) -> None:
    """Builds a layer from a build config, for example from a file."""
    layer.build_from_config(config)


def build_config(layer: keras.Layer) -> dict[str, Any] | None:
    """Returns a config from which a layer of the same class can be built, or None."""
    return layer.get_build_config()


def has_weights(layer: keras.Layer) -> bool:
    """Returns True if the layer is built and has all weights that it will have.

    A layer that does not define `build` is marked as built when it is loaded, although its inner
    layers are not built. A layer that defines `build` may let its call build inner layers. An inner
    layer that a call did not build is not used and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or getattr(layer, "_called", False))


def awaits_call(layer: keras.Layer) -> bool:
    """Returns True if an inner layer is not built yet, and may get weights in its build."""
    is_default = keras.src.utils.python_utils.is_default
    return any(
        not (inner.built or is_default(inner.build)) or awaits_call(inner)
        for inner in _called_layers(layer)
    )


def _called_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers that a layer may call.

    A functional model calls only the layers of its graph. It may hold other layers, for example the
    preprocessor of a keras-hub model.
    """
    functional = isinstance(layer, keras.src.models.Functional)
    return layer.layers if functional and is_of_keras(type(layer), "call") else sublayers(layer)
