"""What a layer of Keras 3 is beyond its public API: its call and its parts.

Keras offers no public way to read the flags of the call that is under way, or to hold them still
while a layer is run a second time. What there is, is private or nearly so and changes between
releases.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state

from tfwd._keras3.building import building_outside
from tfwd._keras_shared.overriding import is_overridden

_CALL_CONTEXT = "current_call_ctx"

KerasTensor = keras.KerasTensor
Datasets = keras.utils.PyDataset


class Perturbs:
    """Base of layers that run other layers with functions of TensorFlow around them."""


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
    return keras.src.backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see; None takes it away."""
    keras.src.backend.set_keras_mask(tensor, mask)


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


def build_by_call(layer: keras.Layer, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build, by a call whose result is thrown away."""
    with building_outside(layer):
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


def is_quantized(layer: keras.Layer) -> bool:
    """Whether the layer computes with weights of 8 or 4 bits."""
    return getattr(layer, "quantization_mode", None) is not None


def floating_policy(layer: keras.Layer) -> Any:
    """The dtype policy of a layer, without a mark that it is quantized.

    A layer around it that had the mark would be asked by Keras to compute on 8 bits itself.
    """
    policy = layer.dtype_policy
    return policy._source_name if is_quantized(layer) else policy


def add_loss(layer: keras.Layer, loss: Any) -> None:
    """Adds a loss to a layer that was added by a layer inside."""
    layer.add_loss(loss)


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """The weights that a layer holds itself and that were made to be trained, frozen or not."""
    return list(layer._trainable_variables)


def is_altered(layer: keras.Layer) -> bool:
    """Whether a call does more than the layer's `call` on its weights.

    So it is with LoRA, int8, losses of outputs, and `keras.remat`.
    """
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or getattr(layer, "_remat_mode", None)
        or layer.activity_regularizer
    )


def is_plain(layer: Any, kind: type, ours: bool = False) -> bool:
    """Whether a layer is one of a class of Keras, and a call of it computes what the class says.

    Args:
        layer: any layer.
        kind: the class.
        ours: whether what classes of tfwd's own override does not count.
    """
    if not isinstance(layer, kind) or is_altered(layer):
        return False
    return not is_overridden(layer, kind, _ON_INSTANCES, ours)


# What Keras 3 puts on each layer itself, around the methods of its class.
_ON_INSTANCES: frozenset[str] = frozenset({"build", "quantize"})
