"""`plan` and `load`: find which tensor of a file becomes which variable, before any is read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.path_patterns import PatternIndex, compiled, matches
from tfwd.pretrained.chief_source import lockstep, open_together
from tfwd.pretrained.flatten_order import Orders, orders_of
from tfwd.pretrained.key_rules import FamilyRules, Key, Mapped, Rules, candidates, ends, find_prefix
from tfwd.pretrained.layouts import Layout, Step, layout_of, reason_unknown, with_given
from tfwd.pretrained.plan import Plan, PlanError, hints
from tfwd.pretrained.sources.base import Entry, Source, SourceError
from tfwd.pretrained.targets import Target, paths_of, targets_of

# Indices that PyTorch stores beside the weights.
_BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked")


def plan(
    model: keras.layers.Layer,
    source: str | os.PathLike[str],
    mapping: Mapped | None = None,
    prefix: str | None = None,
    ignore: str | Sequence[str] = (),
    allow_missing: str | Sequence[str] = (),
    strict: bool = True,
    family_rules: FamilyRules | None = None,
) -> Plan:
    """Finds which tensors of a file become a model's weights; reads only names, shapes and dtypes.

    Args:
        model: a built Keras model or layer.
        source: path of a `.safetensors` file, the index of several, an `.npz` file, a TensorFlow
            checkpoint, or a folder with one of these.
        mapping: dict from a regular expression on paths of variables, or of layers, to the key; see
            `Key` for more properties. Without a mapping, layers of `tfwd.layers.transformer` that
            were made by `from_config` have the keys of their family. For other layers the keys are
            the paths.
        prefix: str. The beginning of all keys. By default the prefix with which most keys are
            found.
        ignore: regular expressions on unwanted keys.
        allow_missing: regular expressions on paths of variables that may be missing. Their values
            stay.
        strict: bool. Treats missing and unexpected keys as errors.
        family_rules: rules for the files of the model's family; with a mapping, for layers of
            `tfwd.layers.transformer`.

    Returns:
        A `Plan`, with all problems in its `problems()`.

    Raises:
        SourceError: the file does not exist, or is incomplete.
        TypeError: the model is no Keras layer, or the mapping is no dict of keys.
        ValueError: the model is not built, or a pattern is no regular expression.

    A pattern on paths must match the full path or its last components. A pattern on keys must match
    the full key, with or without the prefix. PyTorch's buffers, which are integers named
    `position_ids`, `token_type_ids` or `num_batches_tracked`, are no weights and never unexpected.

    Example:
    >>> import keras, numpy as np, os, tempfile
    >>> from tfwd.pretrained import plan
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
    if not isinstance(model, keras.layers.Layer):
        raise TypeError(f"model={model!r}: give a Keras model or layer, built")
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(
            f"mapping={mapping!r} is a {type(mapping).__name__}: give a dict from patterns of "
            "paths to keys, as {'layer_0': 'enc.0'}"
        )
    with lockstep(model.weights if model.built else (), PlanError, SourceError) as workers:
        targets = targets_of(model)
        with open_together(workers, source) as opened:
            if mapping is None and family_rules is None:
                family_rules = _rules_of_layers(model, targets, opened)
            planning = _Planner(model, opened, targets, mapping, prefix, family_rules)
            return planning.plan(_listed(ignore), _listed(allow_missing), strict)


def load(model: keras.layers.Layer, source: str | os.PathLike[str], **options: Any) -> Plan:
    """Loads weights into a built model: `plan(model, source, ...).apply()`.

    Under `tf.distribute.MultiWorkerMirroredStrategy`, all workers must call it. Only the chief
    reads the file, and sends it to the others block by block. The path need not exist on the other
    workers. All end with the same bits, or with the same error. That holds in the scope of the
    strategy, and outside for a model that was made in the scope.

    Args:
        model, source: as in `plan`.
        **options: the other arguments of `plan`.

    Returns:
        The applied plan.

    Raises:
        PlanError: something is missing, unexpected or has another shape, or workers have different
            models. Then nothing is loaded.
        SourceError: the file does not exist, or is incomplete.
        tf.errors.UnavailableError: another worker ended.
    """
    return plan(model, source, **options).apply()


