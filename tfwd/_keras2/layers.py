"""Layers of Keras 2.15: their build, call state, masks and sublayers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import base_layer_utils, functional, keras_tensor
from keras.src.mixed_precision import autocast_variable
from keras.src.utils import generic_utils

KerasTensor: Any = keras_tensor.KerasTensor
Datasets: Any = keras.utils.Sequence
GRAPHS = (keras.Sequential, functional.Functional)


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


class NoAutographLayer:
    """Base of layers that run other layers with functions of TensorFlow around them.

    Keras 2 lets AutoGraph rewrite the call of a layer that is not its own, with all that it calls.
    Here there is nothing to rewrite, and layers inside are still rewritten on their own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "call" in vars(cls):
            vars(cls)["call"].autograph_info__ = {}  # by which AutoGraph knows what it need not do

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds the layer as it was when its config was saved."""
        super().build_from_config(_as_built(config))  # type: ignore[misc]


def get_mask(tensor: Any) -> Any:
    """The mask that Keras keeps with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see; None takes it away."""
    tensor._keras_mask = mask


def build_by_call(layer: Any, args: tuple, kwargs: dict) -> None:
    """Builds a layer that only a call can build, by a call whose result is thrown away."""
    with tf.__internal__.FuncGraph("tfwd_build").as_default():
        layer(*args, **kwargs)


def has_default_build(layer: Any) -> bool:
    """Whether the layer has no `build` of its own, so that only a call creates its weights."""
    return generic_utils.is_default(layer.build) and not isinstance(layer, GRAPHS)


def builds_by_shape(layer: Any) -> bool:
    """Whether the layer can make its weights of the shape of its inputs alone.

    A model without a `build` of its own calls itself on a placeholder of that shape.
    """
    return not has_default_build(layer) or isinstance(layer, keras.Model)


def accepts_training(layer: Any) -> bool:
    """Whether the layer's `call` takes a `training` argument."""
    return layer._call_spec.expects_training_arg


def sublayers(layer: Any) -> list[Any]:
    """The layers that a layer holds directly, in Keras's own order."""
    return list(layer._flatten_layers(recursive=False, include_self=False))


def all_layers(layer: Any) -> list[Any]:
    """The layer, and all layers in it at any depth."""
    return list(layer._flatten_layers())


def build(layer: Any, *args: Any, **kwargs: Any) -> None:
    """Builds a layer by its own `build`, in the layer's name, as a call of it would."""
    with tf.name_scope(layer.name):
        layer.build(*args, **kwargs)
    keras.layers.Layer.build(layer, *args[:1], **kwargs)  # which notes the shape, for files


def build_from_config(layer: Any, config: dict[str, Any]) -> None:
    """Builds a layer as the config of its build says, which may come out of a file."""
    layer.build_from_config(_as_built(config))
    optimizer = getattr(layer, "optimizer", None)
    if layer.built and isinstance(optimizer, keras.optimizers.Optimizer):
        # Keras makes its state when it reads a model that is built, as this was not.
        optimizer.build(layer.trainable_variables)


def has_weights(layer: Any) -> bool:
    """Whether the layer is built, with all weights that it will have.

    A layer without a `build` of its own is marked as built before its call makes the layers in it.
    One that has a `build` may leave layers in it to be built by its call. What a call has left
    unbuilt is not used, and will have no weights.
    """
    return layer.built and (not awaits_call(layer) or layer._saved_model_inputs_spec is not None)


def awaits_call(layer: Any) -> bool:
    """Whether layers in this one are not built yet, and may have weights when they are."""
    return any(
        not (inner.built or _never_has_weights(inner)) or awaits_call(inner)
        for inner in sublayers(layer)
    )


def _never_has_weights(layer: Any) -> bool:
    """Whether it is one of Keras's layers that need no building, as `ReLU`."""
    own = type(layer).__module__.startswith("keras.")
    made_by_call = isinstance(layer, keras.layers.MultiHeadAttention)
    return own and not made_by_call and generic_utils.is_default(layer.build)


def embedding_matrix(layer: Any) -> tf.Variable:
    """The variable of an Embedding layer."""
    return layer.embeddings


def is_quantized(layer: Any) -> bool:
    """Whether the layer computes with weights of 8 or 4 bits: Keras 2 has no such layers."""
    return False


def floating_policy(layer: Any) -> Any:
    """The dtype policy of a layer."""
    return layer.dtype_policy


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


def held_weights(layer: Any) -> list[tf.Variable]:
    """All weights that a layer holds itself."""
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def is_altered(layer: Any) -> bool:
    """Whether a call does more than the layer's usual `call` on its weights.

    So it is with losses of outputs, and with an embedding that takes or gives sparse tensors.
    """
    return bool(
        layer.activity_regularizer
        or getattr(layer, "sparse", False)
        or getattr(layer, "_use_one_hot_matmul", False)
    )
