"""Building of layers on Keras 2.15: by a shape, by a config or by a call."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import functional
from keras.src.utils import generic_utils

from tfwd._keras2.layers import GRAPHS, sublayers
from tfwd._keras_shared.keras_own_code import is_of_keras


def _as_built(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a build config in which the shape is a tuple again, as before it was saved."""
    shape = config.get("input_shape")
    if isinstance(shape, list) and not any(isinstance(size, (list, tuple)) for size in shape):
        return {**config, "input_shape": tuple(shape)}
    return config


def build_by_call(layer: Any, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build. The result of the call is discarded."""
    with tf.__internal__.FuncGraph("tfwd_build").as_default():
        layer(*args, **kwargs)


def has_default_build(layer: Any) -> bool:
    """Returns True if the layer does not define `build`, so only a call creates its weights."""
    return generic_utils.is_default(layer.build) and not isinstance(layer, GRAPHS)


def builds_by_shape(layer: Any) -> bool:
    """Returns True if the layer can create its weights from the shape of its inputs alone.

    A model that does not define `build` calls itself on a placeholder of that shape.
    """
    return not has_default_build(layer) or isinstance(layer, keras.Model)


def called_shape(layer: Any) -> Any:
    """Returns the shape of the inputs with which a layer was first called, or None."""
    return (layer.get_build_config() or {}).get("input_shape")


def call_signature(layer: Any) -> tuple[tuple, dict[str, Any]] | None:
    """Returns the arguments of a layer's first call, as specifications, or None."""
    spec = layer._get_save_spec(inputs_only=False)
    if spec is not None:
        args, kwargs = spec
        return tuple(args), kwargs
    shape = called_shape(layer)
    is_single = isinstance(shape, (tuple, tf.TensorShape)) and not any(
        isinstance(size, (tuple, tf.TensorShape)) for size in shape
    )
    return ((tf.TensorSpec(shape),), {}) if is_single else None


def build(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Builds a layer with its own `build`, in the layer's name scope, as a call would."""
    with tf.name_scope(layer.name):
        layer.build(*args, **kwargs)
    keras.layers.Layer.build(layer, *args[:1], **kwargs)  # stores the shape, for files


def build_from_config(layer: Any, config: dict[str, Any]) -> None:
    """Builds a layer from a build config, for example from a file."""
    layer.build_from_config(_as_built(config))
    optimizer = getattr(layer, "optimizer", None)
    if layer.built and isinstance(optimizer, keras.optimizers.Optimizer):
        # Keras creates the optimizer's state when it loads a built model, but not for this model.
        optimizer.build(layer.trainable_variables)


def build_config(layer: Any) -> dict[str, Any] | None:
    """Returns a config from which a layer of the same class can be built, or None.

    A layer does not know its input shape if a user called its `build`. Its input specification then
    has the sizes that matter.
    """
    config = layer.get_build_config()
    spec = layer.input_spec
    if config is None and isinstance(spec, keras.layers.InputSpec) and spec.axes:
        rank = spec.ndim or max(spec.min_ndim or 0, 1 + max(spec.axes))
        shape: list[int | None] = [None] * rank
        for axis, size in spec.axes.items():
            shape[axis] = size
        config = {"input_shape": tuple(shape)}
    return config


def has_weights(layer: Any) -> bool:
    """Returns True if the layer is built and has all weights that it will have.

    A layer that does not define `build` is marked as built before its call creates its inner
    layers. A layer that defines `build` may let its call build inner layers. An inner layer that a
    call did not build is not used and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or layer._saved_model_inputs_spec is not None)


def awaits_call(layer: Any) -> bool:
    """Returns True if an inner layer is not built yet, and may get weights in its build."""
    return any(
        not (inner.built or _never_has_weights(inner)) or awaits_call(inner)
        for inner in _called_layers(layer)
    )


def _called_layers(layer: Any) -> list[Any]:
    """Returns the direct sublayers that a layer may call.

    A functional model calls only the layers of its graph. It may hold other layers, for example a
    preprocessor.
    """
    is_graph = isinstance(layer, functional.Functional) and not isinstance(layer, keras.Sequential)
    if not (is_graph and is_of_keras(type(layer), "call")):
        return sublayers(layer)
    called = [node.layer for nodes in layer._nodes_by_depth.values() for node in nodes]
    return list({id(inner): inner for inner in called}.values())


def _never_has_weights(layer: Any) -> bool:
    """Returns True for a layer of Keras that has no weights to build, such as `ReLU`."""
    made_by_call = isinstance(layer, keras.layers.MultiHeadAttention)
    return is_of_keras(type(layer)) and not made_by_call and generic_utils.is_default(layer.build)
