"""Serializes objects of Keras 2.15, in each of its file formats."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.saving import serialization_lib


def serialize(layer: Any) -> dict[str, Any]:
    """Returns a layer's config, with the mark by which a `.keras` file detects shared layers.

    The build shape is left out, because Keras 2 would read it back with another type. The mark is
    an address in memory. It exists only while Keras writes a file.
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
    """Returns True while a file is read, in which two uses of an object become one object."""
    in_file = getattr(serialization_lib.SHARED_OBJECTS, "enabled", False)
    return in_file or serialization_lib.in_tf_saved_model_scope()


def is_absent(store: Any) -> bool:
    """Returns True if a file has no entry for a layer. An existing entry is a group in the file."""
    return isinstance(store, dict) and not store


def _registered(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the registered classes in a config by the names under which Keras's models look."""
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