class _Planner:
    """Search for the key of each variable."""

    def __init__(
        self,
        model: keras.layers.Layer,
        source: Source,
        targets: list[Target],
        mapping: Mapped | None,
        prefix: str | None,
        family_rules: FamilyRules | None,
    ) -> None:
        self._model, self._source, self._targets = model, source, targets
        self._orders = orders_of(model)
        self._mistakes: list[str] = list(family_rules.problems) if family_rules else []
        self._choices: dict[str, tuple[Key, dict[str, bool | None]]] = {}
        rules = Rules(mapping or {})
        family = Rules(family_rules.keys if family_rules else {})
        for target in targets:
            found = rules.keys(target) or family.keys(target)
            if mapping is None and not found:
                found = [("", Key(target.path, transposed=False), False)]
            keys = {(key.name, is_layer) for _, key, is_layer in found}
            if len(keys) > 1:
                given = " and ".join(f"'{name}'" for name in sorted(name for name, _ in keys))
                self._mistakes.append(f"'{target.path}' is given two keys by the mapping: {given}")
            if found:
                _, key, is_layer = found[0]
                self._choices[target.path] = key, candidates(target, key, is_layer)
        self._family_rules, self._lacking = family_rules, family.unused_keys()
        self._left_out = list(family_rules.left_out) if family_rules else []
        for pattern in family_rules.optional if family_rules else ():
            if pattern in self._lacking:
                self._left_out.append(self._lacking.pop(pattern))
        hint = hints({end for target in targets for end in (target.path, _layer(target.path))})
        self._mistakes += [
            f"mapping: {pattern!r} matches no variable and no layer"
            f"{hint(pattern) or _there(targets)}"
            for pattern in rules.unused()
        ]
        if prefix and not any(key.startswith(prefix) for key in source.entries):
            self._prefix = self._find_prefix()  # otherwise every variable would be missing too
            self._mistakes.append(
                f"prefix={prefix!r}: no key begins with it; the keys are found with "
                f"prefix={self._prefix!r}"
            )
        else:
            self._prefix = self._find_prefix() if prefix is None else prefix

    def plan(self, ignore: list[str], allow_missing: list[str], strict: bool) -> Plan:
        steps: list[Step] = []
        lacking: list[Target] = []
        for target in self._targets:
            step = self._step(target)
            if step is None:
                lacking.append(target)
            else:
                steps.append(step)
        self._check_claims(steps)
        claimed = {key for step in steps for key in (step.key, *step.copies)}
        rest = [key for key in self._source.entries if key not in claimed]
        ignored = self._matching(ignore, rest, "ignore")
        left_out = self._matcher(self._left_out)
        known = {key for key in rest if left_out(key) or self._is_buffer(key)}
        paths = [target.path for target in self._targets]
        allowed = [target.path for target in lacking if _any(allow_missing, target.path)]
        hint = hints(paths)
        for pattern in allow_missing:
            if not _any([pattern], *paths):
                self._mistakes.append(
                    f"allow_missing: {pattern!r} matches no variable{hint(pattern)}"
                )
        return Plan(
            model=self._model,
            source=self._source.path,
            steps=steps,
            missing=self._missing(lacking, set(allowed)),
            allowed=allowed,
            unexpected=[key for key in rest if key not in ignored and key not in known],
            left_out=[key for key in rest if key in ignored or key in known],
            mistakes=self._mistakes,
            strict=strict,
            notes=self._notes(rest),
            entries=dict(self._source.entries),
        )

    def _notes(self, rest: list[str]) -> list[str]:
        """Returns explanations of missing or unexpected keys in a file of a family."""
        if not self._family_rules:
            return []
        found: list[str] = []
        for template, count in self._family_rules.counts.items():
            before, _, after = (
                re.escape(part) for part in (self._prefix + template).partition("{}")
            )
            expression = re.compile(rf"{before}(\d+){after}\.")
            numbers = {int(m[1]) for key in self._source.entries if (m := expression.match(key))}
            if numbers and max(numbers) + 1 != count:
                found.append(
                    f"the config has {count} layers, and the file has {max(numbers) + 1} "
                    f"({self._prefix}{template}): are they of the same model?"
                )
        meant = self._matcher(self._lacking.values())
        lacking = sorted((i, at) for at, key in enumerate(rest) for i in meant(key))
        return [
            *found[:1],
            *(
                f"key '{rest[at]}' is for a part of this family that the layer does not have"
                for _, at in lacking[:3]
            ),
            *self._family_rules.notes,
        ]

    def _step(self, target: Target) -> Step | None:
        """Returns the tensor of a variable; None if there is none that fits."""
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
        orders = with_given(self._orders.get(id(target.owner)), key)
        if orders != Orders() and len(target.shape) == 1 and self._has_keras_kernel(target):
            transposed = False  # "bias" is a name in both libraries
        entry, layout = self._source.entries[name], layout_of(target, transposed, orders)
        if reason := reason_unknown(target, key, transposed, orders):
            self._mistakes.append(reason)
        elif entry.shape != layout.shape:
            self._mistakes.append(_other_shape(target, layout, name, entry))
        elif not _castable(entry.dtype, target.dtype):
            self._mistakes.append(
                f"'{target.path}' is {target.dtype}, and key '{name}' is {entry.dtype}"
            )
        return Step(target, name, entry, layout, tuple(copies))

    def _has_keras_kernel(self, target: Target) -> bool:
        """Returns True if the file has another weight of the layer in Keras's style."""
        for other in self._targets:
            if other.owner is not target.owner or other.path not in self._choices:
                continue
            key, names = self._choices[other.path]
            if key.transposed is False:
                return True
            if any(
                said is False and self._prefix + name in self._source.entries
                for name, said in names.items()
            ):
                return True
        return False

    def _is_buffer(self, key: str) -> bool:
        name = key.rpartition(".")[2]
        return name in _BUFFERS and "int" in self._source.entries[key].dtype

    def _missing(self, lacking: list[Target], allowed: set[str]) -> dict[str, str]:
        """Returns the error message for each variable that the file lacks."""
        hint = hints(self._source.entries)
        messages: dict[str, str] = {}
        for path in (target.path for target in lacking):
            if path not in self._choices:
                messages[path] = "is given no key by the mapping"
                continue
            name = self._prefix + next(iter(self._choices[path][1]))
            end = "" if path in allowed else hint(name)
            messages[path] = f"has no key '{name}' in the file{end}"
        return messages

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
        """Returns the keys that patterns match. Notes each pattern that matches none."""
        found: set[str] = set()
        used: set[int] = set()
        meant = self._matcher(patterns)
        for key in keys:
            if numbers := meant(key):
                found.add(key)
                used |= numbers
        hint = hints(keys)
        self._mistakes += [
            f"{what}: {pattern!r} matches no key{hint(pattern)}"
            for i, pattern in enumerate(patterns)
            if i not in used
        ]
        return found

    def _matcher(self, patterns: Iterable[str]) -> Callable[[str], set[int]]:
        """Returns a function that gives the numbers of the patterns that match a key.

        A pattern may match the key with or without the prefix.
        """
        index = PatternIndex(compiled(pattern, f"{pattern!r}, for keys,") for pattern in patterns)

        def meant(key: str) -> set[int]:
            texts = {key, key.removeprefix(self._prefix)}
            return {i for text in texts for i, _ in index.matches(text)}

        return meant


