"""Copies layers and models of Keras 2.15 on the same variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras2.layers import GRAPHS
from tfwd._keras_shared import copies


def is_layer_graph(model: Any) -> bool:
    """Returns True for a Sequential or functional model of Keras's own class. It can be cloned."""
    return isinstance(model, GRAPHS) and type(model).__module__.startswith("keras.")


def clone(model: Any, function: Callable[[Any], Any]) -> Any:
    """Returns a Sequential or functional model with other layers, also in nested models.

    Args:
        model: Model. It is not changed.
        function: Function from each layer to its replacement, or to itself.
    """

    def replaced(layer: Any) -> Any:
        if isinstance(layer, keras.layers.InputLayer):
            return layer
        return clone(layer, function) if is_layer_graph(layer) else function(layer)

    if isinstance(model, keras.Sequential):
        copy = keras.models.clone_model(model, clone_function=replaced)
    else:
        copy = _rebuilt(model, replaced)
    if getattr(model, "optimizer", None) is not None:
        with keras.utils.custom_object_scope(_optimizers_of(model)):
            copy.compile_from_config(model.get_compile_config())
    return copy


def _optimizers_of(model: Any) -> dict[str, type]:
    """Returns the classes of a model's optimizer and of the optimizers in it, by name.

    They need not be registered.
    """
    found: dict[str, type] = {}
    waiting = [model.optimizer]
    while waiting:
        optimizer = waiting.pop()
        if optimizer is not None:
            found[type(optimizer).__name__] = type(optimizer)
            names = ("optimizer", "_optimizer", "inner_optimizer", "_inner_optimizer")
            waiting += [vars(optimizer).get(name) for name in names]
    return found


def _rebuilt(model: Any, replaced: Callable[[Any], Any]) -> Any:
    """Rebuilds a functional model with other layers, call by call.

    Keras's method counts the calls of a layer by name and kind, which differ here.
    """
    layers: dict[int, Any] = {}
    tensors: dict[int, Any] = {}

    def other(value: Any) -> Any:
        return tensors.get(id(value), value)

    for layer in model._input_layers:
        copy = keras.layers.InputLayer.from_config(layer.get_config())
        tensors[id(layer.output)] = copy.output
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.is_input:
                continue
            if id(node.layer) not in layers:
                layers[id(node.layer)] = replaced(node.layer)
            args, kwargs = tf.nest.map_structure(other, (node.call_args, node.call_kwargs))
            outputs = layers[id(node.layer)](*args, **kwargs)
            pairs = zip(tf.nest.flatten(node.outputs), tf.nest.flatten(outputs), strict=True)
            tensors.update({id(before): after for before, after in pairs})
    given = (model._nested_inputs, model._nested_outputs)
    inputs, outputs = tf.nest.map_structure(other, given)
    return type(model)(inputs, outputs, name=model.name)


def tie(
    dense: Any, kernel: tf.Variable, bias: tf.Variable | None, output_shape: tuple[int | None, ...]
) -> Any:
    """Gives an unbuilt layer existing variables, and returns it as a built layer."""
    dense.kernel = kernel
    dense.bias = bias
    dense.full_output_shape = list(output_shape)
    dense.built = True
    return dense


# Attributes that a layer's constructor makes for the layer itself. A copy must not take them.
_OWN_STATE = {
    "_call_spec",
    "_callable_losses",
    "_checkpoint",
    "_dtype_policy",
    "_inbound_nodes_value",
    "_losses",
    "_metrics",
    "_metrics_lock",
    "_name",
    "_non_trainable_weights",
    "_obj_reference_counts_dict",
    "_outbound_nodes_value",
    "_predict_counter",
    "_random_generator",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
    "_stateful",
    "_test_counter",
    "_thread_local",
    "_train_counter",
    "_trainable_weights",
    "_updates",
    "predict_function",
    "test_function",
    "train_function",
    "train_tf_function",
}


def _is_own(name: str) -> bool:
    return name in _OWN_STATE or name.startswith("_self_")


def _begin(copy: Any, layer: Any) -> None:
    generator = vars(layer).get("_random_generator")
    if generator is not None:  # Keras reads it when any attribute is set, and does not track it
        object.__setattr__(copy, "_random_generator", generator)


share = functools.partial(copies.share, is_own=_is_own, begin=_begin)
