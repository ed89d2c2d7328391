"""Rules for the key of each variable: patterns, names of weights, and the common prefix."""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterable, Mapping, Sequence

from tfwd.path_patterns import PatternIndex, compiled
from tfwd.pretrained.target_variables import Target

# For each name of a weight in Keras, its names in files. True for PyTorch's names.
_NAMES_IN_FILES = {
    "kernel": {"weight": True, "kernel": False, "weight_ih": True, "weight_ih_l0": True},
    "recurrent_kernel": {"weight_hh": True, "weight_hh_l0": True, "recurrent_kernel": False},
    "depthwise_kernel": {"weight": True, "depthwise_kernel": False},
    "pointwise_kernel": {"weight": True, "pointwise_kernel": False},
    "embeddings": {"weight": True, "embeddings": False, "": False},
    "gamma": {"weight": True, "gamma": False},
    "alpha": {"weight": True, "alpha": False},
    "beta": {"bias": True, "beta": False},
    "bias": {"bias": True},
    "scale": {"weight": True, "scale": False},
    "moving_mean": {"running_mean": True, "moving_mean": False},
    "moving_variance": {"running_var": True, "moving_variance": False},
}


@dataclasses.dataclass(frozen=True)
class Key:
    r"""Key of a variable or of a layer, with its properties.

    Attributes:
        name: str. The key. `\1`, `\2`, ... stand for the groups of the pattern.
        repeated: bool. Lets several variables have this key. Default False.
        copies: tuple of str. Keys that hold the same tensor again, for example tied weights. Each
            must be absent or equal. Default empty.
        transposed: bool. True if the kernel has the outputs first, as in PyTorch. False if the
            tensor has its axes in Keras's order. Default None: the last component of the key and
            the kind of file decide.
        flattened: tuple of int. Shape in PyTorch of the tensor that is flattened before the layer,
            without the batch: (channels, height, width). Empty if PyTorch and Keras flatten the
            tensor in the same order. Default None: the model's graph decides.
        unflattened: tuple of int. Shape in PyTorch of the image that the layer's outputs become,
            without the batch: (channels, height, width). Empty if PyTorch and Keras have the
            outputs in the same order. Default None: the model's graph decides.

    Raises:
        TypeError: If `flattened` or `unflattened` is not a sequence of whole numbers.
        ValueError: If one of them has a size below 1.
    """

    name: str
    repeated: bool = False
    copies: tuple[str, ...] = ()
    transposed: bool | None = None
    flattened: tuple[int, ...] | None = None
    unflattened: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("flattened", "unflattened"):
            if (given := getattr(self, field)) is None:
                continue
            text = f"Key({self.name!r}, {field}={given!r})"
            try:
                sizes = tuple(map(operator.index, given))
            except TypeError:
                raise TypeError(f"{text}: give whole numbers, such as (64, 7, 7)") from None
            if any(size < 1 for size in sizes):
                raise ValueError(f"{text}: give sizes of at least 1")
            object.__setattr__(self, field, sizes)


KeyMapping = Mapping[str, "str | Key"]


@dataclasses.dataclass(frozen=True)
class FamilyRules:
    """Rules for the files of a family of published models.

    Attributes:
        keys: dict from a pattern for paths to a `Key`, like the mapping of `plan`. The mapping
            comes first. A pattern may match nothing.
        left_out: tuple of str. Patterns for the keys of parts that are not loaded. Default empty.
        optional: tuple of str. Patterns of `keys` for parts that the model may lack. The keys of
            other patterns without a match are unexpected. Default empty.
        counts: dict from a key, in which `{}` is the number of a layer, to the number of layers in
            the config. Default empty.
        notes: tuple of str. Explanations of missing or unexpected keys, one sentence each. Default
            empty.
        problems: tuple of str. Errors of the layer that is loaded, one sentence each. Default
            empty.
    """

    keys: Mapping[str, Key]
    left_out: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @staticmethod
    def of_all(parts: Sequence[FamilyRules]) -> FamilyRules:
        """Returns the rules for a file that has the weights of several layers of a model.

        A key is left out if the rules of all layers leave it out. Several layers may use one key.
        """
        if len(parts) == 1:
            return parts[0]
        first, *others = (part.left_out for part in parts)
        return FamilyRules(
            keys={
                pattern: dataclasses.replace(key, repeated=True)
                for part in parts
                for pattern, key in part.keys.items()
            },
            left_out=tuple(p for p in first if all(p in other for other in others)),
            optional=tuple(p for part in parts for p in part.optional),
            counts={key: count for part in parts for key, count in part.counts.items()},
            notes=tuple(note for part in parts for note in part.notes),
            problems=tuple(problem for part in parts for problem in part.problems),
        )