def _rules_of_layers(
    model: keras.layers.Layer, targets: list[Target], source: Source
) -> FamilyRules | None:
    """Returns the rules of the layers in a model, or None if the file's keys are paths."""
    parts: list[FamilyRules] = []
    inside: set[int] = set()
    for layer, prefix in paths_of(model):
        rules_at = getattr(layer, "family_rules", None)
        if id(layer) in inside or rules_at is None:
            continue
        if (family_rules := rules_at(prefix)) is not None:
            parts.append(family_rules)
            inside.update(map(id, _keras.layers.all_layers(layer)))
    if not parts:
        return None
    # A file that `tfwd-pretrained convert` wrote.
    paths = {target.path for target in targets if "/" in target.path}
    if not paths.isdisjoint(end for key in source.entries for end in ends(key)):
        return None
    return FamilyRules.of_all(parts)


def _other_shape(target: Target, layout: Layout, key: str, entry: Entry) -> str:
    """Returns the error message for a tensor of another shape."""
    said = f"'{target.path}' is {target.shape}"
    if layout.shape != target.shape:
        said += f", for which the file must have {layout.shape} ({layout.words} when it is read)"
    said += f"; but there '{key}' is {entry.shape}"
    if entry.shape == target.shape:
        said += f": if the file has it in Keras's order, map to Key({key!r}, transposed=False)"
    return said


def _any(patterns: list[str], *paths: str) -> bool:
    expressions = [compiled(p, f"{p!r}, for paths of variables,") for p in patterns]
    return any(matches(expression, path) for expression in expressions for path in paths)


def _there(targets: list[Target]) -> str:
    """Returns some paths of variables, for a message."""
    paths = [target.path for target in targets]
    return f"; there are {', '.join(paths[:5])}{', ...' if len(paths) > 5 else ''}"


def _layer(path: str) -> str:
    return path.rpartition("/")[0]


def _listed(patterns: str | Sequence[str]) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def _castable(there: str, here: str) -> bool:
    """Returns True if numbers of one dtype can be converted to another."""
    if "float" in here:
        return there in ("float16", "bfloat16", "float32", "float64")
    return there == here
