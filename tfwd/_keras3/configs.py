"""Configs of Keras 3's objects, and objects of configs."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.backend.common import global_state


def serialize(layer: keras.Layer) -> dict[str, Any]:
    """A layer's config, by which a `.keras` file knows it again in another place.

    While it writes a file, Keras marks the config of an object that it has met before, but not
    where that config stands inside another one, as a wrapped layer's does. The mark is Keras's own,
    an address in memory; configs outside of files have none, so that they can be compared.
    """
    config = keras.saving.serialize_keras_object(layer)
    if global_state.get_global_attribute("shared_objects/id_to_config_map") is not None:
        config = {**config, "shared_object_id": id(layer)}
    return config


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """What a value in a config stands for: an object, a nest of such, or the value itself."""
    return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
