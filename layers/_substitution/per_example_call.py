"""Calls a Dense or EinsumDense layer with a mask of its kernel for each example.

`Dropout(per_example=True)` has no effective weight that a layer could read: each example of a batch
has its own. So the layer's product is computed here, from the kernel and the seed. Keras's bias and
activation follow it.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import private_graph_apis
from tfwd._random import example_masks
from tfwd.layers._substitution import keras_own_layers, weight_selection
from tfwd.layers._substitution.outer_wrappers import present_chain
from tfwd.layers._substitution.weight_selection import Parametrizations, Target, TargetedWeights
from tfwd.parametrizations import chain

_KINDS = (keras.layers.Dense, keras.layers.EinsumDense)
_SUPPORTED = (
    "it supports the kernel of Dense, and of EinsumDense with the batch axis first in its inputs "
    "and outputs"
)


def is_product(layer: keras.Layer) -> bool:
    """Returns True for a layer of a kind that `call` accepts."""
    return isinstance(layer, _KINDS)


def check(layer: keras.Layer, targeted: TargetedWeights) -> None:
    """Checks that each weight with a mask for each example is the kernel of a supported layer.

    Args:
        layer: Built layer that a wrapper calls. It may be a wrapper itself.
        targeted: Weights that the wrapper parametrizes.

    Raises:
        ValueError: If a weight or its layer is not supported; if the element is not the last one of
            the weight's parametrizations.
    """
    plain = _plain(layer)
    inside: Any = [x for x in _keras.layers.all_layers(layer) if _is_wrapper(x)]
    for target, parametrization in targeted:
        elements = parametrization.elements()
        where = f"weight '{target.name}' of layer '{layer.name}'"
        earlier = [e for inner in inside for e in _elements_of(inner, target.variable)]
        if any(element.per_example for element in [*earlier, *elements[:-1]]):
            raise ValueError(
                f"{where}: Dropout(per_example=True) must be the last parametrization of a weight; "
                f"here {elements[-1]!r} comes after it"
            )
        if not elements or not elements[-1].per_example:
            continue
        reason = _why_not(plain)
        if not reason and not _is_kernel(plain, target.variable):
            reason = "is not the layer's kernel"
        if reason:
            raise ValueError(
                f"{where} {reason}, so Dropout(per_example=True) cannot give each example its own "
                f"mask; {_SUPPORTED}"
            )


def check_inputs(
    wrapper: keras.Layer,
    parametrizations: Parametrizations,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> None:
    """Checks the inputs of a call, before it draws.

    Args:
        wrapper: Wrapper with these parametrizations.
        parametrizations: Parametrizations of the wrapper.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Raises:
        ValueError: If there is a mask for each example, and the inputs are not one dense tensor
            with a batch axis; or if the layer was changed, for example by LoRA.
    """
    if not any(element.per_example for element in weight_selection.elements(parametrizations)):
        return
    layer = _plain(wrapper)
    # While Keras 2 saves a model, its layers have other calls.
    if not private_graph_apis.is_saving() and (reason := _why_not(layer)):
        raise ValueError(
            f"the kernel of layer '{layer.name}' {reason}, so Dropout(per_example=True) cannot "
            f"give each example its own mask; {_SUPPORTED}"
        )
    given = (*args, *kwargs.values())
    dense = len(given) == 1 and not isinstance(given[0], (tf.SparseTensor, tf.RaggedTensor))
    rank = len(given[0].shape) if dense and getattr(given[0], "shape", None) is not None else None
    if rank is None or _letters(layer, rank) is None:
        received = [f"{type(x).__name__} of shape {getattr(x, 'shape', None)}" for x in given]
        raise ValueError(
            f"layer '{layer.name}' with Dropout(per_example=True) needs one dense tensor of known "
            f"rank as its inputs, with the examples along axis 0; got {' and '.join(received)}"
        )


def effective_weight(
    layer: keras.Layer,
    target: Target,
    bound: Sequence[chain.BoundParametrization],
    examples: int | None,
) -> tf.Tensor:
    """Returns the effective value of a weight, from its present raw value.

    Args:
        layer: Layer, for messages.
        target: The weight.
        bound: Parametrizations of the weight, in order.
        examples: int. Number of examples, if the weight has a mask for each example. Otherwise
            unused.

    Raises:
        ValueError: If the weight has a mask for each example, and `examples` is no positive int.
    """
    shared, per_example = chain.per_example(bound)
    value = chain.apply(_keras.variables.value(target.variable), shared)
    if per_example is None:
        return value
    _check_examples(layer, target, examples)
    element, seed = per_example
    return element.of_examples(value, seed, examples)


def _check_examples(layer: keras.Layer, target: Target, examples: int | None) -> None:
    """Raises a ValueError if the number of examples is missing or not a positive integer."""
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise ValueError(
            f"weight '{target.name}' of layer '{layer.name}' has a mask for each example, so "
            "effective_weights needs the number of examples in the call's batch: pass "
            f"examples=32, for example; got examples={examples!r}"
        )


def call(
    layer: Any,
    otherwise: Callable[..., Any],
    inputs: Any,
    *rest: Any,
    training: bool = False,
    **given: Any,
) -> Any:
    """Calls a layer for which `is_product` returns True.

    If the present training call has masks for examples, it computes

        y_b = activation(einsum(x_b, w m_b / keep) + bias)

    for each example `b` of the batch. All other calls go to `otherwise`.

    Args:
        layer: Dense or EinsumDense layer, built.
        otherwise: The layer itself, or its `call`.
        inputs: `[B, ...]`.
        *rest: Other positional arguments, for `otherwise`.
        training: bool. Training flag. Default False.
        **given: Keyword arguments, for `otherwise`.
    """
    found = _present_mask(layer)
    if found is None:
        return otherwise(inputs, *rest, training=training, **given)
    element, seed = found
    x = tf.cast(_keras.layer_wrappers.converted(layer, inputs), layer.compute_dtype)
    letters: Any = _letters(layer, x.shape.rank)
    kernel = _keras.variables.value(layer.kernel)
    outputs = example_masks.product(letters, x, kernel, element.rate, seed)
    if layer.bias is not None:
        outputs += tf.cast(_keras.variables.value(layer.bias), outputs.dtype)
    if layer.activation is not None:
        outputs = layer.activation(outputs)
    if otherwise is layer:
        _keras.layer_wrappers.mark(layer, inputs, outputs)
    return outputs


def _present_mask(layer: Any) -> tuple[Any, tf.Tensor] | None:
    """Returns the element with masks for examples that acts in the running call, and its seed."""
    return chain.per_example(present_chain(_keras.variables.original(layer.kernel)))[1]


def _is_wrapper(layer: Any) -> bool:
    """Returns True for a layer that parametrizes the weights of another layer."""
    return hasattr(layer, "_subject") and layer._subject() is not layer


def _plain(layer: Any) -> Any:
    """Returns the layer inside all wrappers."""
    while _is_wrapper(layer):
        layer = layer._subject()
    return layer


def _elements_of(wrapper: Any, variable: Any) -> list[Any]:
    """Returns the elements of a wrapper's parametrization of a variable."""
    if not _keras.layer_building.has_weights(wrapper._subject()):
        return []
    return [e for t, p in wrapper._targeted() if t.variable is variable for e in p.elements()]


