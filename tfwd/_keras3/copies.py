"""Other layers and models of Keras 3 on the same variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def is_layer_graph(model: keras.Layer) -> bool:
    """Whether it is a Sequential or functional model of Keras's own class, which can be cloned."""
    graphs = (keras.Sequential, keras.src.models.Functional)
    return isinstance(model, graphs) and type(model).__module__.startswith("keras.")


def clone(model: keras.Model, function: Callable[[Any], Any]) -> keras.Model:
    """A Sequential or functional model with other layers, in nested models too.

    Args:
        model: it is not changed.
        function: from each layer, or operation, to the one that is to stand in its place, or to
            itself.
    """
    return keras.models.clone_model(model, clone_function=function, recursive=True)


def tie(
    dense: keras.layers.EinsumDense, kernel: keras.Variable, bias: keras.Variable | None
) -> keras.layers.EinsumDense:
    """Gives a layer that is not built the variables of others, and returns it as a built one."""
    # `kernel` has become a property of the class in later releases.
    name = "_kernel" if isinstance(getattr(type(dense), "kernel", None), property) else "kernel"
    setattr(dense, name, kernel)
    dense.bias = bias
    dense.full_output_shape = dense.partial_output_shape
    dense.built = True
    return dense


# What a layer's constructor makes for the layer itself, and a copy must not take from another.
_OWN_STATE = {
    "_tracker",
    "_trainable_variables",
    "_non_trainable_variables",
    "_layers",
    "_metrics",
    "_seed_generators",
    "_functional",
    "_call_signature",
    "call_signature_parameters",
    "_call_has_training_arg",
    "_call_has_mask_arg",
    "_call_context_args",
    "_call_has_context_arg",
    "build",
    "quantize",
    "train_function",
    "test_function",
    "predict_function",
}


def share(
    layer: keras.Layer,
    cls: type | None = None,
    leave_out: frozenset[str] = frozenset(),
    replace: Callable[[Any], Any] = lambda value: value,
) -> keras.Layer:
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
    base = keras.Model if issubclass(kind, keras.Model) else keras.Layer
    base.__init__(copy, name=layer.name, dtype=layer.dtype_policy)
    for name, attribute in vars(layer).items():
        if name in _OWN_STATE or name in leave_out or name.startswith(("_self_", "_obj_ref")):
            continue
        setattr(copy, name, replace(attribute))
    if [id(v) for v in copy.weights] != [id(v) for v in layer.weights]:
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} holds layers where Keras does "
            "not see them, so that it cannot be taken apart"
        )
    return copy
