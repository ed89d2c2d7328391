"""Layers of Keras 3: their build, call state, masks and sublayers.

Keras has no public way to read the flags of the present call, or to keep them while a layer runs a
second time. The ways used here are private, or almost private, and change between releases.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state as _global_state

from tfwd._keras3.building import building_outside

_CALL_CONTEXT = "current_call_ctx"

KerasTensor = keras.KerasTensor
Datasets = keras.utils.PyDataset


class NoAutographLayer:
    """Base class of layers that call other layers inside functions of TensorFlow."""


class CallState:
    """The flags of the present Keras call: training, other context arguments, autocast.

    A layer that runs again in backward must see the flags of its forward run. That call has already
    ended. And flags that a layer sets while it runs must not affect later layers.
    """

    def __init__(self) -> None:
        context = _global_state.get_global_attribute(_CALL_CONTEXT)
        self._values = {} if context is None else dict(vars(context))
        self._autocast = keras.src.backend.get_autocast_scope()

    @contextlib.contextmanager
    def restored(self, training: bool) -> Iterator[None]:
        """Runs the body as a part of that call, with the given training flag."""
        before = _global_state.get_global_attribute(_CALL_CONTEXT)
        # There is no entry layer, because an entry layer clears the losses of its sublayers.
        context = keras.src.layers.layer.CallContext(entry_layer=None)
        for name, flag in {**self._values, "entry_layer": None, "training": training}.items():
            setattr(context, name, flag)
        _global_state.set_global_attribute(_CALL_CONTEXT, context)
        autocast = contextlib.nullcontext()
        if self._autocast is not None:
            autocast = keras.src.backend.AutocastScope(self._autocast.dtype)
        try:
            with autocast:
                yield
        finally:
            _global_state.set_global_attribute(_CALL_CONTEXT, before)


def get_mask(tensor: Any) -> Any:
    """Returns the mask that Keras stores with a tensor, or None."""
    return keras.src.backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, for later Keras layers. None removes the mask."""
    keras.src.backend.set_keras_mask(tensor, mask)


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


def accepts_training(layer: keras.Layer) -> bool:
    """Returns True if the layer's `call` has a `training` argument."""
    return layer._call_has_training_arg


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers of a layer, in Keras's order."""
    return list(layer._layers)


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layer and all layers in it at any depth."""
    return layer._flatten_layers()


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
    layers are not. A layer that defines `build` may let its call build inner layers. An inner layer
    that a call did not build is not used and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or getattr(layer, "_called", False))


def awaits_call(layer: keras.Layer) -> bool:
    """Returns True if inner layers are not built yet, and may get weights when they are."""
    is_default = keras.src.utils.python_utils.is_default
    return any(
        not (inner.built or is_default(inner.build)) or awaits_call(inner)
        for inner in sublayers(layer)
    )


def embedding_matrix(layer: keras.layers.Embedding) -> keras.Variable:
    """Returns the variable of an Embedding layer, even if a property changes its value."""
    return layer._embeddings


def is_quantized(layer: keras.Layer) -> bool:
    """Returns True if the layer computes with weights of 8 or 4 bits."""
    return getattr(layer, "quantization_mode", None) is not None


def floating_policy(layer: keras.Layer) -> Any:
    """Returns the dtype policy of a layer without its quantization.

    With a quantized policy, Keras would ask an outer layer to compute with 8 bits itself.
    """
    policy = layer.dtype_policy
    return policy._source_name if is_quantized(layer) else policy


def add_loss(layer: keras.Layer, loss: Any) -> None:
    """Adds a loss to a layer that an inner layer has added."""
    layer.add_loss(loss)


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights of a layer itself that are created trainable, frozen or not."""
    return list(layer._trainable_variables)


def held_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns all weights of a layer itself."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_altered(layer: keras.Layer) -> bool:
    """Returns True if a call does more than the layer's `call` on its weights.

    Examples are LoRA, int8, losses of outputs, and `keras.remat`.
    """
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or getattr(layer, "_remat_mode", None)
        or layer.activity_regularizer
    )
