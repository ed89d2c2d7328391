"""Calls of layers on Keras 2.15: their functions, and the flags of the current call."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import base_layer_utils
from keras.src.mixed_precision import autocast_variable

from tfwd._keras_shared.method_replacement import named_after


class CallState:
    """The flags of the current Keras call: training, its layer and inputs, autocast.

    A layer that runs again in backward must get the flags of its forward run, which has already
    ended. Flags that a layer sets while it runs must not affect later layers.
    """

    def __init__(self) -> None:
        self._values = dict(base_layer_utils.call_context()._state)
        self._autocast = getattr(autocast_variable._autocast_dtype, "dtype", None)

    @contextlib.contextmanager
    def restored(self, training: bool) -> Iterator[None]:
        """Runs the body as a part of that call, with the given training flag."""
        graph = not tf.executing_eagerly()
        values = {**self._values, "training": training, "build_graph": graph}
        with (
            base_layer_utils.call_context().enter(**values),
            autocast_variable.enable_auto_cast_variables(self._autocast),
        ):
            yield


def accepts_training(layer: Any) -> bool:
    """Returns True if the layer's `call` has a `training` argument."""
    return layer._call_spec.expects_training_arg


def bound_call(layer: Any) -> Callable[..., Any]:
    """Returns the `call` of a layer's class."""
    return types.MethodType(type(layer).call, layer)


def own_call(layer: Any, replaced: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Returns the `call` of a layer as Keras would call it here.

    Keras lets AutoGraph convert the calls of custom layers.

    Args:
        layer: Layer.
        replaced: The layer's own attribute `call`. Default None, for the `call` of its class.
    """
    call = bound_call(layer) if replaced is None else replaced
    autograph = tf.__internal__.autograph
    is_custom = base_layer_utils.is_subclassed(layer)
    if not is_custom or base_layer_utils.from_saved_model(layer) or tf.executing_eagerly():
        return call
    return autograph.tf_convert(call, autograph.control_status_ctx())


def split_training(
    layer: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Any, tuple, dict[str, Any]]:
    """Separates the training flag from the arguments of a layer's `call`.

    Returns:
        The flag, which may be None, and the other arguments.
    """
    training = None
    if accepts_training(layer):
        args, kwargs = named_after(args, kwargs, layer._call_spec.arg_names)
        training = kwargs.pop("training", None)
    if training is None:
        training = base_layer_utils.call_context().training
    if training is None and accepts_training(layer):
        training = layer._call_spec.default_training_arg
    return training, args, kwargs


def is_symbolic() -> bool:
    """Returns True if Keras computes only the shapes of a call's outputs."""
    return base_layer_utils.call_context().in_keras_graph


# The class and the method by which layers cast an input to their dtype.
INPUT_CAST = (keras.layers.Layer, "_cast_single_input")
