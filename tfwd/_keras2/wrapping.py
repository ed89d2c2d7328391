"""How a wrapper takes over the call of the layer inside it, on Keras 2.15."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.utils import layer_utils

from tfwd._keras2.layers import get_mask
from tfwd._keras2.substitution import Substitution


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
