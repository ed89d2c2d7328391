"""Distinguishes Keras's own code from code of users and other packages."""

from __future__ import annotations

from typing import Any

import keras


def defining_class(kind: type, name: str) -> type:
    """Returns the class that defines an attribute: the class itself, or the nearest base class."""
    return next(cls for cls in kind.__mro__ if name in vars(cls))


def is_of_keras(defined: Any, method: str | None = None) -> bool:
    """Returns True if Keras's own sources define a class or a function.

    Args:
        defined: Class or function.
        method: str. Checks this method of the class, which a base class may define. Default None,
            which checks `defined` itself.
    """
    found = defined if method is None else defining_class(defined, method)
    return found.__module__.startswith("keras.")


def is_own_step(model: keras.Model) -> bool:
    """Returns True if the training step is Keras's own, with a single update per step."""
    own = vars(model).get("train_step")
    is_replaced = own is not None and not getattr(own, "is_hook_of_tfwd", False)
    return is_of_keras(type(model), "train_step") and not is_replaced
