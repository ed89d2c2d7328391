"""Intercepts calls of layers and reads of variables, for `tfwd.gradients`.

Keras has no hooks. During a pass, a function replaces the `call` of some classes. The function uses
the current thread's handler, or the original call if there is no handler. Other threads are not
affected. Subclasses that call `super().call`, and wrappers that call `layer.call`, are intercepted
too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras

from tfwd._keras3.substitution import Substitution
from tfwd._keras_shared import method_replacement, substitution_scopes
from tfwd._keras_shared.method_replacement import Handler

_FUSED = ("_can_attempt_fused_lstm", "_can_attempt_fused_gru")


def intercepted(
    classes: Iterable[type], handler: Handler
) -> contextlib.AbstractContextManager[None]:
    """Sends each `call` that one of the classes defines to `handler`, in the body, on this thread.

    Args:
        classes: Classes. A class that does not define `call` is ignored.
        handler: Function that is called in place of `call`. It gets the original `call`.
    """
    # A fused pass through both directions of a Bidirectional would not call the two layers.
    both: Any = keras.layers.Bidirectional
    fused = [(both, name, _without_fused_pass) for name in _FUSED if hasattr(both, name)]
    return method_replacement.intercepted(classes, handler, _with_handler, fused)


def _with_handler(cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: keras.Layer, *args: Any, **kwargs: Any) -> Any:
        own = method_replacement.bound(original, self)
        return method_replacement.ask(cls, self, own, args, kwargs)

    return call


def _without_fused_pass(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attempt(self: keras.Layer, *args: Any, **kwargs: Any) -> bool:
        return method_replacement.present_handler() is None and original(self, *args, **kwargs)

    return attempt


class DrawRecording:
    """Random draws that one pass records and another pass replays. On Keras 3 it has no draws.

    On Keras 3 the state of each generator is a variable, which a pass can restore.
    """

    inside = False

    def __bool__(self) -> bool:
        return False

    def recorded(self) -> contextlib.AbstractContextManager[None]:
        """Records the draws in the body."""
        return contextlib.nullcontext()

    def replayed(self) -> contextlib.AbstractContextManager[None]:
        """Repeats the recorded draws in the body."""
        return contextlib.nullcontext()


class Observed(substitution_scopes.Observing, Substitution):
    """A substitution that reports every read, update and loss."""


class Captured(substitution_scopes.Capturing, Substitution):
    """A substitution that stores all updates, except in functions that are traced in its body."""


class Discarded(substitution_scopes.Discarding, Substitution):
    """A substitution that discards all updates, except of chosen variables."""


def users_code() -> contextlib.AbstractContextManager[None]:
    """Runs a model as Keras runs it in a `tf.function`: without AutoGraph."""
    return contextlib.nullcontext()


def is_rematerialized(layer: keras.Layer) -> bool:
    """Returns True if `keras.remat` runs the layer a second time in backward."""
    return getattr(layer, "_remat_mode", None) is not None
