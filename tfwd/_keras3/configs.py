"""Configs of Keras 3's objects, and objects of configs."""

from __future__ import annotations

from typing import Any

import keras


def serialize(layer: keras.Layer) -> dict[str, Any]:
    """A layer's config, by which a `.keras` file knows it again in another place.

    Keras marks the config of an object that it has met before, but not where that config stands
    inside another one, as a wrapped layer's does.
    """
    return {**keras.saving.serialize_keras_object(layer), "shared_object_id": id(layer)}


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """What a value in a config stands for: an object, a nest of such, or the value itself."""
    return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
