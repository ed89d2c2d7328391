"""Selects the weights of a layer that are parametrized.

Patterns select weights by path, as in `weight_patterns`. Without patterns, a rule for each kind of
layer applies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import keras

from tfwd import _keras
from tfwd.layers._substitution.weight_patterns import (
    Target,
    all_targets,
    check_floating,
    excluded,
    kind,
    listing,
    match,
    quantized_hint,
)
from tfwd.parametrizations import Parametrization

_BIAS = re.compile(r"(.*_)?bias(_.*)?")
_NOT_DROPPED = ("gamma", "beta")

Parametrizations = Mapping[str, Parametrization] | Parametrization
TargetedWeights = list[tuple[Target, Parametrization]]


def select(
    layer: keras.Layer, parametrizations: Parametrizations, exclude: Sequence[str] = ()
) -> TargetedWeights:
    """Selects the parametrized weights of a built layer.

    Args:
        layer: Built layer.
        parametrizations: dict from a pattern to a parametrization, as in `match`. Or one
            parametrization, for `default_weights(layer)`.
        exclude: Patterns of weights that are not selected, as in `match`. Default none.

    Returns:
        The weights with their parametrizations, in the order of `layer.weights`.

    Raises:
        ValueError: If a pattern matches no weight, or only untrained weights that it does not name;
            if earlier patterns select all its weights; if a pattern of `exclude` excludes nothing,
            or all weights of a pattern; if a weight is not floating; if there is no default weight.
            The message lists the layer's weights.
    """
    if isinstance(parametrizations, Mapping):
        return match(layer, parametrizations, exclude)
    chosen = {id(variable) for variable in default_weights(layer)}
    if not chosen:
        raise ValueError(
            f"layer '{layer.name}' has no weight that is parametrized by default: pass the names "
            f"of weights; {listing(layer)}{quantized_hint(layer)}"
        )
    everything = all_targets(layer)
    found = [t for t in everything if id(t.variable) in chosen]
    left_out = excluded(layer, exclude, everything, {t.position for t in found})
    if all(t.position in left_out for t in found):
        raise ValueError(
            f"exclude={list(exclude)} excludes all default weights of {kind(layer)} "
            f"'{layer.name}' ({', '.join(t.name for t in found)}): no weight would be parametrized"
        )
    found = [t for t in found if t.position not in left_out]
    for target in found:
        check_floating(layer, target)
    return [(target, parametrizations) for target in found]


def patterns(
    layer: keras.Layer, parametrizations: Parametrizations, exclude: Sequence[str] = ()
) -> list[str | None]:
    """Returns the pattern that selected each weight of `select`; None for a default weight."""
    if isinstance(parametrizations, Mapping):
        return [pattern for _, pattern in match(layer, {p: p for p in parametrizations}, exclude)]
    return [None for _ in select(layer, parametrizations, exclude)]


def assign_to_patterns(
    layer: keras.Layer, parametrization: Parametrization, weights: str | Sequence[str] | None
) -> Parametrizations:
    """Assigns one parametrization to a pattern, several patterns, or the default weights.

    Raises:
        ValueError: If the list of patterns is empty.
    """
    if weights is None:
        return parametrization
    if not weights:
        raise ValueError(
            f"layer '{layer.name}': weights is empty; pass patterns, or None for the "
            "default weights"
        )
    return dict.fromkeys([weights] if isinstance(weights, str) else weights, parametrization)


def check_parametrizations(
    layer: keras.Layer, parametrizations: Parametrizations, rates: bool
) -> None:
    """Checks the parametrizations before the layer has weights.

    Args:
        layer: Layer, for messages.
        parametrizations: As in `select`.
        rates: bool. Also checks the parametrizations' arguments.

    Raises:
        ValueError: For an object that is not a parametrization, or for wrong arguments.
    """
    for pattern, parametrization in _by_pattern(layer, parametrizations).items():
        where = f"weight '{pattern}' of layer '{layer.name}'"
        if not isinstance(parametrization, Parametrization):
            raise ValueError(
                f"{where}: expected a parametrization such as Dropout(0.5), got {parametrization!r}"
            )
        if rates:
            parametrization.check(where)


def check_evaluates_raw(layer: keras.Layer, parametrizations: Parametrizations, name: str) -> None:
    """Raises a ValueError if a parametrization also acts in evaluation.

    Args:
        layer: Layer whose weights are parametrized.
        parametrizations: As in `select`.
        name: Name of the wrapper, for the message.
    """
    for pattern, parametrization in _by_pattern(layer, parametrizations).items():
        for element in parametrization.elements():
            if not element.stochastic and not element.is_identity:
                raise ValueError(
                    f"layer '{name}' also applies {element!r} to '{pattern}' in evaluation; "
                    "without the parametrization the layer would compute different outputs. "
                    "Use tfwd.unwrap(model, fold=True). It returns a copy of the layer that has "
                    "the effective weight as its own weight"
                )


def acts_in_evaluation(parametrizations: Parametrizations) -> bool:
    """Returns True if a parametrization also acts in evaluation."""
    return any(not p.stochastic and not p.is_identity for p in elements(parametrizations))


def elements(parametrizations: Parametrizations) -> list[Parametrization]:
    """Returns the parametrizations, with each element of a chain separately."""
    if isinstance(parametrizations, Parametrization):
        return parametrizations.elements()
    return [element for p in parametrizations.values() for element in p.elements()]


def _by_pattern(
    layer: keras.Layer, parametrizations: Parametrizations
) -> Mapping[str, Parametrization]:
    """Returns the parametrizations by pattern, for messages."""
    if isinstance(parametrizations, Mapping):
        return parametrizations
    recurrent = isinstance(layer, (keras.layers.RNN, keras.layers.Bidirectional))
    return {"recurrent_kernel" if recurrent else "kernel": parametrizations}


def default_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that are parametrized if the user passes no pattern.

    - A recurrent layer: its recurrent kernels, of both directions and of all stacked cells.
    - Another layer: its own floating weights of rank two or more, except biases, gammas and betas.
    - A layer that contains layers: also their default weights.
    """
    if isinstance(layer, keras.layers.RNN):
        return [
            v
            for v in _keras.variables.weights(layer)
            if _keras.variables.name(v).endswith("recurrent_kernel")
        ]
    chosen = [v for v in _keras.layers.own_weights(layer) if _is_default(v)]
    for sublayer in _keras.layers.sublayers(layer):
        chosen.extend(default_weights(sublayer))
    return chosen


def _is_default(variable: keras.Variable) -> bool:
    return (
        len(variable.shape) >= 2
        and "float" in _keras.variables.dtype_name(variable)
        and not _BIAS.fullmatch(_keras.variables.name(variable))
        and _keras.variables.name(variable) not in _NOT_DROPPED
    )
