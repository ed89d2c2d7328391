"""What a layer of Keras 2.15 is beyond its public API: its call, its parts, its copies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import base_layer_utils, functional, keras_tensor
from keras.src.engine.data_adapter import unpack_x_y_sample_weight  # noqa: F401
from keras.src.mixed_precision import autocast_variable
from keras.src.utils import generic_utils, layer_utils

KerasTensor: Any = keras_tensor.KerasTensor
Datasets: Any = keras.utils.Sequence
_graphs = (keras.Sequential, functional.Functional)


class CallState:
    """The flags of the Keras call that is under way: training, its layer and inputs, autocast.

    A layer that is run again in backward must see the flags of its forward run, when that call is
    long over; and what a layer sets while it runs must not reach the layers after it.
    """

    def __init__(self) -> None:
        self._values = dict(base_layer_utils.call_context()._state)
        self._autocast = getattr(autocast_variable._autocast_dtype, "dtype", None)

    @contextlib.contextmanager
    def restored(self, training: bool) -> Iterator[None]:
        """Runs the body as part of that call, with the given training flag."""
        graph = not tf.executing_eagerly()
        values = {**self._values, "training": training, "build_graph": graph}
        with (
            base_layer_utils.call_context().enter(**values),
            autocast_variable.enable_auto_cast_variables(self._autocast),
        ):
            yield


def _as_built(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a build with its shape as it was before it went into a file."""
    shape = config.get("input_shape")
    if isinstance(shape, list) and not any(isinstance(size, (list, tuple)) for size in shape):
        return {**config, "input_shape": tuple(shape)}
    return config


class Perturbs:
    """Base of layers that run other layers with functions of TensorFlow around them.

    Keras 2 lets AutoGraph rewrite the call of a layer that is not its own, with all that it calls.
    Here there is nothing to rewrite, and layers inside are still rewritten on their own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "call" in vars(cls):
            vars(cls)["call"].autograph_info__ = {}  # by which AutoGraph knows what it need not do

    @property
    def weights(self) -> list[tf.Variable]:
        """The weights in the order of the layer inside, which for a model goes layer by layer."""
        inner = getattr(self, "layer", None)
        if inner is None:
            return super().weights  # type: ignore[misc]
        # A model that is not built has none to tell of.
        return inner.weights if inner.built else []

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the layer as it was when its config was saved."""
        super().build_from_config(_as_built(config))  # type: ignore[misc]


def get_mask(tensor: Any) -> Any:
    """The mask that Keras keeps with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see."""
    tensor._keras_mask = mask


