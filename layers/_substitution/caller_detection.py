"""Detects calls in `tfwd.predict_samples`, in a `train_step` and in `tf.recompute_grad`.

- In `predict_samples`, calls draw although they are not training calls.
- In a `train_step`, a call without a training flag is a training call. Keras passes no flag to a
  model whose `call` has no such argument. A custom `train_step` may call its layers without the
  flag. Keras treats both as evaluation.
- In `tf.recompute_grad` (and `keras.remat`, which is the same), training calls are rejected. The
  function runs again in backward. A layer that draws would take the next call number there, and
  draw another mask. The gradient would silently be wrong, because it would belong to this other
  mask.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, TypeVar

import tensorflow as tf

_local = threading.local()


@contextlib.contextmanager
def sampling() -> Iterator[None]:
    """Makes all calls of wrapped layers draw in the body, on this thread.

    Each call takes the number of the next training call. Its parametrizations act as in training.
    Everything else in the layer depends on the call's own training flag. No gradient is prepared.
    """
    before = is_sampling()
    _local.sampling = True
    try:
        yield
    finally:
        _local.sampling = before


def is_sampling() -> bool:
    """Returns True in the body of `sampling`."""
    return getattr(_local, "sampling", False)


class TrainingStep:
    """One training step.

    Attributes:
        has_trained: True if a parametrized layer was called in training.
    """

    def __init__(self) -> None:
        self.has_trained = False


def present_step() -> TrainingStep | None:
    """Returns the training step that runs on this thread, or None."""
    return getattr(_local, "step", None)


@contextlib.contextmanager
def training_step() -> Iterator[TrainingStep]:
    """Marks the body as a training step."""
    before = present_step()
    _local.step = step = TrainingStep()
    try:
        yield step
    finally:
        _local.step = before
        if before is not None:
            before.has_trained |= step.has_trained


Function = TypeVar("Function", bound=Callable[..., Any])


def _all_codes(code: CodeType) -> set[CodeType]:
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {code, *(found for one in inside for found in _all_codes(one))}


# The code of `tf.recompute_grad` and of the functions that it creates. Some of this code is on the
# stack in forward and in backward.
_recomputing = _all_codes(tf.recompute_grad.__code__)
_repeating: set[CodeType] = set()


def repeats_draws(function: Function) -> Function:
    """Marks a function that may call a layer again, because it repeats the layer's draws."""
    _repeating.add(function.__code__)
    return function


def check_not_recomputed(name: str) -> None:
    """Raises a ValueError if a call that draws would run again in backward.

    Args:
        name: Name of the layer.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _repeating:
            return
        if frame.f_code in _recomputing:
            raise ValueError(
                f"layer '{name}' is called in training inside tf.recompute_grad or keras.remat, "
                "which calls it again in backward. It would draw another mask there, and the "
                "gradient would be wrong. Move the layer out of the recomputed function. (tfwd "
                "recomputes large effective weights by itself. recompute=False stores them.)"
            )
        frame = frame.f_back
