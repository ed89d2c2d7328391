"""Layers of Keras 2.15: their build, call state, masks, sublayers and wrappers.

A wrapper takes over the call of the layer inside it.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import base_layer_utils, functional, keras_tensor
from keras.src.mixed_precision import autocast_variable
from keras.src.utils import generic_utils, layer_utils

from tfwd._keras2.variables import Substitution
from tfwd._keras_shared.keras_own_code import is_of_keras
from tfwd._keras_shared.method_replacement import named_after
from tfwd._keras_shared.model_graph import Graph

KerasTensor: Any = keras_tensor.KerasTensor
Datasets: Any = keras.utils.Sequence
GRAPHS = (keras.Sequential, functional.Functional)


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


def _as_built(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a build config in which the shape is a tuple again, as before it was saved."""
    shape = config.get("input_shape")
    if isinstance(shape, list) and not any(isinstance(size, (list, tuple)) for size in shape):
        return {**config, "input_shape": tuple(shape)}
    return config


class NoAutographLayer:
    """Base class of layers that call other layers inside functions of TensorFlow.

    Keras 2 lets AutoGraph convert the call of a custom layer, and all functions that it calls. The
    calls of tfwd's layers need no conversion. The inner layers are still converted separately.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "call" in vars(cls):
            vars(cls)["call"].autograph_info__ = {}  # tells AutoGraph not to convert it

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the layer from a build config."""
        super().build_from_config(_as_built(config))  # type: ignore[misc]


def get_mask(tensor: Any) -> Any:
    """Returns the mask that Keras stores with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, for later Keras layers. None removes the mask."""
    tensor._keras_mask = mask


