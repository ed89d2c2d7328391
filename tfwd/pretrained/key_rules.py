"""Rules for the key of each variable: patterns, names of weights, and the prefix of keys."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tfwd.path_patterns import PatternIndex, compiled
from tfwd.pretrained.targets import Target

# Keras's names of weights, and their names in files; True if that name is PyTorch's.
LEAVES = {
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
        name: str. The key, in which `\1`, `\2`, ... stand for the groups of the pattern.
        repeated: bool. Allows other variables to have the same key.
        copies: keys that hold the same tensor again, for example tied weights. Each must be absent
            or equal.
        transposed: bool. True if the kernel has the outputs first, as in PyTorch. None: the last
            part of the key and the kind of file decide.
        flattened: the shape in PyTorch, without the first axis, of the tensor that is flattened
            before the layer, as (channels, height, width). Empty if PyTorch and Keras flatten it in
            the same order. None: the model's graph decides.
    """

    name: str
    repeated: bool = False
    copies: tuple[str, ...] = ()
    transposed: bool | None = None
    flattened: tuple[int, ...] | None = None


Mapped = Mapping[str, "str | Key"]


@dataclasses.dataclass(frozen=True)
class FamilyRules:
    """Rules for the files of a family of published models.

    Attributes:
        keys: dict from a pattern on paths to a key, as in a mapping of `plan`, which comes first. A
            pattern may match nothing.
        left_out: patterns of keys of parts that are not wanted.
        optional: the patterns of `keys` for parts that the model may lack. Another pattern that
            fits nothing leaves its keys unexpected.
        counts: for keys with `{}` for the number of a layer, how many layers the config tells of.
        notes: what explains what is missing or unexpected, a sentence each.
        problems: what is wrong with the layer whose weights they are, a sentence each.
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

        A key is left out if each of them leaves it out. Several may have the same key.
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


class Rules:
    """Patterns on paths of variables or layers, with their keys.

    Args:
        mapping: dict from a regular expression, which must match the full path or its last
            components, to a key or a `Key`. If it matches the path of a layer, the key lacks its
            last part, "weight" or "bias".
    """

    def __init__(self, mapping: Mapped) -> None:
        self._rules = [
            (pattern, compiled(pattern, f"mapping={pattern!r}"), _key(pattern, key))
            for pattern, key in mapping.items()
        ]
        for pattern, expression, key in self._rules:
            _check_groups(pattern, expression, key)
        self._patterns = PatternIndex(expression for _, expression, _ in self._rules)
        self.used: set[str] = set()

    def keys(self, target: Target) -> list[tuple[str, Key, bool]]:
        """Returns the possible keys of a variable, for each matching rule and each known name.

        Returns:
            For each rule: its pattern, a `Key` without groups, and True if it names the layer.
        """
        first: dict[int, tuple[re.Match[str], bool]] = {}  # by rule, its longest match
        layer_path = target.path.rpartition("/")[0]
        for path, is_layer in ((target.path, False), (layer_path, True)):
            for end in ends(path):
                for i, match in self._patterns.matches(end):
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
        """Returns the patterns that match no variable, each with a pattern of its keys."""
        return {
            pattern: rf"{re.escape(key.name)}(\..*)?"
            for pattern, _, key in self._rules
            if pattern not in self.used
        }


def candidates(target: Target, key: Key, is_layer: bool) -> dict[str, bool | None]:
    """Returns the possible keys, each with True if its kernel is stored as in PyTorch."""
    if not is_layer:
        last = re.split(r"[./]", key.name)[-1]
        return {key.name: _says(target, key.name, last)}
    joint = "/" if "/" in key.name and "." not in key.name else "."
    if target.name not in LEAVES:
        name = f"{key.name}{joint}{target.name}"
        return {name: _says(target, name, target.name)}
    leaves = LEAVES[target.name]
    return {f"{key.name}{joint}{leaf}" if leaf else key.name: says for leaf, says in leaves.items()}


def _says(target: Target, name: str, last: str) -> bool | None:
    """Returns True if the last part of a key is PyTorch's, False if Keras's, None if unclear."""
    says = LEAVES.get(target.name, {}).get(last)
    if says is None and last == target.name and "/" in name and "." not in name:
        return False  # a path of Keras
    return True if says is None and last.startswith("weight") else says


def find_prefix(wanted: Iterable[Iterable[str]], keys: Iterable[str]) -> list[str]:
    """Returns the prefixes with which most wanted keys exist; several if they are equally good.

    Args:
        wanted: for each variable, its possible keys without the prefix.
        keys: the existing keys.
    """
    owners: dict[str, list[int]] = {}
    for i, group in enumerate(wanted):
        for name in set(group):
            owners.setdefault(name, []).append(i)
    found: dict[str, set[int]] = {}  # by prefix, the variables whose key exists
    for key in keys:
        for at in (0, *(i + 1 for i, character in enumerate(key) if character in "./")):
            if key[at:] in owners:
                found.setdefault(key[:at], set()).update(owners[key[at:]])
    most = max(map(len, found.values()), default=0)
    return sorted(prefix for prefix, there in found.items() if len(there) == most)


def ends(path: str) -> Iterator[str]:
    """Yields a path, and its parts after each `/`, the longest first."""
    while path:
        yield path
        path = path.partition("/")[2]


def _expanded(match: re.Match[str], name: str) -> str:
    """Returns a key's name with the groups of a match in it. Most names have none."""
    return match.expand(name) if "\\" in name else name


def _check_groups(pattern: str, expression: re.Pattern[str], key: Key) -> None:
    """Raises a ValueError if a key names a group that its pattern lacks."""
    for name in (key.name, *key.copies):
        if "\\" not in name:
            continue
        try:
            expression.sub(name, "")
        except (re.error, IndexError) as error:
            raise ValueError(
                f"mapping[{pattern!r}]={name!r}: {error}: the pattern has {expression.groups} "
                "groups, and a key may name these; write a backslash as two"
            ) from error


def _key(pattern: str, key: str | Key) -> Key:
    if isinstance(key, str):
        return Key(key)
    if isinstance(key, Key):
        return key
    raise TypeError(f"mapping[{pattern!r}]={key!r}: give a key's name, or a tfwd.pretrained.Key")
