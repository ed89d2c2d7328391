"""Construction of a plan: sorts the keys of a file into loaded, ignored and unexpected keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import keras

from tfwd.path_patterns import PatternIndex, compiled, matches
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.key_matching import KeyMatching
from tfwd.pretrained.key_rules import FamilyRules, KeyMapping, last_component
from tfwd.pretrained.layouts import Step
from tfwd.pretrained.loading_plan import Plan
from tfwd.pretrained.similar_names import hints
from tfwd.pretrained.sources.base import Source
from tfwd.pretrained.target_variables import Target

# Indices and counters that PyTorch and TensorFlow store beside the weights.
_BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked", "save_counter")


def build_plan(
    model: keras.layers.Layer,
    source: Source,
    targets: list[Target],
    orders: dict[int, LayerOrders],
    mapping: KeyMapping | None,
    prefix: str | None,
    ignore: list[str],
    allow_missing: list[str],
    strict: bool,
    family_rules: FamilyRules | None,
) -> Plan:
    """Returns the plan with all errors.

    Args:
        model: The model.
        source: The open file.
        targets: Variables of the model.
        orders: Orders of the features at each layer, by the id of the layer.
        mapping, prefix, ignore, allow_missing, strict, family_rules: As in `plan`.
    """
    is_ignored = _key_matcher(ignore, "")
    wanted = [key for key in source.entries if not is_ignored(key)]
    matching = KeyMatching(source, targets, orders, mapping, prefix, family_rules, wanted)
    ignored = _ignored_keys(ignore, list(source.entries), matching)
    steps = matching.steps(ignored)
    loaded = {id(step.target) for step in steps}
    missing = [target for target in targets if id(target) not in loaded]
    used = {key for step in steps for key in (step.key, *step.copies)}
    unused = [key for key in source.entries if key not in used]
    # Parts of the published model that the user's model does not want, or may lack.
    unused_family_keys = dict(matching.unused_family_keys)
    unwanted = list(family_rules.left_out) if family_rules else []
    for pattern in family_rules.optional if family_rules else ():
        if pattern in unused_family_keys:
            unwanted.append(unused_family_keys.pop(pattern))
    is_unwanted = _key_matcher(unwanted, matching.prefix)
    left_out = {
        key for key in unused if key in ignored or is_unwanted(key) or _is_buffer(source, key)
    }
    allowed = _allowed_paths(allow_missing, missing, targets, matching)
    matching.mistakes += _shared_keys(allow_missing, steps)
    return Plan(
        model=model,
        source=source.path,
        steps=steps,
        missing=_missing_errors(missing, allowed, ignored, unused or source.entries, matching),
        allowed=allowed,
        unexpected=[key for key in unused if key not in left_out],
        left_out=[key for key in unused if key in left_out],
        mistakes=matching.mistakes,
        strict=strict,
        notes=_notes(
            family_rules,
            unused_family_keys.values(),
            unused,
            source,
            matching.prefix,
            has_mapping=mapping is not None or len(missing) == len(allowed),
        ),
        entries=dict(source.entries),
    )


def _ignored_keys(patterns: list[str], keys: list[str], matching: KeyMatching) -> set[str]:
    """Returns the keys that patterns match. Reports each pattern that matches none."""
    ignored: set[str] = set()
    used: set[int] = set()
    matching_patterns = _key_matcher(patterns, matching.prefix)
    for key in keys:
        if numbers := matching_patterns(key):
            ignored.add(key)
            used |= numbers
    hint = hints(keys)
    matching.mistakes += [
        f"ignore: {pattern!r} matches no key{hint(pattern)}"
        for i, pattern in enumerate(patterns)
        if i not in used
    ]
    return ignored


def _allowed_paths(
    patterns: list[str], missing: list[Target], targets: list[Target], matching: KeyMatching
) -> list[str]:
    """Returns the missing paths that patterns match. Reports each pattern that matches no path."""
    paths = [target.path for target in targets]
    allowed = [target.path for target in missing if _matches_any(patterns, target.path)]
    hint = hints(paths)
    matching.mistakes += [
        f"allow_missing: {pattern!r} matches no variable{hint(pattern)}"
        for pattern in patterns
        if not _matches_any([pattern], *paths)
    ]
    return allowed


def _shared_keys(patterns: list[str], steps: list[Step]) -> list[str]:
    """Returns the errors of patterns for a layer whose keys another layer has too.

    An example is one of two encoders in a model, each of which has its own file.
    """
    kept = [step for step in steps if not _matches_any(patterns, step.target.path)]
    others = {step.key: step.target.path for step in kept} if patterns else {}
    errors = []
    for pattern in patterns:
        shared = [s for s in steps if s.key in others and _matches_any([pattern], s.target.path)]
        if shared:
            path, key = shared[0].target.path, shared[0].key
            errors.append(
                f"allow_missing: {pattern!r} matches '{path}', but the file has its key '{key}', "
                f"also for '{others[key]}': if one of these layers has another file, call load "
                "for each layer, not for the model; otherwise change the pattern"
            )
    return errors


def _missing_errors(
    missing: list[Target],
    allowed: list[str],
    ignored: set[str],
    unused: Iterable[str],
    matching: KeyMatching,
) -> dict[str, str]:
    """Returns the error of each variable without a key in the file, by its path."""
    hint, may_be_missing = hints(unused), set(allowed)
    errors: dict[str, str] = {}
    for target in missing:
        key = matching.expected_key(target)
        if key is None:
            nearest = "" if target.path in may_be_missing else hint(target.path.replace("/", "."))
            errors[target.path] = f"has no key in the mapping{nearest}"
        elif key in ignored:
            errors[target.path] = f"is not loaded, because ignore skips its key '{key}'"
        else:
            nearest = "" if target.path in may_be_missing else hint(key)
            errors[target.path] = f"has no key '{key}' in the file{nearest}"
    return errors


def _notes(
    rules: FamilyRules | None,
    lacking: Iterable[str],
    unused: list[str],
    source: Source,
    prefix: str,
    *,
    has_mapping: bool,
) -> list[str]:
    """Returns explanations of missing or unexpected keys.

    Args:
        rules: Rules of the model family, or None.
        lacking: Patterns for the keys of parts that the model lacks.
        unused: Keys that no variable uses.
        source: The open file.
        prefix: str. Beginning of all keys.
        has_mapping: bool. True if the user gave a mapping, or needs none.
    """
    if not rules:
        named = "mapping={pattern of paths: key}"
        note = f"no mapping was given, so each key must be the path of its variable: give {named}"
        return [] if has_mapping else [note]
    notes: list[str] = []
    for template, count in rules.counts.items():
        before, _, after = (re.escape(part) for part in (prefix + template).partition("{}"))
        expression = re.compile(rf"{before}(\d+){after}\.")
        numbers = {int(m[1]) for key in source.entries if (m := expression.match(key))}
        if numbers and max(numbers) + 1 != count:
            notes.append(
                f"the config has {count} layers, but the file has {max(numbers) + 1} "
                f"({prefix}{template}): are they of the same model?"
            )
    lacking_patterns = _key_matcher(lacking, prefix)
    found = sorted((i, at) for at, key in enumerate(unused) for i in lacking_patterns(key))
    return [
        *notes[:1],
        *(
            f"key '{unused[at]}' is for a part of this family that the layer does not have"
            for _, at in found[:3]
        ),
        *rules.notes,
    ]


def _is_buffer(source: Source, key: str) -> bool:
    """Returns True for an integer buffer, which is not a weight."""
    return last_component(key) in _BUFFERS and "int" in source.entries[key].dtype


def _key_matcher(patterns: Iterable[str], prefix: str) -> Callable[[str], set[int]]:
    """Returns a function from a key to the numbers of the patterns that match it.

    A pattern may match the key with or without the prefix.
    """
    index = PatternIndex(compiled(pattern, f"{pattern!r}, for keys,") for pattern in patterns)

    def matching_patterns(key: str) -> set[int]:
        texts = {key, key.removeprefix(prefix)}
        return {i for text in texts for i, _ in index.matches(text)}

    return matching_patterns


def _matches_any(patterns: list[str], *paths: str) -> bool:
    expressions = [compiled(p, f"{p!r}, for paths of variables,") for p in patterns]
    return any(matches(expression, path) for expression in expressions for path in paths)
