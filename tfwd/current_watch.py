"""The `Watch` of the current thread's step, if there is one. Layers report arguments to it."""

from __future__ import annotations

import threading
from typing import Any

# Its attribute `watch` is the object that checks the tensors of the current thread's step.
here = threading.local()


def is_watching() -> bool:
    """Returns True if all layers of the current thread's step are being checked."""
    return getattr(here, "watch", None) is not None


def check_argument(rule: str, good: Any, values: Any) -> None:
    """Reports an argument's check to the watch of the current thread's step, if there is a watch.

    XLA drops assertions. The step then continues with an argument that its layer rejects.

    Args:
        rule: str. Requirement of the layer. It continues a sentence that begins with the layer's
            name.
        good: bool tensor. True for each valid value, or a scalar for all values.
        values: Tensor. The checked values.
    """
    watch = getattr(here, "watch", None)
    if watch is not None:
        watch.check_argument(rule, good, values)
