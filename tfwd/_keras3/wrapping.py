"""The way in which a wrapper takes over the call of the layer inside it, on Keras 3."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tfwd._keras3.layers import KerasTensor, accepts_training, all_layers, call_flag, get_mask
from tfwd._keras_shared.interception import named_after


class Wraps:
    """Base class of layers that replace a layer inside them, `self.layer`."""

    layer: Any

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

        The metrics of inner models are left out, as in Keras. An example is the loss of an inner
        model's own `fit`. An outer model would otherwise reset and report it as its own.
        """
        layers = [layer for layer in all_layers(self) if not isinstance(layer, keras.Model)]
        metrics = {id(m): m for layer in layers for m in layer._metrics}
        return list(metrics.values())


# This attribute tells AutoGraph that there is nothing to convert.
Wraps.__call__.autograph_info__ = {}  # type: ignore[attr-defined]


_here = threading.local()


@contextlib.contextmanager
def _given(layer: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Stores the arguments of a layer's call, to tell them from arguments that Keras adds."""
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
    _here.call = None  # only once: a later call is another call
    return found[1]


def inner_call(
    layer: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """Returns the function to call where Keras calls the `call` of a wrapper.

    The inner layer is called with the wrapper's arguments. Keras then looks for its masks itself.
    Masks that Keras has found for the wrapper are not passed on, because they would count as
    arguments. If only `call` was called, as `keras.layers.TimeDistributed` does, there are no casts
    and masks of `__call__`. Then only the inner layer's `call` is called.

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


def bound_call(layer: keras.Layer) -> Callable[..., Any]:
    """Returns the `call` of a layer's class."""
    return types.MethodType(type(layer).call, layer)


def own_call(layer: keras.Layer) -> Callable[..., Any]:
    """Returns the `call` of a layer's class as Keras would call it here."""
    return bound_call(layer)


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


def masks_of_sequences(sequences: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the masks of a recurrent layer's call: the applied one, and the outputs' one.

    Keras 3 passes on the mask of the sequences if they are the only tensor.

    Args:
        sequences: First argument of the layer.
        given: Other arguments by name, without the training flag.
    """
    mask, carried = given.get("mask"), get_mask(sequences)
    if mask is not None:
        return mask, mask
    state = given.get("initial_state")
    alone = state is None or not tf.nest.flatten(state)
    return carried if alone else None, carried


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