class KeyRules:
    """Patterns for paths of variables or layers, with their keys.

    Args:
        mapping: dict from a regular expression to a str or a `Key`. The expression must match the
            full path or its last components. An expression that begins with `/` must match the full
            path. If it matches the path of a layer, the last component of the key ("weight" or
            "bias") is added.

    Attributes:
        used: set of str. Patterns that have matched a variable.
    """

    def __init__(self, mapping: KeyMapping) -> None:
        self._rules = [
            (pattern, compiled(pattern, f"mapping={pattern!r}"), _key(pattern, key))
            for pattern, key in mapping.items()
        ]
        for pattern, expression, key in self._rules:
            _check_groups(pattern, expression, key)
        self._patterns = PatternIndex(expression for _, expression, _ in self._rules)
        self.used: set[str] = set()

    def keys(self, target: Target) -> list[tuple[str, Key, bool]]:
        """Returns the keys of a variable from all matching rules.

        Returns:
            For each rule: its pattern, a `Key` without groups, and True if the pattern matches the
            path of the layer.
        """
        first: dict[int, tuple[re.Match[str], bool]] = {}  # the longest match of each rule
        layer_path = target.path.rpartition("/")[0]
        for path, is_layer in ((target.path, False), (layer_path, True)):
            for i, match in self._patterns.path_matches(path):
                first.setdefault(i, (match, is_layer))
        found = []
        for i, (match, is_layer) in sorted(first.items(), key=lambda item: item[0]):
            pattern, _, key = self._rules[i]
            self.used.add(pattern)
            copies = tuple(_expanded(match, copy) for copy in key.copies)
            name = _expanded(match, key.name)
            found.append((pattern, dataclasses.replace(key, name=name, copies=copies), is_layer))
        return found

    def unused(self) -> list[str]:
        """Returns the patterns that match no variable."""
        return [pattern for pattern, _, _ in self._rules if pattern not in self.used]

    def unused_keys(self) -> dict[str, str]:
        """Returns the patterns that match no variable, each with a pattern for its keys."""
        return {
            pattern: rf"{re.escape(key.name)}(\..*)?"
            for pattern, _, key in self._rules
            if pattern not in self.used
        }


def separator_of(keys: Iterable[str]) -> str:
    """Returns the character between the components of a file's keys: "/" or "."."""
    used = set().union(*keys)
    return "/" if "/" in used and "." not in used else "."


def last_component(key: str) -> str:
    """Returns the last component of a key, whose components are joined by `.` or `/`."""
    return re.split(r"[./]", key)[-1]


def possible_keys(
    target: Target, key: Key, is_layer: bool, separator: str = "."
) -> dict[str, bool | None]:
    """Returns the possible keys of a variable in a file, without the prefix.

    Args:
        target: The variable.
        key: Key from the mapping.
        is_layer: bool. True if `key` is the key of the variable's layer.
        separator: str. The character between the components of a key, if the mapping's key has only
            one component. Default ".".

    Returns:
        dict from each key to True for PyTorch's style, False for Keras's style, and None if the
        style is unclear.
    """
    if not is_layer:
        last = last_component(key.name)
        return {key.name: _is_torch_style(target, key.name, last)}
    if not {"/", "."}.isdisjoint(key.name):
        separator = "." if "." in key.name else "/"
    if target.name not in _NAMES_IN_FILES:
        name = f"{key.name}{separator}{target.name}"
        return {name: _is_torch_style(target, name, target.name)}
    return {
        f"{key.name}{separator}{last}" if last else key.name: is_torch
        for last, is_torch in _NAMES_IN_FILES[target.name].items()
    }


