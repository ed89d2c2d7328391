"""Copies layers and models of Keras 3: through configs, and on the same variables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state as _global_state

from tfwd._keras_shared import copies
from tfwd._keras_shared.keras_own_code import is_of_keras


def serialize(layer: keras.Layer) -> dict[str, Any]:
    """Returns a layer's config, with the mark by which a `.keras` file detects shared layers.

    While Keras writes a file, it marks the config of an object that it has written before. It does
    not mark a config inside another config, such as the config of a wrapped layer. The mark is an
    address in memory. Configs outside files have no mark, so that they can be compared.
    """
    config = keras.saving.serialize_keras_object(layer)
    if _global_state.get_global_attribute("shared_objects/id_to_config_map") is not None:
        config = {**config, "shared_object_id": id(layer)}
    return config


def deserialize(value: Any, custom_objects: Any = None) -> Any:
    """Creates the object of a config's value. Nests and plain values are supported too."""
    return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)


def keeps_sharing() -> bool:
    """Returns True while a file is read. Two uses of an object then become one object."""
    return _global_state.get_global_attribute("shared_objects/id_to_obj_map") is not None


def is_absent(store: Any) -> bool:
    """Returns True if a file has no entry for a layer. On Keras 3 this cannot be detected."""
    return False


_GRAPHS = (keras.Sequential, keras.src.models.Functional)


def is_layer_graph(model: keras.Layer) -> bool:
    """Returns True for a Sequential or functional model of Keras's own class. It can be cloned."""
    return isinstance(model, _GRAPHS) and is_of_keras(type(model))


def clone(model: keras.Model, function: Callable[[Any], Any]) -> keras.Model:
    """Returns a Sequential or functional model with other layers, also in nested models.

    Args:
        model: Model. It is not changed.
        function: Function from each layer or operation to its replacement, or to itself.
    """
    known: dict[int, Any] = {}

    def replaced(layer: Any) -> Any:
        if id(layer) not in known:
            graph = isinstance(layer, _GRAPHS)
            known[id(layer)] = _cloned(layer, replaced) if graph else function(layer)
        return known[id(layer)]

    return _cloned(model, replaced)


def _cloned(model: Any, replaced: Callable[[Any], Any]) -> Any:
    """Clones a model with other layers. Keeps properties of its inputs that Keras's clone loses."""
    if not isinstance(model, keras.Sequential):
        inputs = keras.tree.map_structure(lambda x: _other(x).output, model.input)
        return keras.models.clone_model(model, input_tensors=inputs, clone_function=replaced)
    first = model._layers[:1]  # `model.layers` omits an input layer
    inputs = [_other(x) for x in first if isinstance(x, keras.layers.InputLayer)]
    layers = [*inputs, *map(replaced, model.layers)]
    copy = keras.Sequential(layers, name=model.name, trainable=model.trainable)
    if model.compiled:
        copy.compile_from_config(model.get_compile_config())
    return copy


def _other(source: Any) -> keras.layers.InputLayer:
    """Returns an input like another input, or like the input of a symbolic tensor."""
    layer = getattr(source, "_keras_history", (source,))[0]
    return type(layer).from_config(layer.get_config())


def tie(
    dense: keras.layers.EinsumDense,
    kernel: keras.Variable,
    bias: keras.Variable | None,
    output_shape: tuple[int | None, ...],
) -> keras.layers.EinsumDense:
    """Gives an unbuilt layer existing variables, and returns it as a built layer."""
    # In later releases `kernel` is a property of the class.
    name = "_kernel" if isinstance(getattr(type(dense), "kernel", None), property) else "kernel"
    setattr(dense, name, kernel)
    dense.bias = bias
    dense.full_output_shape = output_shape
    dense.built = True
    return dense


# Attributes that each layer's constructor creates. A copy must not take them from another layer.
_OWN_STATE = {
    "_tracker",
    "_trainable_variables",
    "_non_trainable_variables",
    "_layers",
    "_metrics",
    "_seed_generators",
    "_functional",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
    "_tracked",  # names of attributes: with a shared list, each layer would track the other's
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


def _is_own(name: str) -> bool:
    return name in _OWN_STATE or name.startswith(("_self_", "_obj_ref"))


share = functools.partial(copies.share, is_own=_is_own)
