"""Layers of Keras 3: their build, call state, masks, sublayers and wrappers.

A wrapper takes over the call of the layer inside it. Keras has no public way to read the flags of
the current call, or to keep them while a layer runs a second time. So this module uses private
names, and public names that Keras does not document. They change between releases.
"""

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
from keras.src.backend.common import global_state as _global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tfwd._keras_shared.keras_own_code import is_of_keras
from tfwd._keras_shared.method_replacement import named_after
from tfwd._keras_shared.model_graph import Graph

_SCOPE = "stateless_scope"


@contextlib.contextmanager
def building_outside(layer: keras.Layer) -> Iterator[None]:
    """Makes layers inside `layer` build outside inner scopes, if they are built in the body.

    `compute_output_spec` calls a layer in a scratch graph and in a `StatelessScope`. In this scope,
    Keras does not create a variable from a value. Stateful recurrent layers need such variables for
    their states. A build needs only shapes, so it needs neither the graph nor the scope.
    """
    around = _global_state.get_global_attribute(_SCOPE)
    builds = {}
    for inner in layer._flatten_layers():
        build = vars(inner).get("build")  # Keras wraps it on the instance
        is_default = keras.src.utils.python_utils.is_default
        if build is not None and not inner.built and not is_default(build):
            builds[inner] = build, _outside(build, around)
    for inner, (_, outside) in builds.items():
        # `object.__setattr__` avoids Keras's tracking of attributes.
        object.__setattr__(inner, "build", outside)
    try:
        yield
    finally:
        for inner, (build, outside) in builds.items():
            if vars(inner).get("build") is outside:
                object.__setattr__(inner, "build", build)


def _outside(build: Callable[..., None], around: Any) -> Callable[..., None]:
    @functools.wraps(build)
    def outside(*args: Any, **kwargs: Any) -> None:
        within = _global_state.get_global_attribute(_SCOPE)
        _global_state.set_global_attribute(_SCOPE, around)
        try:
            # In a scope that already existed, variables are created at the end of that scope.
            with tf.init_scope() if around is None else contextlib.nullcontext():
                build(*args, **kwargs)
        finally:
            _global_state.set_global_attribute(_SCOPE, within)

    return outside


_CALL_CONTEXT = "current_call_ctx"

KerasTensor = keras.KerasTensor
Datasets = keras.utils.PyDataset


class NoAutographLayer:
    """Base class of layers that call other layers inside functions of TensorFlow."""


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


def get_mask(tensor: Any) -> Any:
    """Returns the mask that Keras stores with a tensor, or None."""
    return keras.src.backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, for later Keras layers. None removes the mask."""
    keras.src.backend.set_keras_mask(tensor, mask)


def build_by_call(layer: keras.Layer, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build. The result of the call is discarded."""
    with building_outside(layer):
        keras.src.backend.compute_output_spec(layer.__call__, *args, **kwargs)


def has_default_build(layer: keras.Layer) -> bool:
    """Returns True if the layer does not define `build`, so only a call creates its weights."""
    return keras.src.utils.python_utils.is_default(layer.build) and bool(layer._layers)


def builds_by_shape(layer: keras.Layer) -> bool:
    """Returns True if the layer can create its weights from the shape of its inputs alone."""
    return not has_default_build(layer)


def accepts_training(layer: keras.Layer) -> bool:
    """Returns True if the layer's `call` has a `training` argument."""
    return layer._call_has_training_arg


def sublayers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers of a layer, in Keras's order."""
    return list(layer._layers)


def all_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layer and all layers in it at any depth."""
    return layer._flatten_layers()


def graph(layer: Any) -> Graph | None:
    """Returns the graph of a functional or sequential model, or None."""
    model = getattr(layer, "_functional", None) or layer
    if not isinstance(model, keras.src.models.Functional) or not is_of_keras(type(layer), "call"):
        return None
    nodes = [
        (node.operation, node.input_tensors, node.outputs)
        for depth in sorted(model._nodes_by_depth, reverse=True)
        for node in model._nodes_by_depth[depth]
        if not node.is_input
    ]
    return Graph(model.inputs, model.outputs, nodes)


def called_shape(layer: keras.Layer) -> Any:
    """Returns the shape of the inputs with which a layer was first called, or None."""
    return (layer.get_build_config() or {}).get("input_shape")


def build(layer: keras.Layer, *args: Any, **kwargs: Any) -> None:
    """Builds a layer with its own `build`."""
    layer.build(*args, **kwargs)
    layer.built = True


def build_from_config(layer: keras.Layer, config: dict[str, Any]) -> None:
    """Builds a layer from a build config, for example from a file."""
    layer.build_from_config(config)


def build_config(layer: keras.Layer) -> dict[str, Any] | None:
    """Returns a config from which a layer of the same class can be built, or None."""
    return layer.get_build_config()


def has_weights(layer: keras.Layer) -> bool:
    """Returns True if the layer is built and has all weights that it will have.

    A layer that does not define `build` is marked as built when it is loaded, although its inner
    layers are not built. A layer that defines `build` may let its call build inner layers. An inner
    layer that a call did not build is not used and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or getattr(layer, "_called", False))


def awaits_call(layer: keras.Layer) -> bool:
    """Returns True if an inner layer is not built yet, and may get weights in its build."""
    is_default = keras.src.utils.python_utils.is_default
    return any(
        not (inner.built or is_default(inner.build)) or awaits_call(inner)
        for inner in _called_layers(layer)
    )


def _called_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the direct sublayers that a layer may call.

    A functional model calls only the layers of its graph. It may hold other layers, for example the
    preprocessor of a keras-hub model.
    """
    functional = isinstance(layer, keras.src.models.Functional)
    return layer.layers if functional and is_of_keras(type(layer), "call") else sublayers(layer)


def embedding_matrix(layer: keras.layers.Embedding) -> keras.Variable:
    """Returns the variable of an Embedding layer, even if a property changes its value."""
    return layer._embeddings


def is_quantized(layer: keras.Layer) -> bool:
    """Returns True if the layer computes with weights of 8 or 4 bits."""
    return getattr(layer, "quantization_mode", None) is not None


def floating_policy(layer: keras.Layer) -> Any:
    """Returns the dtype policy of a layer without its quantization.

    With a quantized policy, Keras would ask an outer layer to compute with 8 bits itself.
    """
    policy = layer.dtype_policy
    return policy._source_name if is_quantized(layer) else policy


def add_loss(layer: keras.Layer, loss: Any) -> None:
    """Adds a loss to a layer that an inner layer has added."""
    keras.layers.Layer.add_loss(layer, loss)  # a functional model rejects it


def own_losses(layer: keras.Layer) -> list[Any]:
    """Returns the losses that a layer's own code has added, without losses of inner layers."""
    return layer._get_own_losses()


def own_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the layer's own weights that were created trainable, even if they are frozen."""
    return list(layer._trainable_variables)


def held_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the layer's own weights, without weights of inner layers."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def is_altered(layer: keras.Layer) -> bool:
    """Returns True if calling the layer does more than its class's `call` does with its weights.

    Examples are LoRA, int8, activity regularizers, and `keras.remat`.
    """
    return bool(
        getattr(layer, "lora_enabled", False)
        or getattr(layer, "quantization_mode", None)
        or getattr(layer, "_remat_mode", None)
        or layer.activity_regularizer
    )


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
