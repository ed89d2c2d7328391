"""Search for the tensor of each variable, with errors for keys that do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import keras

from tfwd.path_patterns import compiled, matches
from tfwd.pretrained.computed_weights import computed_weight_errors
from tfwd.pretrained.file_layouts import FileLayouts
from tfwd.pretrained.flatten_order.layer_groups import unwrapped
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.flatten_order.orders import Shape
from tfwd.pretrained.key_rules import (
    FamilyRules,
    Key,
    KeyMapping,
    KeyRules,
    copies_of,
    find_prefix,
    possible_keys,
    separator_of,
)
from tfwd.pretrained.known_weights import has_known_use, is_known_layout, is_table
from tfwd.pretrained.layouts import Layout, Step
from tfwd.pretrained.similar_names import hints
from tfwd.pretrained.sources.base import Entry, Source
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import torch_shape
from tfwd.pretrained.unknown_layouts import TRANSPOSED_TABLE

_KERNELS_OF_SIZE_1 = (
    keras.layers.Dense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class KeyMatching:
    """Search for the tensor of each variable.

    Args:
        source: The open file.
        targets: Variables of the model.
        orders: Orders of the features at each layer, by the id of the layer.
        mapping, prefix, family_rules: As in `plan`.
        wanted: Keys that `ignore` does not match. They show the prefix.

    Attributes:
        prefix: str. Beginning of all keys.
        mistakes: list of str. Errors, one sentence each.
        unused_family_keys: dict from each pattern for paths in `family_rules.keys` that matches no
            variable to a pattern for its keys.
    """

    def __init__(
        self,
        source: Source,
        targets: list[Target],
        orders: dict[int, LayerOrders],
        mapping: KeyMapping | None,
        prefix: str | None,
        family_rules: FamilyRules | None,
        wanted: Sequence[str],
    ) -> None:
        self._source, self._targets, self._wanted = source, targets, wanted
        self._keys = set(source.entries)
        self._orders = orders
        self.mistakes: list[str] = list(family_rules.problems) if family_rules else []
        rules = KeyRules(mapping or {})
        family = KeyRules(family_rules.keys if family_rules else {})
        # By path of a variable: its key in the mapping, and its possible keys in the file.
        self._choices: dict[str, tuple[Key, dict[str, bool | None]]] = {}
        separator = separator_of(self._keys)
        of_mapping = set[str]()  # paths of the variables that `mapping` matches
        for target in targets:
            found = rules.keys(target)
            if found:
                of_mapping.add(target.path)
            found = found or family.keys(target)
            if mapping is None and not found:
                found = [("", Key(target.path, transposed=False), False)]
            keys = {(key.name, is_layer) for _, key, is_layer in found}
            if len(keys) > 1:
                names = " and ".join(f"'{name}'" for name in sorted(name for name, _ in keys))
                self.mistakes.append(
                    f"'{target.path}' has two keys in the mapping, {names}: let only one pattern "
                    "match it. A pattern that begins with '/' matches only full paths"
                )
            elif any(key != found[0][1] for _, key, _ in found):
                self.mistakes.append(
                    f"'{target.path}' has the key '{found[0][1].name}' twice in the mapping, with "
                    "different properties: let only one pattern match it"
                )
            if found:
                _, key, is_layer = found[0]
                possible = possible_keys(target, key, is_layer, separator)
                if is_layer:
                    key = dataclasses.replace(key, copies=copies_of(key, possible))
                self._choices[target.path] = key, possible
        self.unused_family_keys = family.unused_keys()
        self._report_unused(rules)
        self.prefix = self._choose_prefix(prefix)
        for path, choice in self._choices.items():
            self._choices[path] = self._with_prefix(*choice, is_own=path in of_mapping)

    def steps(self, ignored: set[str]) -> list[Step]:
        """Returns each variable that has a tensor in the file, with this tensor.

        Args:
            ignored: Keys to treat as if the file lacked them.
        """
        self._keys = set(self._source.entries) - ignored
        layouts = FileLayouts(self._source, self._targets, self._choices, self._keys, self._orders)
        found = [self._step(target, layouts) for target in self._targets]
        steps = [step for step in found if step is not None]
        self._report_repeated_keys(steps)
        self.mistakes += layouts.square_kernels(steps) + layouts.conflicting_orders(steps)
        self.mistakes += computed_weight_errors(steps, self._source.entries)
        return steps

    def expected_key(self, target: Target) -> str | None:
        """Returns the key that a variable should have; None if the mapping gives no key."""
        if target.path not in self._choices:
            return None
        _, names = self._choices[target.path]
        return next(iter(names))

    def _step(self, target: Target, layouts: FileLayouts) -> Step | None:
        """Returns the tensor of a variable; None if the file has none for it."""
        if target.path not in self._choices:
            return None
        key, names = self._choices[target.path]
        found = [name for name in names if name in self._keys]
        copies = [copy for copy in key.copies if copy in self._keys]
        if not found and copies:
            found = [copies.pop(0)]
        if not found:
            return None
        if len(found) > 1:
            self.mistakes.append(
                f"'{target.path}' has two keys in the file, '{found[0]}' and '{found[1]}': map the "
                "variable, not its layer, to one of them, or ignore the other"
            )
        name = found[0]
        entry = self._source.entries[name]
        layout, error = layouts.layout(target, name)
        if _is_same_but_for_size_1(target, entry.shape, layout.shape):
            layout = dataclasses.replace(layout, shape=entry.shape)
        if _is_quantized(target) and name != self.prefix + target.path:
            self.mistakes.append(
                f"'{target.path}' is quantized to {target.dtype}: load the weights before "
                "model.quantize(...)"
            )
        elif error:
            self.mistakes.append(error)
        elif entry.shape != layout.shape:
            self.mistakes.append(_wrong_shape(target, layout, name, entry))
        elif not _is_castable(entry.dtype, target.dtype):
            self.mistakes.append(
                f"'{target.path}' is {target.dtype}, and key '{name}' is {entry.dtype}: convert "
                "the tensor in the file"
            )
        return Step(target, name, entry, layout, tuple(copies))

    def _choose_prefix(self, prefix: str | None) -> str:
        """Returns the beginning of all keys. Reports a prefix that no key has."""
        if prefix is None:
            return self._find_prefix()
        if not prefix or any(key.startswith(prefix) for key in self._source.entries):
            return prefix
        found = self._find_prefix()  # with the wrong prefix, every variable would be missing too
        self.mistakes.append(
            f"prefix={prefix!r}: no key begins with it; the keys are found with prefix={found!r}"
        )
        return found

    def _with_prefix(
        self, key: Key, names: dict[str, bool | None], is_own: bool
    ) -> tuple[Key, dict[str, bool | None]]:
        """Adds the prefix to the possible keys of a variable, and to its copies.

        Args:
            key, names: Its key in the mapping, and its possible keys without the prefix.
            is_own: bool. True if `mapping` has the key. The key may then have the prefix already,
                or the key may have no prefix in the file, such as the key of a head.
        """
        full = {self.prefix + name: style for name, style in names.items()}
        is_whole = is_own and self._keys.isdisjoint(full) and not self._keys.isdisjoint(names)
        copies = (
            copy if copy in self._keys and is_whole else self.prefix + copy for copy in key.copies
        )
        return dataclasses.replace(key, copies=tuple(copies)), names if is_whole else full

    def _find_prefix(self) -> str:
        names = [names for _, names in self._choices.values()]
        found = find_prefix(names, self._wanted)
        if len(found) > 1:
            self.mistakes.append(
                f"the keys fit equally well with the prefix {found[0]!r} and with {found[1]!r}: "
                "give one of them as prefix"
            )
        return found[0] if found else ""

    def _report_unused(self, rules: KeyRules) -> None:
        """Reports patterns of the mapping that match nothing."""
        paths = [target.path for target in self._targets]
        owners = {path.rpartition("/")[0] for path in paths}
        hint = hints({*paths, *owners})
        some = f"; there are {', '.join(paths[:5])}{', ...' if len(paths) > 5 else ''}"
        for pattern in rules.unused():
            inner = _first_inside(pattern, owners)
            self.mistakes.append(
                f"mapping: {pattern!r} matches layers whose weights are in other layers: map "
                f"these layers, such as '{inner}'"
                if inner
                else f"mapping: {pattern!r} matches no variable and no layer{hint(pattern) or some}"
            )

    def _report_repeated_keys(self, steps: list[Step]) -> None:
        """Reports keys that several variables use, unless the mapping allows it."""
        users: dict[str, list[str]] = {}
        for step in steps:
            if not self._choices[step.target.path][0].repeated:
                users.setdefault(step.key, []).append(step.target.path)
        for key, paths in users.items():
            if len(paths) > 1:
                both = " and ".join(f"'{path}'" for path in paths[:2])
                more = f" and {len(paths) - 2} more" if len(paths) > 2 else ""
                self.mistakes.append(
                    f"key '{key}' is used by several variables, {both}{more}: give each its own "
                    "key, or Key(..., repeated=True) if they hold the same weight"
                )


def _is_same_but_for_size_1(target: Target, in_file: Shape, expected: Shape) -> bool:
    """Returns True if a tensor has other axes of size 1 than expected, and no other order.

    This holds for vectors, such as LayerScale's, and for a table of positions with an axis for the
    examples. A bias is always a vector without such axes.
    """
    if isinstance(target.owner, keras.layers.Embedding):
        return in_file == (1, *expected)
    axes, expected_axes = (tuple(n for n in shape if n != 1) for shape in (in_file, expected))
    return len(axes) < 2 and axes == expected_axes and not has_known_use(target)


def _first_inside(pattern: str, owners: Iterable[str]) -> str | None:
    """Returns the path of a layer with weights inside a layer that a pattern matches, or None."""
    expression = compiled(pattern, pattern)
    for path in sorted(owners):
        parts = path.split("/")
        if any(matches(expression, "/".join(parts[:i])) for i in range(1, len(parts))):
            return path
    return None


def _wrong_shape(target: Target, layout: Layout, key: str, entry: Entry) -> str:
    """Returns the error for a tensor with a wrong shape."""
    error = f"'{target.path}' is {target.shape}"
    if layout.shape != target.shape:
        error += f", so the file must have {layout.shape} ({layout.words} when it is read)"
    error += f"; but key '{key}' is {entry.shape}"
    if is_table(target) and entry.shape == target.shape[::-1]:
        error += f": {TRANSPOSED_TABLE}"
    elif entry.shape == target.shape:
        order = "order of axes"
        if isinstance(target.owner, keras.layers.GRUCell):
            order += ", and the gates in the order update, reset, new"
        error += f": map to Key({key!r}, transposed=False) if the file has Keras's {order}"
    elif is_known_layout(target) and entry.shape == torch_shape(target):
        error += f": map to Key({key!r}, transposed=True) if the file has PyTorch's order of axes"
    elif _is_linear_and_convolution(target, layout, entry.shape):
        error += (
            ": PyTorch's Linear and convolution of size 1 have the same numbers; write the tensor "
            f"to the file with the shape {layout.shape}"
        )
        if len(entry.shape) > len(layout.shape):
            error += (
                ". PyTorch then has the channels first, so a kernel behind a later Flatten needs "
                "Key(..., flattened=(channels, positions))"
            )
    return error


def _is_linear_and_convolution(target: Target, layout: Layout, in_file: Shape) -> bool:
    """Returns True if a kernel is PyTorch's Linear, and the file has a convolution, or the reverse.

    The shapes then differ only by the convolution's size of 1.
    """
    if type(target.owner) not in _KERNELS_OF_SIZE_1 or "transposed" not in layout.words:
        return False
    shapes = sorted((in_file, layout.shape), key=len)
    return len(shapes[0]) == 2 and shapes[1] == shapes[0] + (1,) * (len(shapes[1]) - 2)


def _is_quantized(target: Target) -> bool:
    """Returns True for the integers of a quantized kernel. Its scales are other variables."""
    mode = getattr(unwrapped(target.owner), "quantization_mode", None)
    return mode is not None and target.dtype.startswith(("int", "uint"))


def _is_castable(source: str, target: str) -> bool:
    """Returns True if numbers of one dtype can be converted to another."""
    return source in _FLOATS if "float" in target else source == target
