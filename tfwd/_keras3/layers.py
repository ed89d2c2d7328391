"""Layers of Keras 3: their build, call state, masks and sublayers.

Keras offers no public way to read the flags of the call that is under way, or to hold them still
while a layer is run a second time. What there is, is private or nearly so and changes between
releases.
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
    """Base of layers that run other layers with functions of TensorFlow around them."""


class CallState:
    """The flags of the Keras call that is under way: training, other context arguments, autocast.

    A layer that is run again in backward must see the flags of its forward run, when that call is
    long over; and what a layer sets while it runs must not reach the layers after it.
    """

    def __init__(self) -> None:
        context = _global_state.get_global_attribute(_CALL_CONTEXT)
        self._values = {} if context is None else dict(vars(context))
        self._autocast = keras.src.backend.get_autocast_scope()

    @contextlib.contextmanager
    def restored(self, training: bool) -> Iterator[None]:
        """Runs the body as part of that call, with the given training flag."""
        before = _global_state.get_global_attribute(_CALL_CONTEXT)
        # The entry layer is nobody: an entry layer clears the losses of its sublayers.
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
    """The mask that Keras keeps with a tensor, or None."""
    return keras.src.backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see; None takes it away."""
    keras.src.backend.set_keras_mask(tensor, mask)


def build_by_call(layer: keras.Layer, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build, by a call whose result is thrown away."""
    with building_outside(layer):
        keras.src.backend.compute_output_spec(layer.__call__, *args, **kwargs)


def has_default_build(layer: keras.Layer) -> bool:
    """Whether the layer has no `build` of its own, so that only a call creates its weights."""
    return keras.src.utils.python_utils.is_default(layer.build) and bool(layer._layers)


def builds_by_shape(layer: keras.Layer) -> bool:
    """Whether the layer can make its weights of the shape of its inputs alone."""
    return not has_default_build(layer)


def accepts_training(layer: keras.Layer) -> bool:
    """Whether the layer's `call` takes a `training` argument."""
    return layer._call_has_training_arg


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that a layer holds directly, in Keras's own order."""
    return list(layer._layers)


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The layer, and all layers in it at any depth."""
    return layer._flatten_layers()


def build(layer: keras.Layer, *args: Any, **kwargs: Any) -> None:
    """Builds a layer by its own `build`."""
    layer.build(*args, **kwargs)
    layer.built = True


def build_from_config(layer: keras.Layer, config: dict[str, Any]) -> None:
    """Builds a layer as the config of its build says, which may come out of a file."""
    layer.build_from_config(config)


def has_weights(layer: keras.Layer) -> bool:
    """Whether the layer is built, with all weights that it will have.

    A layer without a `build` of its own is marked as built when it is loaded, although the layers
    in it are not. One that has a `build` may leave layers in it to be built by its call. What a
    call has left unbuilt is not used, and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or getattr(layer, "_called", False))


def awaits_call(layer: keras.Layer) -> bool:
    """Whether layers in this one are not built yet, and may have weights when they are."""
    is_default = keras.src.utils.python_utils.is_default
    return any(
        not (inner.built or is_default(inner.build)) or awaits_call(inner)
        for inner in sublayers(layer)
    )


def embedding_matrix(layer: keras.layers.Embedding) -> keras.Variable:
    """The variable of an Embedding layer, whatever the layer makes of it."""
    return layer._embeddings


def is_quantized(layer: keras.Layer) -> bool:
    """Whether the layer computes with weights of 8 or 4 bits."""
    return getattr(layer, "quantization_mode", None) is not None


def floating_policy(layer: keras.Layer) -> Any:
    """The dtype policy of a layer, without a mark that it is quantized.

    A layer around it that had the mark would be asked by Keras to compute on 8 bits itself.
    """
    policy = layer.dtype_policy
    return policy._source_name if is_quantized(layer) else policy


def add_loss(layer: keras.Layer, loss: Any) -> None:
    """Adds a loss to a layer that was added by a layer inside."""
    layer.add_loss(loss)


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """The weights that a layer holds itself and that were made to be trained, frozen or not."""
    return list(layer._trainable_variables)


def held_weights(layer: keras.Layer) -> list[keras.Variable]:
    """All weights that a layer holds itself."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_altered(layer: keras.Layer) -> bool:
    """Whether a call does more than the layer's `call` on its weights.

    So it is with LoRA, int8, losses of outputs, and `keras.remat`.
    """
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or getattr(layer, "_remat_mode", None)
        or layer.activity_regularizer
    )
