"""Paths of the layers inside a layer."""

from __future__ import annotations

from typing import Any


def path_below(prefix: str, layer: Any, held: Any) -> str:
    """Returns the path of a layer that another layer holds.

    A layer with the attribute `replaces_inner_layer` replaces the one inside it and has its name,
    so this name is in the path only once.

    Args:
        prefix: Path of the outer layer.
        layer: The outer layer.
        held: The layer inside.
    """
    if held.name == layer.name and getattr(layer, "replaces_inner_layer", False):
        return prefix
    return f"{prefix}{held.name}/"
