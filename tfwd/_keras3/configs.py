"""Serializes objects of Keras 3."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common import global_state as _global_state


def serialize(layer: keras.Layer) -> dict[str, Any]:
    """Returns a layer's config, with the mark by which a `.keras` file detects shared layers.

    While Keras writes a file, it marks the config of an object that it has seen before. It does not
    mark a config inside another one, such as the config of a wrapped layer. The mark is an address
    in memory. Configs outside files have no mark, so that they can be compared.
    """
    config = keras.saving.serialize_keras_object(layer)
    if _global_state.get_global_attribute("shared_objects/id_to_config_map") is not None:
        config = {**config, "shared_object_id": id(layer)}
    return config


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """Creates the object of a config's value. Nests and plain values are supported too."""
    return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)


def keeps_sharing() -> bool:
    """Returns True while a file is read, in which two uses of an object become one object."""
    return _global_state.get_global_attribute("shared_objects/id_to_obj_map") is not None


def is_absent(store: Any) -> bool:
    """Returns True if a file has no entry for a layer. On Keras 3 this cannot be detected."""
    return False
