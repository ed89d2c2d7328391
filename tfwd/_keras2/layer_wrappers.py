"""Base classes of wrappers on Keras 2.15. A wrapper takes over the call of the layer inside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.utils import layer_utils

from tfwd._keras2.layer_building import _as_built
from tfwd._keras2.layers import get_mask
from tfwd._keras2.substitution import Substitution


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


class Wraps:
    """Base class of layers that replace a layer inside them, `self.layer`."""

    layer: Any
    replaces_inner_layer = True

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
