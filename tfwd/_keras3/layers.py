"""What a layer of Keras 3 is beyond its public API: its call and its parts.

Keras offers no public way to read the flags of the call that is under way, or to hold them still
while a layer is run a second time. What there is, is private or nearly so and changes between
releases.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state as _global_state

_CALL_CONTEXT = "current_call_ctx"

KerasTensor = keras.KerasTensor
Datasets = keras.utils.PyDataset


class Perturbs:
    """Base of layers that run other layers with functions of TensorFlow around them."""


class Wraps:
    """Base of layers that stand in the place of a layer inside them, `self.layer`."""

    @property
    def metrics(self: Any) -> list[keras.metrics.Metric]:
        """The metrics of all layers inside, each once.

        Those of a model are left out, as Keras leaves them out of a model around it: its loss, say,
        is that of its own `fit`. A model around this layer would reset and report it as its own.
        """
        layers = [layer for layer in all_layers(self) if not isinstance(layer, keras.Model)]
        metrics = {id(m): m for layer in layers for m in layer._metrics}
        return list(metrics.values())


class CallState:
    """The flags of the Keras call that is under way: training, other context arguments, autocast.

    A layer that is run again in backward must see the flags of its forward run, when that call is
    long over; and what a layer sets while it runs must not reach the layers after it.
    """

    def __init__(self) -> None:
        context = _global_state.get_global_attribute(_CALL_CONTEXT)
        self._values = {} if context is None else dict(vars(context))
        self._autocast = keras.src.backend.get_autocast_scope()

    @contextlib.contextmanager
    def restored(self, training: bool) -> Iterator[None]:
        """Runs the body as part of that call, with the given training flag."""
        before = _global_state.get_global_attribute(_CALL_CONTEXT)
        # The entry layer is nobody: an entry layer clears the losses of its sublayers.
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


def get_mask(tensor: Any) -> Any:
    """The mask that Keras keeps with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see."""
    tensor._keras_mask = mask


def build_by_call(layer: keras.Layer, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build, by a call whose result is thrown away."""
    keras.src.backend.compute_output_spec(layer.__call__, *args, **kwargs)


def has_default_build(layer: keras.Layer) -> bool:
    """Whether the layer has no `build` of its own, so that only a call creates its weights."""
    return keras.src.utils.python_utils.is_default(layer.build) and bool(layer._layers)


def builds_by_shape(layer: keras.Layer) -> bool:
    """Whether the layer can make its weights of the shape of its inputs alone."""
    return not has_default_build(layer)


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


def by_name(layer: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """A call's arguments as the layer inside takes them: as they are."""
    return args, kwargs


def accepts_training(layer: keras.Layer) -> bool:
    """Whether the layer's `call` takes a `training` argument."""
    return layer._call_has_training_arg


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """The layers that a layer holds directly, in Keras's own order."""
    return list(layer._layers)


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """The layer, and all layers in it at any depth."""
    return layer._flatten_layers()


def build(layer: keras.Layer, *args: Any, **kwargs: Any) -> None:
    """Builds a layer by its own `build`."""
    layer.build(*args, **kwargs)
    layer.built = True


def build_from_config(layer: keras.Layer, config: dict[str, Any]) -> None:
    """Builds a layer as the config of its build says, which may come out of a file."""
    layer.build_from_config(config)


def has_weights(layer: keras.Layer) -> bool:
    """Whether the layer is built, with all weights that it will have.

    A layer without a `build` of its own is marked as built when it is loaded, although the layers
    in it are not. One that has a `build` may leave layers in it to be built by its call. What a
    call has left unbuilt is not used, and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or getattr(layer, "_called", False))


def awaits_call(layer: keras.Layer) -> bool:
    """Whether layers in this one are not built yet, and may have weights when they are."""
    is_default = keras.src.utils.python_utils.is_default
    return any(
        not (inner.built or is_default(inner.build)) or awaits_call(inner)
        for inner in sublayers(layer)
    )


def embedding_matrix(layer: keras.layers.Embedding) -> keras.Variable:
    """The variable of an Embedding layer, whatever the layer makes of it."""
    return layer._embeddings


def add_loss(layer: keras.Layer, loss: Any) -> None:
    """Adds a loss to a layer that was added by a layer inside."""
    layer.add_loss(loss)


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """The weights that a layer holds itself and that were made to be trained, frozen or not."""
    return list(layer._trainable_variables)


def is_altered(layer: keras.Layer) -> bool:
    """Whether a call does more than the layer's `call` on its weights: LoRA, int8, extra losses."""
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or layer.activity_regularizer
    )
