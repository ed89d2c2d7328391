"""`plan`: which tensor of a file becomes which variable of a model, found before any is read."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfwd.paths import compiled, matches
from tfwd.pretrained import assignment
from tfwd.pretrained.layouts import Layout, layout_of
from tfwd.pretrained.mapping import Key, Known, Mapped, Rules, candidates, find_prefix
from tfwd.pretrained.opening import open_source
from tfwd.pretrained.sources import Entry, Source
from tfwd.pretrained.table import table
from tfwd.pretrained.targets import Target, targets_of

SHOWN = 10  # problems of a kind in a message


class PlanError(ValueError):
    """Weights that cannot be loaded as they are; each line of the message is a reason."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A variable and the tensor that it gets.

    Attributes:
        target: the variable.
        key: the tensor's name in the file.
        entry: its shape and dtype there.
        layout: what is done to it.
        copies: keys that must hold the same.
    """

    target: Target
    key: str
    entry: Entry
    layout: Layout
    copies: tuple[str, ...] = ()


@dataclasses.dataclass
class Plan:
    """What would be loaded, and what is in the way.

    `print(plan)` shows it as a table; `apply` does it.

    Attributes:
        model: what is to be filled.
        source: the path of the file.
        steps: what becomes what, in the model's order.
        missing: paths of variables for which the file has nothing, each with what was looked for.
        allowed: those of them that may be missing.
        unexpected: keys of the file that no variable takes.
        left_out: keys that are of parts the model does not have, or are ignored.
        mistakes: what else is wrong, a sentence each.
        strict: whether missing and unexpected ones are errors.
    """

    model: keras.layers.Layer
    source: str
    steps: list[Step]
    missing: dict[str, str]
    allowed: list[str]
    unexpected: list[str]
    left_out: list[str]
    mistakes: list[str]
    strict: bool

    def problems(self) -> list[str]:
        """All reasons for which it cannot be applied, a sentence each."""
        return [problem for group in self._problems() for problem in group]

    def check(self) -> None:
        """Raises a `PlanError` with all problems, if there are any; of each kind the first ten."""
        groups = self._problems()
        if not any(groups):
            return
        lines = []
        for group in groups:
            lines += group[:SHOWN]
            if len(group) > SHOWN:
                lines.append(f"and {len(group) - SHOWN} more such; print(plan) shows them")
        hint = ""
        if self.strict and (self.unexpected or self.missing):
            hint = (
                "\nWhat may be missing is said by allow_missing=[patterns of paths], what is not "
                "wanted by ignore=[patterns of keys]."
            )
        text = "".join(f"\n- {line}" for line in lines)
        raise PlanError(f"{self.source}: nothing was loaded.{text}{hint}")

    def _problems(self) -> list[list[str]]:
        """What is wrong, missing, and unexpected."""
        if not self.strict:
            return [self.mistakes]
        missing = [
            f"'{path}' {what}" for path, what in self.missing.items() if path not in self.allowed
        ]
        paths = [*(step.target.path for step in self.steps), *self.missing]
        unexpected = [
            f"key '{key}' is no variable's{_nearest(key, paths)}" for key in self.unexpected
        ]
        return [self.mistakes, missing, unexpected]

    def apply(self, allow_overflow: bool = False) -> Plan:
        """Assigns each variable its tensor, one after the other, once all is known to be right.

        Args:
            allow_overflow: whether numbers that are too large for a variable's dtype may become
                infinite.

        Returns:
            itself.

        Raises:
            PlanError: something is in the way; nothing is assigned then.
            SourceError: the file cannot be read.
        """
        self.check()
        with open_source(self.source) as source:
            if mistakes := assignment.differences(source, self.steps, allow_overflow):
                lines = "".join(f"\n- {line}" for line in mistakes)
                raise PlanError(f"{self.source}: nothing was loaded.{lines}")
            assignment.assign(source, self.steps)
        return self

    def as_dict(self) -> dict[str, Any]:
        """The plan as lists and dicts, for JSON."""
        steps = [
            {
                "variable": step.target.path,
                "key": step.key,
                "layout": step.layout.words,
                "shape": list(step.entry.shape),
                "dtype": step.entry.dtype,
                "bytes": step.entry.nbytes,
            }
            for step in self.steps
        ]
        names = ("source", "missing", "allowed", "unexpected", "left_out", "strict")
        rest = {name: getattr(self, name) for name in names}
        return {**rest, "steps": steps, "problems": self.problems()}

    def __str__(self) -> str:
        return table(self)


def plan(
    model: keras.layers.Layer,
    source: str | os.PathLike[str],
    mapping: Mapped | None = None,
    prefix: str | None = None,
    ignore: str | Sequence[str] = (),
    allow_missing: str | Sequence[str] = (),
    strict: bool = True,
    known: Known | None = None,
) -> Plan:
    """Finds which tensors of a file become a model's weights; reads names, shapes and dtypes only.

    Args:
        model: a built Keras model or layer.
        source: a `.safetensors` file, the index of several, an `.npz` file, a checkpoint of
            TensorFlow, or a folder with one of these.
        mapping: dict from a regular expression on paths of variables, or of layers, to the key; see
            `Key` for what more can be said. Without a mapping keys are the paths themselves.
        prefix: what all keys begin with; by default the one with which most are found.
        ignore: regular expressions on keys that are not wanted.
        allow_missing: regular expressions on paths of variables that may be missing. They stay as
            they are.
        strict: whether what is missing or unexpected is an error.
        known: what is known of the file's family, for layers of `tfwd.layers.transformer`.

    Returns:
        A `Plan`, with all that is wrong in its `problems()`.

    Raises:
        SourceError: the file is not there, or not whole.
        ValueError: the model is not built, or a pattern is no regular expression.

    Patterns on paths match whole ones or ends that follow a `/`, as everywhere in tfwd; patterns on
    keys match whole keys, with or without the prefix.

    Example:

    >>> import keras, numpy as np, os, tempfile
    >>> file = os.path.join(tempfile.mkdtemp(), "weights.npz")
    >>> arrays = {"out.kernel": np.ones((3, 2), "float32"), "out.bias": np.zeros(2, "float32")}
    >>> np.savez(file, **arrays)
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")])
    >>> found = plan(model, file, mapping={"head": "out"})
    >>> [(step.target.path, step.key, step.layout.words) for step in found.steps]
    [('head/kernel', 'out.kernel', 'as it is'), ('head/bias', 'out.bias', 'as it is')]
    >>> _ = found.apply()
    >>> float(keras.ops.sum(model(np.ones((1, 3)))))
    6.0
    """
    targets = targets_of(model)
    with open_source(source) as opened:
        planning = _Planning(model, opened, targets, mapping, prefix, known)
        return planning.plan(_listed(ignore), _listed(allow_missing), strict)


def load(model: keras.layers.Layer, source: str | os.PathLike[str], **options: Any) -> Plan:
    """Loads weights into a built model: `plan(model, source, ...).apply()`.

    Args:
        model, source: as in `plan`.
        **options: the others of `plan`.

    Returns:
        The plan that was applied.

    Raises:
        PlanError: something is missing, unexpected or of another shape; nothing is loaded then.
        SourceError: the file is not there, or not whole.
    """
    return plan(model, source, **options).apply()


class _Planning:
    """Looks for the key of each variable."""

    def __init__(
        self,
        model: keras.layers.Layer,
        source: Source,
        targets: list[Target],
        mapping: Mapped | None,
        prefix: str | None,
        known: Known | None,
    ) -> None:
        self._model, self._source, self._targets = model, source, targets
        self._mistakes: list[str] = []
        self._choices: dict[str, tuple[Key, dict[str, bool | None]]] = {}
        rules = Rules(mapping or {})
        family = Rules(known.mapping if known else {})
        for target in targets:
            found = rules.keys(target) or family.keys(target)
            if mapping is None and known is None:
                found = [("", Key(target.path), False)]
            keys = {(key.name, is_layer) for _, key, is_layer in found}
            if len(keys) > 1:
                given = " and ".join(f"'{name}'" for name in sorted(name for name, _ in keys))
                self._mistakes.append(f"'{target.path}' is given two keys by the mapping: {given}")
            if found:
                _, key, is_layer = found[0]
                self._choices[target.path] = key, candidates(target, key, is_layer)
        self._left_out = [*(known.left_out if known else ()), *family.unused_keys()]
        paths = {end for target in targets for end in (target.path, _layer(target.path))}
        self._mistakes += [
            f"mapping: {pattern!r} fits no variable and no layer{_nearest(pattern, paths)}"
            for pattern in rules.unused()
        ]
        self._prefix = self._find_prefix() if prefix is None else prefix
        if prefix and not any(key.startswith(prefix) for key in source.entries):
            self._mistakes.append(
                f"prefix={prefix!r}: no key begins so{_nearest(prefix, source.entries)}"
            )

    def plan(self, ignore: list[str], allow_missing: list[str], strict: bool) -> Plan:
        steps: list[Step] = []
        missing: dict[str, str] = {}
        for target in self._targets:
            step = self._step(target)
            if step is None:
                missing[target.path] = self._looked_for(target)
            else:
                steps.append(step)
        self._check_claims(steps)
        claimed = {key for step in steps for key in (step.key, *step.copies)}
        rest = [key for key in self._source.entries if key not in claimed]
        ignored = self._matching(ignore, rest, "ignore")
        known = {key for key in rest if self._is_one(key, self._left_out)}
        paths = [target.path for target in self._targets]
        allowed = [path for path in missing if _any(allow_missing, path)]
        for pattern in allow_missing:
            if not _any([pattern], *paths):
                self._mistakes.append(
                    f"allow_missing: {pattern!r} fits no variable{_nearest(pattern, paths)}"
                )
        return Plan(
            model=self._model,
            source=self._source.path,
            steps=steps,
            missing=missing,
            allowed=allowed,
            unexpected=[key for key in rest if key not in ignored and key not in known],
            left_out=[key for key in rest if key in ignored or key in known],
            mistakes=self._mistakes,
            strict=strict,
        )

    def _step(self, target: Target) -> Step | None:
        """What a variable gets; None if there is nothing, or nothing that fits."""
        if target.path not in self._choices:
            return None
        key, names = self._choices[target.path]
        there = {self._prefix + name: says for name, says in names.items()}
        found = [name for name in there if name in self._source.entries]
        copies = [self._prefix + copy for copy in key.copies]
        copies = [copy for copy in copies if copy in self._source.entries]
        if not found and copies:
            found = [copies.pop(0)]
        if not found:
            return None
        if len(found) > 1:
            self._mistakes.append(
                f"'{target.path}' has two keys in the file: '{found[0]}' and '{found[1]}'"
            )
        name = found[0]
        transposed = key.transposed
        if transposed is None:
            transposed = there.get(name)
        if transposed is None:
            transposed = self._source.transposed
        entry, layout = self._source.entries[name], layout_of(target, transposed)
        if entry.shape != layout.shape:
            how = "" if layout.shape == target.shape else f", {layout.words} to {target.shape}"
            self._mistakes.append(
                f"'{target.path}' takes {layout.shape}{how}, and key '{name}' is {entry.shape}"
            )
        elif not _castable(entry.dtype, target.dtype):
            self._mistakes.append(
                f"'{target.path}' is {target.dtype}, and key '{name}' is {entry.dtype}"
            )
        return Step(target, name, entry, layout, tuple(copies))

    def _looked_for(self, target: Target) -> str:
        """What is said of a variable that the file does not have."""
        if target.path not in self._choices:
            return "is given no key by the mapping"
        name = self._prefix + next(iter(self._choices[target.path][1]))
        return f"has no key '{name}' in the file{_nearest(name, self._source.entries)}"

    def _check_claims(self, steps: list[Step]) -> None:
        """Notes keys that two variables take, unless both may."""
        owners: dict[str, list[str]] = {}
        for step in steps:
            if not self._choices[step.target.path][0].repeated:
                owners.setdefault(step.key, []).append(step.target.path)
        for key, paths in owners.items():
            if len(paths) > 1:
                both = " and ".join(f"'{path}'" for path in paths[:2])
                more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
                self._mistakes.append(f"key '{key}' is taken twice, by {both}{more}")

    def _find_prefix(self) -> str:
        wanted = [names for _, names in self._choices.values()]
        found = find_prefix(wanted, self._source.entries)
        if len(found) > 1:
            self._mistakes.append(
                f"the keys fit as well with the prefix {found[0]!r} as with {found[1]!r}: give one "
                "of them as prefix"
            )
        return found[0] if found else ""

    def _matching(self, patterns: list[str], keys: list[str], what: str) -> set[str]:
        """The keys that are meant; a pattern that means none is noted."""
        found: set[str] = set()
        for pattern in patterns:
            meant = {key for key in keys if self._is_one(key, [pattern])}
            if not meant:
                self._mistakes.append(f"{what}: {pattern!r} fits no key{_nearest(pattern, keys)}")
            found |= meant
        return found

    def _is_one(self, key: str, patterns: list[str]) -> bool:
        """Whether a key, with or without the prefix, is what a pattern means."""
        for pattern in patterns:
            expression = compiled(pattern, f"{pattern!r}, for keys,")
            if expression.fullmatch(key) or expression.fullmatch(key.removeprefix(self._prefix)):
                return True
        return False


def _any(patterns: list[str], *paths: str) -> bool:
    expressions = [compiled(p, f"{p!r}, for paths of variables,") for p in patterns]
    return any(matches(expression, path) for expression in expressions for path in paths)


def _layer(path: str) -> str:
    return path.rpartition("/")[0]


def _listed(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _castable(there: str, here: str) -> bool:
    """Whether numbers of one dtype can become those of another."""
    if "float" in here:
        return there in ("float16", "bfloat16", "float32", "float64")
    return there == here


def _nearest(name: str, names: Iterable[str]) -> str:
    """The names that are most alike, for a message."""
    found = difflib.get_close_matches(name, list(names), n=2, cutoff=0.5)
    return f"; nearest: {', '.join(found)}" if found else ""
