"""Calls of layers on Keras 3: their functions, and the flags of the current call.

Keras has no public way to read the flags of the current call, or to keep them while a layer runs a
second time. So this module uses private names, and public names that Keras does not document. They
change between releases.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state as _global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tfwd._keras_shared.method_replacement import named_after

_CALL_CONTEXT = "current_call_ctx"


class CallState:
    """The flags of the current Keras call: training, other context arguments, autocast.

    A layer that runs again in backward must get the flags of its forward run, which has already
    ended. Flags that a layer sets while it runs must not affect later layers.
    """

    def __init__(self) -> None:
        context = _global_state.get_global_attribute(_CALL_CONTEXT)
        self._values = {} if context is None else dict(vars(context))
        self._autocast = keras.src.backend.get_autocast_scope()

    @contextlib.contextmanager
    def restored(self, training: bool) -> Iterator[None]:
        """Runs the body as a part of that call, with the given training flag."""
        before = _global_state.get_global_attribute(_CALL_CONTEXT)
        # There is no entry layer, because an entry layer clears the losses of its sublayers.
        context = keras.src.layers.layer.CallContext(entry_layer=None)
        for name, flag in {**self._values, "entry_layer": None, "training": training}.items():
            setattr(context, name, flag)
        _global_state.set_global_attribute(_CALL_CONTEXT, context)
        autocast = contextlib.nullcontext()
        if self._autocast is not None:
            autocast = keras.src.backend.AutocastScope(self._autocast.dtype)
        try:
            with autocast:
                yield
        finally:
            _global_state.set_global_attribute(_CALL_CONTEXT, before)


def call_flag(name: str) -> Any:
    """Returns a flag of the current Keras call, such as `training`, or None."""
    context = _global_state.get_global_attribute(_CALL_CONTEXT)
    return getattr(context, name, None)


def accepts_training(layer: keras.Layer) -> bool:
    """Returns True if the layer's `call` has a `training` argument."""
    return layer._call_has_training_arg


def bound_call(layer: keras.Layer) -> Callable[..., Any]:
    """Returns the `call` of a layer's class."""
    return types.MethodType(type(layer).call, layer)


def own_call(layer: keras.Layer, replaced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns the `call` of a layer as Keras would call it here.

    Args:
        layer: Layer.
        replaced: The layer's own attribute `call`. Default None, for the `call` of its class.
    """
    return bound_call(layer) if replaced is None else replaced


def split_training(
    layer: keras.Layer, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, tuple, dict[str, Any]]:
    """Separates the training flag from the arguments of a layer's `call`.

    Returns:
        The flag, which may be None, and the other arguments.
    """
    training = None
    if accepts_training(layer):
        args, kwargs = named_after(args, kwargs, list(layer._call_signature.parameters))
        training = kwargs.pop("training", None)
    if training is None:
        training = call_flag("training")
    if training is None and accepts_training(layer):
        default = layer._call_signature.parameters["training"].default
        training = None if default is inspect.Parameter.empty else default
    return training, args, kwargs


def is_symbolic() -> bool:
    """Returns True if Keras computes only the shapes of a call's outputs."""
    return in_symbolic_scope()


# The class and the method by which layers cast an input to their dtype.
INPUT_CAST = (keras.DTypePolicy, "convert_input")
