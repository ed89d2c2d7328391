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


class Perturbs:
    """Base of layers that run other layers with functions of TensorFlow around them.

    Keras 2 lets AutoGraph rewrite the call of a layer that is not its own, with all that it calls.
    Here there is nothing to rewrite, and layers inside are still rewritten on their own.
    """

    def _autographed_call(self) -> Callable[..., Any]:
        return self.call  # type: ignore[attr-defined]


def get_mask(tensor: Any) -> Any:
    """The mask that Keras keeps with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see."""
    tensor._keras_mask = mask


def build(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Builds a layer that another one holds, its variables named and itself marked as by a call."""
    with tf.name_scope(layer.name):
        layer.build(*args, **kwargs)
    layer.built = True


def build_by_call(layer: Any, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build, by a call whose result is thrown away."""
    with tf.__internal__.FuncGraph("tfwd_build").as_default():
        layer(*args, **kwargs)


def has_default_build(layer: Any) -> bool:
    """Whether the layer has no `build` of its own, so that only a call creates its weights."""
    return generic_utils.is_default(layer.build)


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
    """A layer's config, from which it can be made again."""
    return keras.saving.serialize_keras_object(layer)


def has_weights(layer: Any) -> bool:
    """Whether the layer is built, with all weights that it will have.

    A layer without a `build` of its own is marked as built before its call makes the layers in it.
    """
    if not layer.built:
        return False
    return not has_default_build(layer) or all(inner.built for inner in sublayers(layer))


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

    copy = keras.models.clone_model(model, clone_function=replaced)
    if getattr(model, "optimizer", None) is not None:
        copy.compile_from_config(model.get_compile_config())
    return copy


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
    "_dtype_policy",
    "_inbound_nodes_value",
    "_losses",
    "_metrics",
    "_metrics_lock",
    "_name",
    "_non_trainable_weights",
    "_obj_reference_counts_dict",
    "_outbound_nodes_value",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
    "_stateful",
    "_thread_local",
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
