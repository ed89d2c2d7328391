"""Copies layers and models of Keras 2.15: through configs, and on the same variables.

The functions for configs work in each of Keras's file formats.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.saving import serialization_lib

from tfwd._keras2.layers import GRAPHS
from tfwd._keras_shared import copies
from tfwd._keras_shared.keras_own_code import is_of_keras


def serialize(layer: Any) -> dict[str, Any]:
    """Returns a layer's config, with the mark by which a `.keras` file detects shared layers.

    The build shape is omitted, because Keras 2 would read it back with another type. The mark is an
    address in memory. It exists only while Keras writes a file.
    """
    config = keras.saving.serialize_keras_object(layer)
    config.pop("build_config", None)
    if getattr(serialization_lib.SHARED_OBJECTS, "enabled", False):
        config = {**config, "shared_object_id": id(layer)}
    return config


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """Creates the object of a config's value. Nests and plain values are supported too."""
    if isinstance(value, (list, tuple)):
        return type(value)(deserialize(item, custom_objects) for item in value)
    if not isinstance(value, dict):
        return value
    if "class_name" not in value:
        return {key: deserialize(item, custom_objects) for key, item in value.items()}
    if str(value.get("registered_name")).startswith("Addons>"):
        importlib.import_module("tensorflow_addons")  # the import registers its classes
    if not serialization_lib.in_tf_saved_model_scope():
        return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
    # In its older file formats Keras finds objects only by class name.
    if "module" not in value:
        return _by_class_name(value, custom_objects)
    registered = value.get("registered_name") or ""
    kind: Any = keras.saving.get_registered_object(registered, custom_objects)
    if kind is None:
        kind = getattr(importlib.import_module(value["module"]), value["class_name"])
    with keras.saving.custom_object_scope(dict(_registered(value["config"]))):
        return kind.from_config(dict(value["config"]))


def keeps_sharing() -> bool:
    """Returns True while a file is read. Two uses of an object then become one object."""
    in_file = getattr(serialization_lib.SHARED_OBJECTS, "enabled", False)
    return in_file or serialization_lib.in_tf_saved_model_scope()


def is_absent(store: Any) -> bool:
    """Returns True if a file has no entry for a layer. An existing entry is a group in the file."""
    return isinstance(store, dict) and not store


def _registered(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the registered classes in a config, each with the name that Keras's models use."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _registered(item)
    elif isinstance(value, dict):
        kind = keras.saving.get_registered_object(value.get("registered_name") or "")
        if kind is not None:
            yield value["class_name"], kind
        for item in value.values():
            yield from _registered(item)


def _by_class_name(value: dict[str, Any], custom_objects: Any) -> Any:
    name = value["class_name"]
    if keras.saving.get_registered_object(name, custom_objects) is not None:
        return keras.saving.deserialize_keras_object(dict(value), custom_objects=custom_objects)
    schedules: Any = keras.optimizers.schedules
    homes = (schedules, keras.optimizers, keras.optimizers.legacy)
    home: Any = next((home for home in homes if hasattr(home, name)), keras.layers)
    if home is keras.optimizers.legacy:
        home = keras.optimizers
    return home.deserialize(dict(value), custom_objects=custom_objects)


def is_layer_graph(model: Any) -> bool:
    """Returns True for a Sequential or functional model of Keras's own class. It can be cloned."""
    return isinstance(model, GRAPHS) and is_of_keras(type(model))


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

    Keras's method identifies the calls of a layer by its name and class, which differ here.
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


# Attributes that each layer's constructor creates. A copy must not take them from another layer.
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
