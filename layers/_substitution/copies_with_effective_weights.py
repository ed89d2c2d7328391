"""Copies a layer. The copy's weights are the effective weights of evaluation, for `tfwd.unwrap`."""

from __future__ import annotations

from typing import Any

import keras

from tfwd import _keras
from tfwd.layers._substitution import weight_selection


def is_needed(wrapper: Any) -> bool:
    """Returns True if a parametrization of a wrapper also acts in evaluation."""
    return weight_selection.acts_in_evaluation(wrapper.parametrizations)


def changed_weights(layer: keras.Layer) -> frozenset[int]:
    """Returns the ids of the weights in a layer that a folded copy does not share."""
    wrappers = [x for x in _keras.layers.all_layers(layer) if hasattr(x, "parametrizations")]
    return frozenset(
        id(weight) for wrapper in wrappers if is_needed(wrapper) for weight in wrapper.weights
    )


def folded(wrapper: Any, plain: keras.Layer) -> keras.Layer:
    """Returns a copy of a plain layer that computes what a wrapper computes in evaluation.

    Args:
        wrapper: Wrapper with weights.
        plain: Layer inside the wrapper, without any wrapper, on the same variables.

    Returns:
        A layer with its own variables, and with the wrapper's name.

    Raises:
        ValueError: If the wrapper has no weights yet; if an inner wrapper of the same weight acts
            in evaluation too; if the layer cannot be copied.
    """
    if not _keras.layer_building.has_weights(wrapper.layer):
        raise ValueError(
            f"layer '{wrapper.name}' has no weights to fold yet: build it or call it first"
        )
    weights = _keras.variables.weights(plain)
    positions = {id(variable): i for i, variable in enumerate(weights)}
    values = [_keras.variables.value(variable) for variable in weights]
    for target, value in wrapper._evaluation_weights():
        if id(target.variable) not in positions:
            raise ValueError(
                f"weight '{target.name}' of layer '{wrapper.name}' cannot be folded, because a "
                "wrapper inside it also acts in evaluation: use one wrapper with Chain([p, q])"
            )
        values[positions[id(target.variable)]] = value
    copy = _copied(plain, wrapper.name)
    for variable, value in zip(_keras.variables.weights(copy), values, strict=True):
        _keras.variables.assign(variable, value)
    return copy


def _copied(layer: keras.Layer, name: str) -> Any:
    """Returns a layer with the same config and another name, and with new variables."""
    try:
        config = _keras.copies.serialize(layer)
        config = {**config, "config": {**config["config"], "name": name}}
        copy: Any = _keras.copies.deserialize(config)
        if not copy.built:
            shapes = _keras.layer_building.build_config(layer)
            if shapes is None:
                raise ValueError("the shape of its inputs is unknown")
            _keras.layer_building.build_from_config(copy, shapes)
        made, wanted = (
            [tuple(v.shape) for v in _keras.variables.weights(each)] for each in (copy, layer)
        )
    except Exception as error:
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} cannot be copied to fold its "
            f"weights, because its config does not create it again ({error}): register the class "
            "with Keras, define get_config, and build the layer by a call"
        ) from error
    if made != wanted:
        raise ValueError(
            f"layer '{layer.name}' of type {type(layer).__name__} cannot be copied to fold its "
            "weights, because its config creates a layer with other weights: wrap the layers "
            "inside it"
        )
    return copy