def copies_of(key: Key, names: Iterable[str]) -> tuple[str, ...]:
    """Returns the copies of a variable's tensor, if the key and its copies are for a layer.

    A copy `tied.weight` is a copy of the layer's kernel, and not of its bias.

    Args:
        key: Key of the layer in the mapping.
        names: Possible keys of the variable.
    """
    of_variable = {last_component(name) for name in names}
    known = {last for each in _NAMES_IN_FILES.values() for last in each}
    lasts = {copy: last_component(copy) for copy in key.copies}
    return tuple(c for c, last in lasts.items() if last in of_variable or last not in known)


def style_of_copy(target: Target, copy: str, names: dict[str, bool | None]) -> bool | None:
    """Returns the style of a copy of a variable's tensor, as in `possible_keys`.

    A copy is the same tensor, so it has the key's style. If the style of the key is unclear, or the
    key has several possible names, the last component of the copy decides.

    Args:
        target: The variable.
        copy: Key of the copy.
        names: Possible keys of the variable, from `possible_keys`.
    """
    of_key = next(iter(names.values())) if len(names) == 1 else None
    if of_key is not None:
        return of_key
    return _is_torch_style(target, copy, last_component(copy))


def _is_torch_style(target: Target, name: str, last: str) -> bool | None:
    """Returns True if the last component of a key is PyTorch's, False if Keras's, else None."""
    is_torch = _NAMES_IN_FILES.get(target.name, {}).get(last)
    if is_torch is None and last == target.name and "/" in name and "." not in name:
        return False  # a path of Keras
    if is_torch is None and last.startswith("weight") and last != "weights":
        return True  # older programs for TensorFlow have "weights"
    return is_torch


def find_prefix(wanted: Iterable[Iterable[str]], keys: Iterable[str]) -> list[str]:
    """Returns the prefix with which most variables have a key; several prefixes for a draw.

    Args:
        wanted: For each variable, its possible keys without the prefix.
        keys: Keys of the file.
    """
    owners: dict[str, list[int]] = {}
    for i, group in enumerate(wanted):
        for name in set(group):
            owners.setdefault(name, []).append(i)
    found: dict[str, set[int]] = {}  # variables with a key, by prefix
    for key in keys:
        for at in (0, *(i + 1 for i, character in enumerate(key) if character in "./")):
            if key[at:] in owners:
                found.setdefault(key[:at], set()).update(owners[key[at:]])
    most = max(map(len, found.values()), default=0)
    return sorted(prefix for prefix, there in found.items() if len(there) == most)


def _expanded(match: re.Match[str], name: str) -> str:
    """Returns a key's name with the groups of a match filled in. Most names have no groups."""
    return match.expand(name) if "\\" in name else name


def _check_groups(pattern: str, expression: re.Pattern[str], key: Key) -> None:
    """Raises a ValueError if a key refers to a group that its pattern lacks."""
    for name in (key.name, *key.copies):
        if "\\" not in name:
            continue
        try:
            expression.sub(name, "")
        except (re.error, IndexError) as error:
            raise ValueError(
                f"mapping[{pattern!r}]={name!r}: {error}. The pattern has {expression.groups} "
                f"group{'s' * (expression.groups != 1)}, and a key may refer only to these. A "
                "backslash that is a part of a key is written twice"
            ) from error


def _key(pattern: str, key: str | Key) -> Key:
    if isinstance(key, str):
        return Key(key)
    if isinstance(key, Key):
        return key
    raise TypeError(f"mapping[{pattern!r}]={key!r}: give a str or a tfwd.pretrained.Key")
