"""Serializes objects of Keras 3."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common import global_state as _global_state


def serialize(layer: keras.Layer) -> dict[str, Any]:
    """A layer's config, by which a `.keras` file knows it again in another place.

    While it writes a file, Keras marks the config of an object that it has met before, but not
    where that config stands inside another one, as a wrapped layer's does. The mark is Keras's own,
    an address in memory; configs outside of files have none, so that they can be compared.
    """
    config = keras.saving.serialize_keras_object(layer)
    if _global_state.get_global_attribute("shared_objects/id_to_config_map") is not None:
        config = {**config, "shared_object_id": id(layer)}
    return config


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """What a value in a config stands for: an object, a nest of such, or the value itself."""
    return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)


def keeps_sharing() -> bool:
    """Whether a file is being read, so that an object in two places of it becomes one object."""
    return _global_state.get_global_attribute("shared_objects/id_to_obj_map") is not None


def is_absent(store: Any) -> bool:
    """Whether a file's part for a layer is seen not to be there: here it is not seen."""
    return False
