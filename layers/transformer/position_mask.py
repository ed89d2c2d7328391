"""Converts a mask to the mask of positions that Keras passes on to later layers."""

from __future__ import annotations

from typing import Any

from tfwd import _keras


def position_mask(mask: Any) -> Any:
    """Returns a mask of positions as booleans, which Keras may pass on to later layers.

    A mask per query, `[batch, queries, keys]`, does not describe positions. The result is then
    None.
    """
    if mask is None or len(mask.shape) != 2:
        return None
    is_bool = getattr(mask.dtype, "name", mask.dtype) == "bool"
    return mask if is_bool else _keras.ops.not_equal(mask, 0)
