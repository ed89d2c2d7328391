"""Layers of Keras 2.15: their sublayers, weights, losses and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import functional, keras_tensor

from tfwd._keras2 import variables
from tfwd._keras_shared.keras_own_code import is_of_keras

KerasTensor: Any = keras_tensor.KerasTensor


Datasets: Any = keras.utils.Sequence


GRAPHS = (keras.Sequential, functional.Functional)


def get_mask(tensor: Any) -> Any:
    """Returns the mask that Keras stores with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, for later Keras layers. None removes the mask."""
    tensor._keras_mask = mask


def sublayers(layer: Any) -> list[Any]:
    """Returns the direct sublayers of a layer, in Keras's order."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def all_layers(layer: Any) -> list[Any]:
    """Returns the layer and all layers in it at any depth."""
    return list(layer._flatten_layers())


def symbolic_inputs(layer: Any) -> Any:
    """Returns the structure of inputs of a functional or sequential model; None for others."""
    if not isinstance(layer, functional.Functional) or not is_of_keras(type(layer), "call"):
        return None
    return layer._nested_inputs


def symbolic_outputs(layer: Any) -> Any:
    """Returns the structure of outputs of a layer in a functional model; None if there is none."""
    nodes = layer._inbound_nodes
    return nodes[0].outputs if len(nodes) == 1 else None


def embedding_matrix(layer: Any) -> tf.Variable:
    """Returns the variable of an Embedding layer."""
    return layer.embeddings


def is_quantized(layer: Any) -> bool:
    """Returns True if the layer computes with weights of 8 or 4 bits. Keras 2 has no such layer."""
    return False


def floating_policy(layer: Any) -> Any:
    """Returns the dtype policy of a layer."""
    return layer.dtype_policy


def add_loss(layer: Any, loss: tf.Tensor) -> None:
    """Adds a loss to a layer that an inner layer has added.

    Inner layers may store losses from the construction of a model around them. Keras would treat
    these losses as losses of this call. So they are removed first.
    """
    for inner in all_layers(layer)[1:]:
        inner._losses.clear()
    layer.add_loss(loss)


@contextlib.contextmanager
def kept_losses(layer: Any) -> Iterator[None]:
    """Restores the losses that calls have added to a layer, after other calls in the body."""
    before = [(inner, [*inner._losses], [*inner._eager_losses]) for inner in all_layers(layer)]
    try:
        yield
    finally:
        for inner, losses, eager in before:
            inner._losses[:], inner._eager_losses = losses, eager


def own_losses(layer: Any) -> list[Any]:
    """Returns the losses that a layer's own code has added, without losses of inner layers."""
    return [*layer._eager_losses, *layer._losses]


def own_weights(layer: Any) -> list[tf.Variable]:
    """Returns the layer's own weights that were created trainable, even if they are frozen."""
    return list(layer._trainable_weights)


def held_weights(layer: Any) -> list[tf.Variable]:
    """Returns the layer's own weights, without weights of inner layers."""
    return variables.held(layer)


def is_altered(layer: Any) -> bool:
    """Returns True if calling the layer does more than the usual `call` does with its weights.

    Examples are activity regularizers, and an embedding with sparse inputs or outputs.
    """
    return bool(
        layer.activity_regularizer
        or getattr(layer, "sparse", False)
        or getattr(layer, "_use_one_hot_matmul", False)
    )
