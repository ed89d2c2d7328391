"""What a layer of Keras 2.15 is beyond its public API: its call and its parts."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine import base_layer_utils, functional, keras_tensor
from keras.src.mixed_precision import autocast_variable
from keras.src.utils import generic_utils, layer_utils

from tfwd._keras2.substitution import Substitution
from tfwd._keras_shared.overriding import is_overridden

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


class Perturbs:
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


class Wraps:
    """Base of layers that stand in the place of a layer inside them, `self.layer`."""

    layer: Any

    @property
    def weights(self) -> list[tf.Variable]:
        """The weights in the order of the layer inside, which for a model goes layer by layer."""
        # A model that is not built has none to tell of.
        return self.layer.weights if self.layer.built else []

    @property
    def kernel(self) -> Any:
        """The kernel of the layer inside.

        A wrapper around this one that computes another kernel, as tensorflow-addons' weight
        normalization does, sets it before each call: then the call is on that one.
        """
        return self.layer.kernel

    @kernel.setter
    def kernel(self, value: tf.Tensor) -> None:
        vars(self)["_given_kernel"] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A recurrent layer's own takes its arguments in another order than its `call`.
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
    """The names of a method's positional arguments; empty if it does not say them."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return []
    return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]


def get_mask(tensor: Any) -> Any:
    """The mask that Keras keeps with a tensor, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Gives a tensor a mask that later Keras layers will see; None takes it away."""
    tensor._keras_mask = mask


def masks_of_sequences(sequences: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    """The masks of a recurrent layer's call: the one it applies, and the one for its outputs.

    In Keras 2 a mask that is given counts, be it None, and else the one that the sequences carry.

    Args:
        sequences: the layer's first argument.
        given: its other arguments but for the training flag, by their names.
    """
    mask = given["mask"] if "mask" in given else get_mask(sequences)
    return mask, mask


def mark(layer: Any, inputs: Any, outputs: Any) -> None:
    """Gives a layer's outputs the masks that they would have from a call of it."""
    if layer.supports_masking:
        graph = not tf.executing_eagerly()
        layer._set_mask_metadata(inputs, outputs, get_mask(inputs), graph)


def converted(layer: Any, sequences: tf.Tensor) -> tf.Tensor:
    """A layer's first argument in the dtype that it computes in, as a call of it would have it."""
    return layer._maybe_cast_inputs(sequences) if layer._autocast else sequences


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
    # The layer casts its inputs itself: a tensor that is cast has lost its mask.
    wrapper._autocast = False
    wrapper.supports_masking = layer.supports_masking
    wrapper._compute_output_and_mask_jointly = True  # the call of the layer inside does
    wrapper._supports_ragged_inputs = getattr(layer, "_supports_ragged_inputs", False)


def inner_call(
    layer: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple, dict[str, Any]]:
    """What is to be called where Keras calls the `call` of a layer that wraps another.

    Args:
        layer: the wrapper.
        args, kwargs: the arguments of its `call`.

    Returns:
        The layer inside, and the arguments with all but the first by name: a SavedModel is traced
        with all of them by position, as layers' own calls do not take them.
    """
    if layer._call_spec.full_argspec.varargs:
        return layer.layer, args, kwargs
    named = dict(zip(layer._call_spec.arg_names[1:], args[1:], strict=False))
    return layer.layer, args[:1], {**named, **kwargs}


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
    keras.layers.Layer.build(layer, *args, **kwargs)  # which notes the shape, for files


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


def is_altered(layer: Any) -> bool:
    """Whether a call does more than the layer's usual `call` on its weights.

    So it is with losses of outputs, and with an embedding that takes or gives sparse tensors.
    """
    return bool(
        layer.activity_regularizer
        or getattr(layer, "sparse", False)
        or getattr(layer, "_use_one_hot_matmul", False)
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


# What Keras 2 puts on each layer itself, around the methods of its class.
_ON_INSTANCES: frozenset[str] = frozenset()
