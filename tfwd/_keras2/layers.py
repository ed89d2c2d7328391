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
    """The flags of the present Keras call: training, its layer and inputs, autocast.

    A layer that runs again in backward must see the flags of its forward run. That call has already
    ended. And flags that a layer sets while it runs must not affect later layers.
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

    Keras 2 lets AutoGraph convert the call of a custom layer, with everything that it calls. Here
    there is nothing to convert. The inner layers are still converted separately.
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
        # Keras creates its state when it loads a built model. This model was not built then.
        optimizer.build(layer.trainable_variables)


def build_config(layer: Any) -> dict[str, Any] | None:
    """Returns a config from which a layer of the same class can be built, or None.

    A layer does not know its shape if its `build` was called by hand. Then its input specification
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
    """Returns True if inner layers are not built yet, and may get weights when they are."""
    return any(
        not (inner.built or _never_has_weights(inner)) or awaits_call(inner)
        for inner in sublayers(layer)
    )


def _never_has_weights(layer: Any) -> bool:
    """Returns True for a layer of Keras that needs no building, such as `ReLU`."""
    own = type(layer).__module__.startswith("keras.")
    made_by_call = isinstance(layer, keras.layers.MultiHeadAttention)
    return own and not made_by_call and generic_utils.is_default(layer.build)


def embedding_matrix(layer: Any) -> tf.Variable:
    """Returns the variable of an Embedding layer."""
    return layer.embeddings


def is_quantized(layer: Any) -> bool:
    """Returns True if the layer computes with weights of 8 or 4 bits. Keras 2 has none."""
    return False


def floating_policy(layer: Any) -> Any:
    """Returns the dtype policy of a layer."""
    return layer.dtype_policy


def add_loss(layer: Any, loss: tf.Tensor) -> None:
    """Adds a loss to a layer that an inner layer has added.

    Inner layers may store losses from the time when a model was built around them. They have no
    losses of their own now, so Keras would take the stored ones for losses of this call.
    """
    for inner in all_layers(layer)[1:]:
        inner._losses.clear()
    layer.add_loss(loss)


def own_weights(layer: Any) -> list[tf.Variable]:
    """Returns the weights of a layer itself that are created trainable, frozen or not."""
    return list(layer._trainable_weights)


def held_weights(layer: Any) -> list[tf.Variable]:
    """Returns all weights of a layer itself."""
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def is_altered(layer: Any) -> bool:
    """Returns True if a call does more than the layer's usual `call` on its weights.

    Examples are losses of outputs, and an embedding with sparse inputs or outputs.
    """
    return bool(
        layer.activity_regularizer
        or getattr(layer, "sparse", False)
        or getattr(layer, "_use_one_hot_matmul", False)
    )
