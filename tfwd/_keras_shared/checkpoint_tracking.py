"""Makes TensorFlow's checkpoints of a layer save objects that are not attributes of the layer."""

from __future__ import annotations

from typing import Any


def track(layer: Any, name: str, held: Any) -> None:
    """Lets TensorFlow's checkpoints of a layer save another object.

    If a checkpoint with this object was restored before, the object gets its values now.
    """
    layer._track_trackable(held, name, overwrite=True)
    layer._handle_deferred_dependencies(name, held)


def untrack(layer: Any, name: str) -> None:
    """Undoes `track`."""
    layer._delete_tracking(name)
