"""Layers of Keras 2.15: their sublayers, weights, losses and masks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import functional, keras_tensor

from tfwd._keras_shared.keras_own_code import is_of_keras
from tfwd._keras_shared.model_graph import Graph, Node, in_order_of_inputs

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


def input_names(layer: Any) -> list[str]:
    """Returns the names of the inputs of a functional or sequential model; else an empty list."""
    return getattr(layer, "input_names", None) or []


def _inputs_of(node: Any) -> list[Any]:
    """Returns the input tensors of a call, in the order of the inputs of a called model."""
    given = node.call_args[0] if node.call_args else None
    return in_order_of_inputs(given, input_names(node.layer), node.keras_inputs)


def graph(layer: Any) -> Graph | None:
    """Returns the graph of a functional or sequential model, or None."""
    if not isinstance(layer, functional.Functional) or not is_of_keras(type(layer), "call"):
        return None
    nodes = [
        Node(
            node.layer,
            _inputs_of(node),
            tf.nest.flatten(node.outputs),
            (tuple(node.call_args), dict(node.call_kwargs)),
        )
        for depth in sorted(layer._nodes_by_depth, reverse=True)
        for node in layer._nodes_by_depth[depth]
        if not node.is_input
    ]
    return Graph(layer.inputs, layer.outputs, nodes) if nodes else None


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
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def is_altered(layer: Any) -> bool:
    """Returns True if calling the layer does more than the usual `call` does with its weights.

    Examples are activity regularizers, and an embedding with sparse inputs or outputs.
    """
    return bool(
        layer.activity_regularizer
        or getattr(layer, "sparse", False)
        or getattr(layer, "_use_one_hot_matmul", False)
    )
