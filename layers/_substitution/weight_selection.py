"""Selects and names the weights of a layer that are parametrized.

Regular expressions select weights by path. Without them, a rule for each kind of layer applies.
Names only appear in messages and results: draws depend on a weight's position in `layer.weights`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import keras

from tfwd import _keras
from tfwd.parametrizations import Parametrization
from tfwd.paths import compiled, matches

T = TypeVar("T")

_BIAS = re.compile(r"(.*_)?bias(_.*)?")
_NOT_DROPPED = ("gamma", "beta")

QUANTIZED = (
    "weights of 8 or 4 bits cannot be parametrized. Quantize the plain model, tfwd.unwrap(model); "
    "or call enable_lora and quantize first, wrap then, and name the weights 'lora_.*'"
)


class Target(NamedTuple):
    """A weight to parametrize.

    Attributes:
        position: Index of the weight in the layer's `weights`.
        path: Names of the layers that contain the weight, then its own name.
        name: Shortest end of its path that is unique in the layer.
        variable: The weight.
    """

    position: int
    path: str
    name: str
    variable: keras.Variable


Parametrizations = Mapping[str, Parametrization] | Parametrization
TargetedWeights = list[tuple[Target, Parametrization]]


def select(layer: keras.Layer, parametrizations: Parametrizations) -> TargetedWeights:
    """Selects the parametrized weights of a built layer.

    Args:
        layer: Built layer.
        parametrizations: dict from a pattern to a parametrization, as in `match`. Or one
            parametrization, for `default_weights(layer)`.

    Returns:
        The weights with their parametrizations, in the order of `layer.weights`.

    Raises:
        ValueError: If a pattern matches no weight, or only untrained weights that it does not name;
            if it selects a weight that is not floating; if there is no default weight. The message
            lists the layer's weights.
    """
    if isinstance(parametrizations, Mapping):
        return match(layer, parametrizations)
    chosen = {id(variable) for variable in default_weights(layer)}
    if not chosen:
        raise ValueError(
            f"layer '{layer.name}' has no weight that is parametrized by default: pass the names "
            f"of weights; {_listing(layer)}{_quantized(layer)}"
        )
    found = [t for t in all_targets(layer) if id(t.variable) in chosen]
    for target in found:
        check_floating(layer, target)
    return [(target, parametrizations) for target in found]


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
                    "without it the layer would compute different outputs. "
                    "tfwd.unwrap(model, fold=True) returns a copy of the layer that has the "
                    "effective weight as its own weight"
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


def match(layer: keras.Layer, patterns: Mapping[str, T]) -> list[tuple[Target, T]]:
    """Returns the weights that the patterns match, each with the value of the first match.

    Some weights are never trained, such as the moving mean of a `BatchNormalization`. A pattern
    selects such a weight only if the pattern's last component contains the weight's name.
    `moving_mean` and `norm/moving_mean` select it, `.*` and `norm/.*` do not. Frozen layers
    (`layer.trainable = False`) are different: patterns match their kernels as usual.

    Args:
        layer: Built layer.
        patterns: dict from a regular expression to a value.

    Raises:
        ValueError: As in `select`.
    """
    everything = all_targets(layer)
    trained = {
        id(v) for inner in _keras.layers.all_layers(layer) for v in _keras.layers.own_weights(inner)
    }
    found: dict[int, T] = {}
    for pattern in patterns:
        expression = compiled(pattern, f"{pattern!r}, for weights of layer '{layer.name}',")
        matched = [t for t in everything if matches(expression, t.path)]
        if not matched:
            raise ValueError(
                f"'{pattern}' matches no weight of {_kind(layer)} '{layer.name}'; "
                f"{_listing(layer)}{_nearest(pattern, everything)}"
            )
        meant = [t for t in matched if id(t.variable) in trained or _is_named(t, pattern)]
        if not meant:
            raise ValueError(
                f"'{pattern}' matches only weights of {_kind(layer)} '{layer.name}' that are not "
                f"trained ({', '.join(t.name for t in matched)}); a pattern selects such a weight "
                f"only if it ends in the weight's name, as '{matched[0].name}'"
            )
        for target in meant:
            check_floating(layer, target)
            found.setdefault(target.position, patterns[pattern])
    return [(t, found[t.position]) for t in everything if t.position in found]


def _nearest(pattern: str, everything: list[Target]) -> str:
    """Returns a hint for a pattern that matches only a part of a path, such as a layer's name."""
    whole = f"({pattern})" if "|" in pattern and not pattern.startswith("(") else pattern
    for other in (f"{whole}/.*", f".*{whole}.*"):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            try:
                expression = re.compile(other)
            except (re.error, DeprecationWarning):  # flags may only begin a pattern
                continue
        if any(matches(expression, target.path) for target in everything):
            return f". A pattern must match the full path or its last components: perhaps '{other}'"
    return ""


def _is_named(target: Target, pattern: str) -> bool:
    """Returns True if the last component of a pattern contains the weight's name literally."""
    name, last = target.path.rpartition("/")[2], pattern.rpartition("/")[2]
    return any(re.search(rf"(?<!\w){re.escape(n)}(?!\w)", last) for n in (name, re.escape(name)))


def check_floating(layer: keras.Layer, target: Target) -> None:
    """Raises a ValueError if the dtype of the weight is not floating."""
    dtype = _keras.variables.dtype_name(target.variable)
    if "float" not in dtype:
        raise ValueError(
            f"weight '{target.name}' of layer '{layer.name}' is of dtype {dtype}; only floating "
            f"weights can be parametrized{_quantized(layer)}"
        )


def default_weights(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the weights that are parametrized if the user names none.

    - A recurrent layer: its recurrent kernels, of both directions and of all stacked cells.
    - Another layer: its own floating weights of rank two or more, except biases, gammas and betas.
    - A layer that contains layers: also their default weights.
    """
    if isinstance(layer, keras.layers.RNN):
        return [v for v in layer.weights if _keras.variables.name(v).endswith("recurrent_kernel")]
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


def all_targets(layer: keras.Layer) -> list[Target]:
    """Returns all weights of a built layer, with their positions and names."""
    weights = layer.weights
    paths = _keras.variables.paths(layer)
    names = shortest_names(paths)
    return [Target(i, paths[i], names[i], variable) for i, variable in enumerate(weights)]


def shortest_names(paths: list[str]) -> list[str]:
    """Returns for each path its shortest end after a `/` that no other path ends in.

    Example:
        >>> shortest_names(["a/lstm/kernel", "a/dense/kernel", "a/dense/bias"])
        ['lstm/kernel', 'dense/kernel', 'bias']
    """
    names = []
    for i, path in enumerate(paths):
        parts = path.split("/")
        others = ["/" + other for j, other in enumerate(paths) if j != i]
        ends = ["/".join(parts[k:]) for k in reversed(range(len(parts)))]
        unique = (end for end in ends if not any(o.endswith("/" + end) for o in others))
        names.append(next(unique, f"{path}:{i}"))
    return names


def _quantized(layer: keras.Layer) -> str:
    """Returns a hint if the layer was quantized, else ""."""
    found = [
        inner.name for inner in _keras.layers.all_layers(layer) if _keras.layers.is_quantized(inner)
    ]
    return f". Layer '{found[0]}' is quantized: {QUANTIZED}" if found else ""


def _kind(layer: keras.Layer) -> str:
    return "model" if isinstance(layer, keras.Model) else "layer"


def _listing(layer: keras.Layer) -> str:
    names = _keras.variables.paths(layer)
    return f"its weights are {', '.join(names)}" if names else "it has no weights"
