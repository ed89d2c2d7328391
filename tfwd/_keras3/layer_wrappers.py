"""Base classes of wrappers on Keras 3. A wrapper takes over the call of the layer inside it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras3.layer_calls import accepts_training
from tfwd._keras3.layers import KerasTensor, all_layers, get_mask


class NoAutographLayer:
    """Base class of layers that call other layers inside functions of TensorFlow."""


class Wraps:
    """Base class of layers that replace a layer inside them, `self.layer`."""

    layer: Any
    replaces_inner_layer = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _given(self, kwargs):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _set_mask_metadata(self, inputs: Any, outputs: Any, previous_mask: Any) -> None:
        # The inner layer has already marked its outputs, unless only their shapes were computed.
        if any(isinstance(output, KerasTensor) for output in keras.tree.flatten(outputs)):
            super()._set_mask_metadata(inputs, outputs, previous_mask)  # type: ignore[misc]

    @property
    def metrics(self: Any) -> list[keras.metrics.Metric]:
        """The metrics of all layers inside, each once.

        The metrics of inner models are omitted, as in Keras. An example is the loss of an inner
        model's own `fit`. Otherwise an outer model would reset and report this loss as its own.
        """
        layers = [layer for layer in all_layers(self) if not isinstance(layer, keras.Model)]
        metrics = {id(m): m for layer in layers for m in layer._metrics}
        return list(metrics.values())


# This attribute tells AutoGraph that there is nothing to convert.
Wraps.__call__.autograph_info__ = {}  # type: ignore[attr-defined]


_here = threading.local()


@contextlib.contextmanager
def _given(layer: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Stores the arguments of a layer's call, to distinguish them from arguments of Keras."""
    before = getattr(_here, "call", None)
    _here.call = layer, dict(kwargs)
    try:
        yield
    finally:
        _here.call = before


def _taken(layer: Any) -> dict[str, Any] | None:
    """Returns the keyword arguments of the layer's call, or None if only its `call` was called."""
    found = getattr(_here, "call", None)
    if found is None or found[0] is not layer:
        return None
    _here.call = None  # use them only once, because a later call is another call
    return found[1]


def inner_call(
    layer: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """Returns the function to call where Keras calls the `call` of a wrapper.

    The inner layer is called with the wrapper's arguments. Keras then finds the inner layer's masks
    itself. Masks that Keras has found for the wrapper are not passed on, because they would count
    as arguments. `keras.layers.TimeDistributed` calls only `call`, without the casts and masks of
    `__call__`. In this case, only the inner layer's `call` is called.

    Args:
        layer: Wrapper.
        args: Positional arguments of its `call`.
        kwargs: Keyword arguments of its `call`.

    Returns:
        The inner layer or its `call`, and the arguments. The training flag is a keyword argument.
    """
    given = _taken(layer)
    if given is not None:
        flag = {"training": kwargs["training"]} if "training" in kwargs else {}
        named = {k: None if given[k] is None else v for k, v in kwargs.items() if k in given}
        return layer.layer, args, {**named, **flag}
    bound = layer._call_signature.bind(*args, **kwargs)
    flag = layer._call_signature.parameters["training"].default
    if "training" in bound.arguments:
        flag = bound.arguments.pop("training")
    function = layer.layer.call
    if not accepts_training(layer.layer):
        function = functools.partial(_without_flag, function)
    return function, bound.args, {**bound.kwargs, "training": flag}


def _without_flag(function: Callable[..., Any], *args: Any, training: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def mark(layer: Any, inputs: Any, outputs: Any) -> None:
    """Attaches the masks to a layer's outputs that a call of the layer would attach."""
    if layer.supports_masking:
        layer._set_mask_metadata(inputs, outputs, get_mask(inputs))


def converted(layer: Any, sequences: tf.Tensor) -> tf.Tensor:
    """Returns a layer's first argument in the dtype in which the layer computes.

    On Keras 3 the wrapper has already converted it.
    """
    return sequences


def adopt_call(wrapper: keras.Layer, layer: keras.Layer) -> None:
    """Makes Keras treat calls of `wrapper` like calls of `layer`.

    Keras reads signatures and flags of the layer that it calls. They determine input conversion,
    masks, the training flag and the shapes for `build`.
    """
    signature = layer._call_signature
    parameters = list(signature.parameters.values())
    if "training" not in signature.parameters:
        flag = inspect.Parameter("training", inspect.Parameter.KEYWORD_ONLY, default=None)
        catch_all = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        parameters = [p for p in parameters if p not in catch_all] + [flag] + catch_all
    wrapper._call_signature = inspect.Signature(parameters)
    wrapper.call_signature_parameters = [p.name for p in parameters]
    wrapper._call_has_training_arg = True
    wrapper._call_has_mask_arg = layer._call_has_mask_arg
    if hasattr(wrapper, "_call_has_context_arg"):
        wrapper._call_context_args = set(layer._call_context_args)
        wrapper._call_has_context_arg = {**layer._call_has_context_arg, "training": True}
    wrapper.build.__signature__ = inspect.signature(layer.build)
    wrapper.autocast = layer.autocast
    wrapper.supports_masking = layer.supports_masking
    wrapper.supports_jit = layer.supports_jit
    wrapper._convert_input_args = layer._convert_input_args
    wrapper._allow_non_tensor_positional_args = layer._allow_non_tensor_positional_args
