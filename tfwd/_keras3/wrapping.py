"""How a wrapper takes over the call of the layer inside it, on Keras 3."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd._keras3.layers import KerasTensor, accepts_training, all_layers, get_mask


class Wraps:
    """Base of layers that stand in the place of a layer inside them, `self.layer`."""

    layer: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _given(self, kwargs):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _set_mask_metadata(self, inputs: Any, outputs: Any, previous_mask: Any) -> None:
        # The layer inside has marked its own, unless it was only asked for their shapes.
        if any(isinstance(output, KerasTensor) for output in keras.tree.flatten(outputs)):
            super()._set_mask_metadata(inputs, outputs, previous_mask)  # type: ignore[misc]

    @property
    def metrics(self: Any) -> list[keras.metrics.Metric]:
        """The metrics of all layers inside, each once.

        Those of a model are left out, as Keras leaves them out of a model around it: its loss, say,
        is that of its own `fit`. A model around this layer would reset and report it as its own.
        """
        layers = [layer for layer in all_layers(self) if not isinstance(layer, keras.Model)]
        metrics = {id(m): m for layer in layers for m in layer._metrics}
        return list(metrics.values())


# By this AutoGraph knows that there is nothing to rewrite.
Wraps.__call__.autograph_info__ = {}  # type: ignore[attr-defined]


_here = threading.local()


@contextlib.contextmanager
def _given(layer: Any, kwargs: dict[str, Any]) -> Iterator[None]:
    """Notes what a call of a layer is given, to be told from what Keras adds to it."""
    before = getattr(_here, "call", None)
    _here.call = layer, dict(kwargs)
    try:
        yield
    finally:
        _here.call = before


def _taken(layer: Any) -> dict[str, Any] | None:
    """What the call of a layer was given by name; None if its `call` is called by itself."""
    found = getattr(_here, "call", None)
    if found is None or found[0] is not layer:
        return None
    _here.call = None  # once: what is called from here on is another call
    return found[1]


def inner_call(
    layer: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """What is to be called where Keras calls the `call` of a layer that wraps another.

    The layer inside is called as the wrapper was, and Keras looks for its masks itself: what it has
    found for the wrapper is not handed on, as it would count among the arguments. Where only
    `call` was called, as `keras.layers.TimeDistributed` does, past the casts and masks of
    `__call__`, that is also what is done to the layer inside.

    Args:
        layer: the wrapper.
        args, kwargs: the arguments of its `call`.

    Returns:
        The layer inside or its `call`, and the arguments, with the training flag by its name.
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


def masks_of_sequences(sequences: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The masks of a recurrent layer's call: the one it applies, and the one for its outputs.

    Keras 3 hands on the mask that the sequences carry where they are the only tensor.

    Args:
        sequences: the layer's first argument.
        given: its other arguments but for the training flag, by their names.
    """
    mask, carried = given.get("mask"), get_mask(sequences)
    if mask is not None:
        return mask, mask
    state = given.get("initial_state")
    alone = state is None or not tf.nest.flatten(state)
    return carried if alone else None, carried


def mark(layer: Any, inputs: Any, outputs: Any) -> None:
    """Gives a layer's outputs the masks that they would have from a call of it."""
    if layer.supports_masking:
        layer._set_mask_metadata(inputs, outputs, get_mask(inputs))


def converted(layer: Any, sequences: tf.Tensor) -> tf.Tensor:
    """A layer's first argument in the dtype that it computes in, as a wrapper of Keras 3 has it."""
    return sequences


def adopt_call(wrapper: keras.Layer, layer: keras.Layer) -> None:
    """Lets Keras treat calls of `wrapper` as it would treat calls of `layer`.

    Input conversion, masks, the training flag and the shapes for `build` are all taken from
    signatures and flags that Keras reads off the layer it calls.
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
