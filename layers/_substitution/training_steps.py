"""Marks the `train_step` of a model, in which a call without a training flag is a training call.

Keras passes no training flag to a model whose `call` has no such argument. A custom `train_step`
may call its layers without the flag. Keras takes both for evaluation.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Step:
    """One training step.

    Attributes:
        has_trained: True if a parametrized layer was called in training.
    """

    def __init__(self) -> None:
        self.has_trained = False


_local = threading.local()


def present() -> Step | None:
    """Returns the training step that runs on this thread, or None."""
    return getattr(_local, "step", None)


@contextlib.contextmanager
def entered() -> Iterator[Step]:
    """Marks the body as a training step."""
    before = present()
    _local.step = step = Step()
    try:
        yield step
    finally:
        _local.step = before
        if before is not None:
            before.has_trained |= step.has_trained
