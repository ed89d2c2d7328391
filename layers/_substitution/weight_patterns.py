"""Names the weights of a layer, and selects and excludes weights by patterns.

Names only appear in messages and results: draws depend on a weight's position in `layer.weights`.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import keras

from tfwd import _keras
from tfwd.path_patterns import compiled, matches

T = TypeVar("T")

ALL = "all"  # the pattern that stands for every trained weight

QUANTIZED = (
    "weights of 8 or 4 bits cannot be parametrized. Quantize the plain model, tfwd.unwrap(model); "
    "or call enable_lora and quantize first, then wrap, and select the weights 'lora_.*'"
)


class Target(NamedTuple):
    """A weight to parametrize.

    Attributes:
        position: Index of the weight in the layer's `weights`.
        path: Names of the layers that contain the weight, then its own name.
        name: Shortest suffix of the path that is unique in the layer.
        variable: The weight.
    """

    position: int
    path: str
    name: str
    variable: keras.Variable


def all_targets(layer: keras.Layer) -> list[Target]:
    """Returns all weights of a built layer, with their positions and names."""
    weights = _keras.variables.weights(layer)
    paths = _keras.variables.paths(layer)
    names = shortest_names(paths)
    return [Target(i, paths[i], names[i], variable) for i, variable in enumerate(weights)]


def _ends(path: str) -> list[str]:
    """Returns the suffixes of a path in whole components, from the shortest to the path itself."""
    parts = path.split("/")
    return ["/".join(parts[k:]) for k in reversed(range(len(parts)))]


def shortest_names(paths: list[str]) -> list[str]:
    """Returns the shortest suffix of each path that no other path has, in whole components.

    Example:
        >>> shortest_names(["a/lstm/kernel", "a/dense/kernel", "a/dense/bias"])
        ['lstm/kernel', 'dense/kernel', 'bias']
    """
    ends = [_ends(path) for path in paths]
    counts = Counter(end for of_path in ends for end in of_path)
    names = []
    for i, path in enumerate(paths):
        unique = (end for end in ends[i] if counts[end] == 1)
        names.append(next(unique, f"{path}:{i}"))
    return names


def match(
    layer: keras.Layer, patterns: Mapping[str, T], exclude: Sequence[str] = ()
) -> list[tuple[Target, T]]:
    """Returns the weights that the patterns match, each with the value of the first match.

    Some weights are never trained, such as the moving mean of a `BatchNormalization`. A pattern
    selects such a weight only if the pattern's last component contains the weight's name.
    `moving_mean` and `norm/moving_mean` select it, `.*` and `norm/.*` do not. Frozen layers
    (`layer.trainable = False`) are different: patterns match their kernels as usual. The pattern
    `all` stands for `.*`.

    Args:
        layer: Built layer.
        patterns: dict from a regular expression to a value.
        exclude: Regular expressions of weights that no pattern selects. Default none.

    Raises:
        ValueError: As in `select`.
    """
    everything = all_targets(layer)
    trained = {
        id(v) for inner in _keras.layers.all_layers(layer) for v in _keras.layers.own_weights(inner)
    }
    meant = {pattern: _meant(layer, pattern, everything, trained) for pattern in patterns}
    wanted = {target.position for targets in meant.values() for target in targets}
    left_out = excluded(layer, exclude, everything, wanted)
    taken: dict[int, str] = {}
    for pattern, targets in meant.items():
        remaining = [t for t in targets if t.position not in left_out]
        if not remaining:
            raise ValueError(
                f"exclude={list(exclude)} excludes all weights of {kind(layer)} '{layer.name}' "
                f"that '{pattern}' matches ({shown(targets)}): remove '{pattern}', or exclude less"
            )
        if all(t.position in taken for t in remaining):
            earlier = dict.fromkeys(f"'{taken[t.position]}'" for t in remaining)
            raise ValueError(
                f"'{pattern}' selects no weight of {kind(layer)} '{layer.name}', because the "
                f"first matching pattern applies: earlier patterns ({', '.join(earlier)}) also "
                f"match {shown(remaining)}. Put '{pattern}' first, or remove it"
            )
        for target in remaining:
            check_floating(layer, target)
            taken.setdefault(target.position, pattern)
    return [(t, patterns[taken[t.position]]) for t in everything if t.position in taken]


def _meant(
    layer: keras.Layer, pattern: str, everything: list[Target], trained: set[int]
) -> list[Target]:
    """Returns the weights that one pattern selects, including excluded weights.

    Args:
        layer: Built layer, for messages.
        pattern: Pattern.
        everything: All weights of the layer.
        trained: Ids of the weights that are created trainable.

    Raises:
        ValueError: If the pattern selects no weight, or if `all` is also the name of a weight.
    """
    expression = compiled(pattern, f"{pattern!r}, for weights of layer '{layer.name}',")
    matched = [t for t in everything if matches(expression, t.path)]
    if pattern == ALL:
        if matched:
            raise ValueError(
                f"'all' could mean every trained weight of {kind(layer)} '{layer.name}', or its "
                f"weight '{matched[0].path}': write '.*' for every weight, or '(all)' for this "
                "weight"
            )
        matched = everything
    if not matched:
        raise ValueError(
            f"'{pattern}' matches no weight of {kind(layer)} '{layer.name}'; "
            f"{listing(layer)}{_nearest(pattern, everything)}"
        )
    meant = [t for t in matched if id(t.variable) in trained or _is_named(t, pattern)]
    if not meant:
        raise ValueError(
            f"'{pattern}' matches only weights of {kind(layer)} '{layer.name}' that are not "
            f"trained ({', '.join(t.name for t in matched)}); a pattern selects such a weight "
            f"only if it ends in the weight's name, for example '{matched[0].name}'"
        )
    return meant


def excluded(
    layer: keras.Layer, exclude: Sequence[str], everything: list[Target], wanted: set[int]
) -> set[int]:
    """Returns the positions of the excluded weights.

    Args:
        layer: Built layer, for messages.
        exclude: Patterns.
        everything: All weights of the layer.
        wanted: Positions of the weights that are selected if nothing is excluded.

    Raises:
        ValueError: If a pattern matches no weight, or no selected weight.
    """
    positions: set[int] = set()
    for pattern in exclude:
        expression = compiled(pattern, f"exclude={pattern!r}, for weights of '{layer.name}',")
        found = [t for t in everything if matches(expression, t.path)]
        if not found:
            raise ValueError(
                f"exclude={pattern!r} matches no weight of {kind(layer)} '{layer.name}'; "
                f"{listing(layer)}{_nearest(pattern, everything)}"
            )
        if not any(t.position in wanted for t in found):
            chosen = [t for t in everything if t.position in wanted]
            raise ValueError(
                f"exclude={pattern!r} excludes nothing: it matches {shown(found)} of "
                f"{kind(layer)} '{layer.name}', and the selected weights are {shown(chosen)}. "
                "Remove the pattern, or correct it"
            )
        positions.update(t.position for t in found)
    return positions


def checked_exclude(layer: keras.Layer, exclude: Any) -> tuple[str, ...]:
    """Returns the patterns of weights that are not selected, as a tuple.

    Args:
        layer: Layer, for messages.
        exclude: Pattern, list of patterns, or None for no pattern.

    Raises:
        ValueError: If `exclude` has another type, or if a pattern is not a regular expression.
    """
    given = () if exclude is None else (exclude,) if isinstance(exclude, str) else exclude
    if not isinstance(given, Sequence) or not all(isinstance(one, str) for one in given):
        raise ValueError(
            f"layer '{layer.name}': exclude={exclude!r}: expected a pattern on the weights' paths "
            "such as 'norm/.*', a list of patterns, or None"
        )
    for pattern in given:
        compiled(pattern, f"exclude={pattern!r}, for weights of layer '{layer.name}',")
    return tuple(given)


def literal(name: str) -> str:
    """Returns a pattern that matches the weight of this name, as in `Target.name`."""
    return f"({ALL})" if name == ALL else re.escape(name)


def _nearest(pattern: str, everything: list[Target]) -> str:
    """Returns a hint for a pattern that matches a part of a path, or leaves out a component."""
    grouped = f"({pattern})" if "|" in pattern and not pattern.startswith("(") else pattern
    slashes = [at for at, character in enumerate(pattern) if character == "/"]
    # The weights of a recurrent layer belong to its cell: lstm/lstm_cell/kernel.
    deeper = [f"{pattern[:at]}/.*{pattern[at:]}" for at in slashes]
    for other in (f"{grouped}/.*", *deeper, f".*{grouped}.*"):
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
            f"weights can be parametrized{quantized_hint(layer)}"
        )


def quantized_hint(layer: keras.Layer) -> str:
    """Returns a hint if the layer was quantized, else ""."""
    found = [
        inner.name for inner in _keras.layers.all_layers(layer) if _keras.layers.is_quantized(inner)
    ]
    return f". Layer '{found[0]}' is quantized: {QUANTIZED}" if found else ""


def kind(layer: keras.Layer) -> str:
    """Returns "model" or "layer", for messages."""
    return "model" if isinstance(layer, keras.Model) else "layer"


def listing(layer: keras.Layer) -> str:
    """Returns the paths of a layer's weights, for messages."""
    names = _keras.variables.paths(layer)
    return f"its weights are {', '.join(names)}" if names else "it has no weights"


def shown(targets: Sequence[Target]) -> str:
    """Returns the names of weights, for messages."""
    return ", ".join(t.name for t in targets)