def build_by_call(layer: Any, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build, by a call whose result is thrown away."""
    with tf.__internal__.FuncGraph("tfwd_build").as_default():
        layer(*args, **kwargs)


def has_default_build(layer: Any) -> bool:
    """Whether the layer has no `build` of its own, so that only a call creates its weights."""
    return generic_utils.is_default(layer.build) and not isinstance(layer, _graphs)


def adopt_call(wrapper: Any, layer: Any) -> None:
    """Lets Keras treat calls of `wrapper` as it would treat calls of `layer`.

    Input conversion, masks and the training flag are all taken from the call's signature and from
    flags that Keras reads off the layer it calls.
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
    wrapper._autocast = layer._autocast
    wrapper.supports_masking = layer.supports_masking
    # The layer's own call marks its outputs, but for a lookup, which is not the layer's.
    lookup = type(layer).call is keras.layers.Embedding.call
    wrapper._compute_output_and_mask_jointly = not lookup
    wrapper._supports_ragged_inputs = getattr(layer, "_supports_ragged_inputs", False)


def accepts_training(layer: Any) -> bool:
    """Whether the layer's `call` takes a `training` argument."""
    return layer._call_spec.expects_training_arg


def sublayers(layer: Any) -> list[Any]:
    """The layers that a layer holds directly, in Keras's own order."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def all_layers(layer: Any) -> list[Any]:
    """The layer, and all layers in it at any depth."""
    return list(layer._flatten_layers())


def serialize(layer: Any) -> dict[str, Any]:
    """A layer's config, by which a `.keras` file knows it again in another place.

    Without the shape to build it for, which Keras 2 reads back from a file as another type.
    """
    config = {**keras.saving.serialize_keras_object(layer), "shared_object_id": id(layer)}
    config.pop("build_config", None)
    return config


def build(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Builds a layer by its own `build`, in the layer's name, as a call of it would."""
    with tf.name_scope(layer.name):
        layer.build(*args, **kwargs)
    keras.layers.Layer.build(layer, *args, **kwargs)  # which notes the shape, for files


def build_from_config(layer: Any, config: dict[str, Any]) -> None:
    """Builds a layer as the config of its build says, which may come out of a file."""
    layer.build_from_config(_as_built(config))


def has_weights(layer: Any) -> bool:
    """Whether the layer is built, with all weights that it will have.

    A layer without a `build` of its own is marked as built before its call makes the layers in it.
    """
    if not layer.built:
        return False
    return not has_default_build(layer) or all(inner.built for inner in sublayers(layer))


def embedding_matrix(layer: Any) -> tf.Variable:
    """The variable of an Embedding layer."""
    return layer.embeddings


def add_loss(layer: Any, loss: tf.Tensor) -> None:
    """Adds a loss to a layer that was added by a layer inside.

    What the layers inside keep from the time when a model was put together around them would be
    taken for losses of this call, since they have none of their own now.
    """
    for inner in all_layers(layer)[1:]:
        inner._losses.clear()
    layer.add_loss(loss)


def own_weights(layer: Any) -> list[tf.Variable]:
    """The weights that a layer holds itself and that were made to be trained, frozen or not."""
    return list(layer._trainable_weights)


def is_altered(layer: Any) -> bool:
    """Whether a call does more than the layer's `call` on its weights: extra losses."""
    return bool(layer.activity_regularizer)


def is_layer_graph(model: Any) -> bool:
    """Whether it is a Sequential or functional model of Keras's own class, which can be cloned."""
    return isinstance(model, _graphs) and type(model).__module__.startswith("keras.")


def clone(model: Any, function: Callable[[Any], Any]) -> Any:
    """A Sequential or functional model with other layers, in nested models too.

    Args:
        model: it is not changed.
        function: from each layer to the one that is to stand in its place, or to itself.
    """

    def replaced(layer: Any) -> Any:
        if isinstance(layer, keras.layers.InputLayer):
            return layer
        return clone(layer, function) if is_layer_graph(layer) else function(layer)

    if isinstance(model, keras.Sequential):
        copy = keras.models.clone_model(model, clone_function=replaced)
    else:
        copy = _rebuilt(model, replaced)
    if getattr(model, "optimizer", None) is not None:
        copy.compile_from_config(model.get_compile_config())
    return copy


def _rebuilt(model: Any, replaced: Callable[[Any], Any]) -> Any:
    """A functional model of other layers, call by call.

    Keras's own way counts the calls of a layer by its name and kind, which are others here.
    """
    layers: dict[int, Any] = {}
    tensors: dict[int, Any] = {}

    def other(value: Any) -> Any:
        return tensors.get(id(value), value)

    for layer in model._input_layers:
        copy = keras.layers.InputLayer.from_config(layer.get_config())
        tensors[id(layer.output)] = copy.output
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if node.is_input:
                continue
            if id(node.layer) not in layers:
                layers[id(node.layer)] = replaced(node.layer)
            args, kwargs = tf.nest.map_structure(other, (node.call_args, node.call_kwargs))
            outputs = layers[id(node.layer)](*args, **kwargs)
            pairs = zip(tf.nest.flatten(node.outputs), tf.nest.flatten(outputs), strict=True)
            tensors.update({id(before): after for before, after in pairs})
    given = (model._nested_inputs, model._nested_outputs)
    inputs, outputs = tf.nest.map_structure(other, given)
    return type(model)(inputs, outputs, name=model.name)


def tie(dense: Any, kernel: tf.Variable, bias: tf.Variable | None) -> Any:
    """Gives a layer that is not built the variables of others, and returns it as a built one."""
    dense.kernel = kernel
    dense.bias = bias
    dense.full_output_shape = dense.partial_output_shape
    dense.built = True
    return dense


# What a layer's constructor makes for the layer itself, and a copy must not take from another.
_OWN_STATE = {
    "_call_spec",
    "_callable_losses",
    "_checkpoint",
    "_dtype_policy",
    "_inbound_nodes_value",
    "_losses",
    "_metrics",
    "_metrics_lock",
    "_name",
    "_non_trainable_weights",
    "_obj_reference_counts_dict",
    "_outbound_nodes_value",
    "_predict_counter",
    "_random_generator",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
    "_stateful",
    "_test_counter",
    "_thread_local",
    "_train_counter",
    "_trainable_weights",
    "_updates",
    "predict_function",
    "test_function",
    "train_function",
    "train_tf_function",
}


def share(
    layer: Any,
    cls: type | None = None,
    leave_out: frozenset[str] = frozenset(),
    replace: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """A second layer on the same variables and sublayers as the first.

    Args:
        layer: the layer; it is not changed.
        cls: the class of the second layer, by default that of the first.
        leave_out: attributes that the second one shall not have.
        replace: called with each attribute; what it returns is the second layer's.

    Raises:
        ValueError: if the second layer does not come out with the weights of the first.
    """
    kind: Any = cls or type(layer)
    copy = kind.__new__(kind)
    base = keras.Model if issubclass(kind, keras.Model) else keras.layers.Layer
    base.__init__(copy, name=layer.name, dtype=layer.dtype_policy)
    generator = vars(layer).get("_random_generator")
    if generator is not None:  # Keras asks for it as soon as anything is set, and does not track it
        object.__setattr__(copy, "_random_generator", generator)
    for name, attribute in vars(layer).items():
        if name in _OWN_STATE or name in leave_out or name.startswith("_self_"):
            continue
        setattr(copy, name, replace(attribute))
    if [id(v) for v in copy.weights] != [id(v) for v in layer.weights]:
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} holds layers where Keras does "
            "not see them, so that it cannot be taken apart"
        )
    return copy
