"""Serializes objects of Keras 2.15, in each of its file formats."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.saving import serialization_lib


def serialize(layer: Any) -> dict[str, Any]:
    """A layer's config, by which a `.keras` file knows it again in another place.

    Without the shape to build it for, which Keras 2 reads back from a file as another type. Only
    while Keras writes a file is there a mark of the layer, an address in memory.
    """
    config = keras.saving.serialize_keras_object(layer)
    config.pop("build_config", None)
    if getattr(serialization_lib.SHARED_OBJECTS, "enabled", False):
        config = {**config, "shared_object_id": id(layer)}
    return config


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """What a value in a config stands for: an object, a nest of such, or the value itself."""
    if isinstance(value, (list, tuple)):
        return type(value)(deserialize(item, custom_objects) for item in value)
    if not isinstance(value, dict):
        return value
    if "class_name" not in value:
        return {key: deserialize(item, custom_objects) for key, item in value.items()}
    if str(value.get("registered_name")).startswith("Addons>"):
        importlib.import_module("tensorflow_addons")  # which registers its classes
    if not serialization_lib.in_tf_saved_model_scope():
        return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
    # In its older formats of files Keras finds objects by the names of their classes alone.
    if "module" not in value:
        return _by_class_name(value, custom_objects)
    registered = value.get("registered_name") or ""
    kind: Any = keras.saving.get_registered_object(registered, custom_objects)
    if kind is None:
        kind = getattr(importlib.import_module(value["module"]), value["class_name"])
    with keras.saving.custom_object_scope(dict(_registered(value["config"]))):
        return kind.from_config(dict(value["config"]))


def keeps_sharing() -> bool:
    """Whether a file is being read, so that an object in two places of it becomes one object."""
    in_file = getattr(serialization_lib.SHARED_OBJECTS, "enabled", False)
    return in_file or serialization_lib.in_tf_saved_model_scope()


def is_absent(store: Any) -> bool:
    """Whether a file's part for a layer is seen not to be there; else it is a group in the file."""
    return isinstance(store, dict) and not store


def _registered(value: Any) -> Iterator[tuple[str, Any]]:
    """The registered classes in a config with their names, by which Keras's own models ask."""
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