def build_by_call(layer: Any, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build. The result of the call is discarded."""
    with tf.__internal__.FuncGraph("tfwd_build").as_default():
        layer(*args, **kwargs)


def has_default_build(layer: Any) -> bool:
    """Returns True if the layer does not define `build`, so only a call creates its weights."""
    return generic_utils.is_default(layer.build) and not isinstance(layer, GRAPHS)


def builds_by_shape(layer: Any) -> bool:
    """Returns True if the layer can create its weights from the shape of its inputs alone.

    A model that does not define `build` calls itself on a placeholder of that shape.
    """
    return not has_default_build(layer) or isinstance(layer, keras.Model)


def accepts_training(layer: Any) -> bool:
    """Returns True if the layer's `call` has a `training` argument."""
    return layer._call_spec.expects_training_arg


def sublayers(layer: Any) -> list[Any]:
    """Returns the direct sublayers of a layer, in Keras's order."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def all_layers(layer: Any) -> list[Any]:
    """Returns the layer and all layers in it at any depth."""
    return list(layer._flatten_layers())


def graph(layer: Any) -> Graph | None:
    """Returns the graph of a functional or sequential model, or None."""
    if not isinstance(layer, functional.Functional) or not is_of_keras(type(layer), "call"):
        return None
    nodes = [
        (node.layer, node.keras_inputs, tf.nest.flatten(node.outputs))
        for depth in sorted(layer._nodes_by_depth, reverse=True)
        for node in layer._nodes_by_depth[depth]
        if not node.is_input
    ]
    return Graph(layer.inputs, layer.outputs, nodes) if nodes else None


def called_shape(layer: Any) -> Any:
    """Returns the shape of the inputs with which a layer was first called, or None."""
    return (layer.get_build_config() or {}).get("input_shape")


def build(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Builds a layer with its own `build`, in the layer's name scope, as a call would."""
    with tf.name_scope(layer.name):
        layer.build(*args, **kwargs)
    keras.layers.Layer.build(layer, *args[:1], **kwargs)  # stores the shape, for files


def build_from_config(layer: Any, config: dict[str, Any]) -> None:
    """Builds a layer from a build config, for example from a file."""
    layer.build_from_config(_as_built(config))
    optimizer = getattr(layer, "optimizer", None)
    if layer.built and isinstance(optimizer, keras.optimizers.Optimizer):
        # Keras creates the optimizer's state when it loads a built model, but not for this model.
        optimizer.build(layer.trainable_variables)


def build_config(layer: Any) -> dict[str, Any] | None:
    """Returns a config from which a layer of the same class can be built, or None.

    A layer does not know its input shape if a user called its `build`. Its input specification then
    has the sizes that matter.
    """
    config = layer.get_build_config()
    spec = layer.input_spec
    if config is None and isinstance(spec, keras.layers.InputSpec) and spec.axes:
        rank = spec.ndim or max(spec.min_ndim or 0, 1 + max(spec.axes))
        shape: list[int | None] = [None] * rank
        for axis, size in spec.axes.items():
            shape[axis] = size
        config = {"input_shape": tuple(shape)}
    return config


def has_weights(layer: Any) -> bool:
    """Returns True if the layer is built and has all weights that it will have.

    A layer that does not define `build` is marked as built before its call creates its inner
    layers. A layer that defines `build` may let its call build inner layers. An inner layer that a
    call did not build is not used and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or layer._saved_model_inputs_spec is not None)


def awaits_call(layer: Any) -> bool:
    """Returns True if an inner layer is not built yet, and may get weights in its build."""
    return any(
        not (inner.built or _never_has_weights(inner)) or awaits_call(inner)
        for inner in _called_layers(layer)
    )


def _called_layers(layer: Any) -> list[Any]:
    """Returns the direct sublayers that a layer may call.

    A functional model calls only the layers of its graph. It may hold other layers, for example a
    preprocessor.
    """
    is_graph = isinstance(layer, functional.Functional) and not isinstance(layer, keras.Sequential)
    if not (is_graph and is_of_keras(type(layer), "call")):
        return sublayers(layer)
    called = [node.layer for nodes in layer._nodes_by_depth.values() for node in nodes]
    return list({id(inner): inner for inner in called}.values())


def _never_has_weights(layer: Any) -> bool:
    """Returns True for a layer of Keras that has no weights to build, such as `ReLU`."""
    made_by_call = isinstance(layer, keras.layers.MultiHeadAttention)
    return is_of_keras(type(layer)) and not made_by_call and generic_utils.is_default(layer.build)


def embedding_matrix(layer: Any) -> tf.Variable:
    """Returns the variable of an Embedding layer."""
    return layer.embeddings


def is_quantized(layer: Any) -> bool:
    """Returns True if the layer computes with weights of 8 or 4 bits. Keras 2 has no such layer."""
    return False


def floating_policy(layer: Any) -> Any:
    """Returns the dtype policy of a layer."""
    return layer.dtype_policy


def add_loss(layer: Any, loss: tf.Tensor) -> None:
    """Adds a loss to a layer that an inner layer has added.

    Inner layers may store losses from the construction of a model around them. Keras would treat
    these losses as losses of this call. So they are removed first.
    """
    for inner in all_layers(layer)[1:]:
        inner._losses.clear()
    layer.add_loss(loss)


def own_losses(layer: Any) -> list[Any]:
    """Returns the losses that a layer's own code has added, without losses of inner layers."""
    return [*layer._eager_losses, *layer._losses]


def own_weights(layer: Any) -> list[tf.Variable]:
    """Returns the layer's own weights that were created trainable, even if they are frozen."""
    return list(layer._trainable_weights)


def held_weights(layer: Any) -> list[tf.Variable]:
    """Returns the layer's own weights, without weights of inner layers."""
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def is_altered(layer: Any) -> bool:
    """Returns True if calling the layer does more than the usual `call` does with its weights.

    Examples are activity regularizers, and an embedding with sparse inputs or outputs.
    """
    return bool(
        layer.activity_regularizer
        or getattr(layer, "sparse", False)
        or getattr(layer, "_use_one_hot_matmul", False)
    )


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


class Wraps:
    """Base class of layers that replace a layer inside them, `self.layer`."""

    layer: Any

    @property
    def weights(self) -> list[tf.Variable]:
        """The weights in the order of the inner layer. For a model the order is layer by layer.

        Weights of parametrizations come last.
        """
        # A model that is not built has no weights.
        inner = self.layer.weights if self.layer.built else []
        gains = vars(self).get("gains")
        return inner if gains is None else [*inner, *gains.weights]

    @property
    def kernel(self) -> Any:
        """The kernel of the inner layer.

        An outer wrapper may set another kernel before each call, which the call then uses. An
        example is the weight normalization of tensorflow-addons.
        """
        return self.layer.kernel

    @kernel.setter
    def kernel(self, value: tf.Tensor) -> None:
        vars(self)["_given_kernel"] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The `__call__` of a recurrent layer has another order of arguments than its `call`.
        names = _positional(type(self.layer).__call__)
        if names and len(args) > 1:
            kwargs = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
            args = args[:1]
        given = vars(self).pop("_given_kernel", None)
        if given is None:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        with Substitution([(self.layer.kernel, given)], capture=False) as scope:
            outputs = super().__call__(*args, **kwargs)  # type: ignore[misc]
        for loss in scope.losses:
            self.add_loss(loss)  # type: ignore[attr-defined]
        return outputs


def _positional(function: Callable[..., Any]) -> list[str]:
    """Returns the names of a method's positional arguments, or [] if it does not list them."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return []
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def mark(layer: Any, inputs: Any, outputs: Any) -> None:
    """Attaches the masks to a layer's outputs that a call of the layer would attach."""
    if layer.supports_masking:
        graph = not tf.executing_eagerly()
        layer._set_mask_metadata(inputs, outputs, get_mask(inputs), graph)


def converted(layer: Any, sequences: tf.Tensor) -> tf.Tensor:
    """Returns a layer's first argument in the dtype to which a call of the layer casts it."""
    return layer._maybe_cast_inputs(sequences) if layer._autocast else sequences


def adopt_call(wrapper: Any, layer: Any) -> None:
    """Makes Keras treat calls of `wrapper` like calls of `layer`.

    Keras reads the call signature and the flags of the layer that it calls. They determine input
    conversion, masks and the training flag.
    """
    spec = layer._call_spec.full_argspec
    if "training" not in [*spec.args, *spec.kwonlyargs]:
        spec = spec._replace(
            kwonlyargs=[*spec.kwonlyargs, "training"],
            kwonlydefaults={**(spec.kwonlydefaults or {}), "training": None},
        )
    wrapper._call_spec = layer_utils.CallFunctionSpec(spec)
    wrapper._call_spec.expects_mask_arg = layer._call_spec.expects_mask_arg
    wrapper._call_spec.expects_training_arg = True
    # The inner layer casts its inputs itself, because a cast tensor loses its mask.
    wrapper._autocast = False
    wrapper.supports_masking = layer.supports_masking
    wrapper._compute_output_and_mask_jointly = True  # the inner layer's call does it
    wrapper._supports_ragged_inputs = getattr(layer, "_supports_ragged_inputs", False)


def inner_call(
    layer: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """Returns the function to call where Keras calls the `call` of a wrapper.

    Args:
        layer: Wrapper.
        args: Positional arguments of its `call`.
        kwargs: Keyword arguments of its `call`.

    Returns:
        The inner layer and the arguments. All arguments except the first are keyword arguments,
        because a SavedModel is traced with positional arguments, which the `__call__` of layers
        does not accept.
    """
    if layer._call_spec.full_argspec.varargs:
        return layer.layer, args, kwargs
    named = dict(zip(layer._call_spec.arg_names[1:], args[1:], strict=False))
    return layer.layer, args[:1], {**named, **kwargs}
