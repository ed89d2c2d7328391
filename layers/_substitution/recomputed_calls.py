"""Rejects training calls inside `tf.recompute_grad`, which would draw a second time.

`tf.recompute_grad` (and `keras.remat`, which is the same) calls its function again in backward. The
second call of a layer that draws has the next call number, and so another mask. The gradient would
silently belong to another function than forward's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, TypeVar

import tensorflow as tf

Function = TypeVar("Function", bound=Callable[..., Any])


def _all_codes(code: CodeType) -> set[CodeType]:
    inside = [one for one in code.co_consts if isinstance(one, CodeType)]
    return {code, *(found for one in inside for found in _all_codes(one))}


# The code of functions that TensorFlow's makes. One is on the stack in forward and in backward.
_recomputing = _all_codes(tf.recompute_grad.__code__)
_repeating: set[CodeType] = set()


def repeats_draws(function: Function) -> Function:
    """Marks a function that may call a layer again, because it repeats the layer's draws."""
    _repeating.add(function.__code__)
    return function


def check(name: str) -> None:
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