def _why_not(layer: Any) -> str:
    """Returns the reason why a layer is not supported, the middle of a sentence, or ""."""
    kind = next((kind for kind in _KINDS if isinstance(layer, kind)), None)
    if kind is None:
        hint = ""
        if _keras.layers.sublayers(layer):
            hint = ", which contains layers (wrap each of them, as tfwd.parametrize does)"
        return f"belongs to a layer of type {type(layer).__name__}{hint}"
    if not keras_own_layers.is_plain(layer, kind):
        return (
            f"belongs to a {kind.__name__} layer with custom code, LoRA, quantization or an "
            "activity regularizer"
        )
    if kind is keras.layers.EinsumDense and all(_letters(layer, n) is None for n in range(1, 27)):
        return f"belongs to an EinsumDense layer with the equation '{layer.equation}'"
    return ""


def _is_kernel(layer: Any, variable: Any) -> bool:
    return _keras.variables.original(layer.kernel) is variable


def _letters(layer: Any, rank: int) -> example_masks.Letters | None:
    """Returns the letters of a layer's product, or None if examples cannot have masks."""
    equation = "...x,xy->...y"
    if isinstance(layer, keras.layers.EinsumDense):
        equation = layer.equation.replace(" ", "")
    left, _, outputs = equation.partition("->")
    inputs, _, kernel = left.partition(",")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    missing = rank - len(inputs.replace("...", ""))
    if (missing and "..." not in inputs) or missing < 0 or missing > len(free):
        return None
    dots = "".join(free[:missing])
    inputs, outputs = inputs.replace("...", dots), outputs.replace("...", dots)
    each = {inputs: set(inputs), kernel: set(kernel), outputs: set(outputs)}
    fits = (
        inputs[:1] == outputs[:1]
        and inputs[:1] not in kernel
        and "." not in kernel
        and all(len(letters) == len(text) for text, letters in each.items())
        and each[inputs] <= each[kernel] | each[outputs]
        and each[kernel] <= each[inputs] | each[outputs]
    )
    return example_masks.Letters(inputs, kernel, outputs) if fits else None
