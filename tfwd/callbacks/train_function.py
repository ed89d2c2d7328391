"""Finds and replaces the training function of a model, inside the functions of other callbacks.

Keras stores the function as `model.train_function`. A callback that wraps this function stores the
function as `_trains`.
"""

from __future__ import annotations

from typing import Any

import keras


def innermost(model: keras.Model) -> Any:
    """Returns the training function inside all callbacks that wrap it."""
    return _around_innermost(model)[1]


def replace_innermost(model: keras.Model, function: Any) -> Any:
    """Replaces the training function inside all callbacks that wrap it. Returns this function."""
    owner, present = _around_innermost(model)
    if owner is None:
        model.train_function = function
    else:
        owner._trains = function
    return present


def _around_innermost(model: keras.Model) -> tuple[Any, Any]:
    """Returns the innermost callback, or None, and the training function inside this callback."""
    owner, present = None, model.train_function
    while (inner := getattr(present, "__self__", None)) is not None and hasattr(inner, "_trains"):
        owner, present = inner, inner._trains
    return owner, present
