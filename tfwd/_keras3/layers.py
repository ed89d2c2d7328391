"""Layers of Keras 3: their sublayers, weights, losses and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfwd._keras_shared.keras_own_code import is_of_keras

KerasTensor = keras.KerasTensor


Datasets = keras.utils.PyDataset


def get_mask(tensor: Any) -> Any:
    """Returns the mask that Keras stores with a tensor, or None."""
    return keras.src.backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, for later Keras layers. None removes the mask."""
    keras.src.backend.set_keras_mask(tensor, mask)


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers of a layer, in Keras's order."""
    return list(layer._layers)


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layer and all layers in it at any depth."""
    return layer._flatten_layers()


def symbolic_inputs(layer: Any) -> Any:
    """Returns the structure of inputs of a functional or sequential model; None for others."""
    model = getattr(layer, "_functional", None) or layer
    if not isinstance(model, keras.src.models.Functional) or not is_of_keras(type(layer), "call"):
        return None
    return model._inputs_struct


def symbolic_outputs(layer: Any) -> Any:
    """Returns the structure of outputs of a layer in a functional model; None if there is none."""
    nodes = layer._inbound_nodes
    return nodes[0].output_tensors if len(nodes) == 1 else None


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
    keras.layers.Layer.add_loss(layer, loss)  # a functional model rejects it


@contextlib.contextmanager
def kept_losses(layer: keras.Layer) -> Iterator[None]:
    """Restores the losses that calls have added to a layer, after other calls in the body."""
    before = [(inner, [*inner._losses], {*inner._loss_ids}) for inner in all_layers(layer)]
    try:
        yield
    finally:
        for inner, losses, ids in before:
            inner._losses.clear()
            inner._losses.extend(losses)
            inner._loss_ids.clear()
            inner._loss_ids.update(ids)


def own_losses(layer: keras.Layer) -> list[Any]:
    """Returns the losses that a layer's own code has added, without losses of inner layers."""
    return layer._get_own_losses()


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the layer's own weights that were created trainable, even if they are frozen."""
    return list(layer._trainable_variables)


def held_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the layer's own weights, without weights of inner layers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_altered(layer: keras.Layer) -> bool:
    """Returns True if calling the layer does more than its class's `call` does with its weights.

    Examples are LoRA, int8, activity regularizers, and `keras.remat`.
    """
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or getattr(layer, "_remat_mode", None)
        or layer.activity_regularizer
    )
