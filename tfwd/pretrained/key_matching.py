"""Search for the tensor of each variable, with errors for keys that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import keras

from tfwd import _keras
from tfwd.path_patterns import compiled, matches
from tfwd.pretrained.flatten_order.axes import same_order
from tfwd.pretrained.flatten_order.layer_groups import unwrapped
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.flatten_order.order_search import orders_by_layer
from tfwd.pretrained.flatten_order.orders import (
    FeatureOrder,
    FlattenedAxes,
    UnknownFeatureOrder,
    flattened_image,
)
from tfwd.pretrained.key_rules import (
    FamilyRules,
    Key,
    KeyMapping,
    KeyRules,
    find_prefix,
    possible_keys,
    style_of_copy,
)
from tfwd.pretrained.layouts import Layout, Step
from tfwd.pretrained.similar_names import hints
from tfwd.pretrained.sources.base import Entry, Source
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import (
    feature_orders,
    has_known_use,
    layout_along,
    layout_of,
)
from tfwd.pretrained.unknown_layouts import unknown_layout

# Ends of keys that only Keras gives to the weights of its layers, and that only PyTorch gives.
_KERAS_ENDINGS = (".kernel", ".moving_mean", ".moving_variance", ".embeddings")
_TORCH_ENDINGS = (".weight", ".running_mean", ".running_var", ".num_batches_tracked")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


class KeyMatching:
    """Search for the tensor of each variable.

    Args:
        model: The model.
        source: The open file.
        targets: Variables of the model.
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
        model: keras.layers.Layer,
        source: Source,
        targets: list[Target],
        mapping: KeyMapping | None,
        prefix: str | None,
        family_rules: FamilyRules | None,
        wanted: Sequence[str],
    ) -> None:
        self._source, self._targets, self._wanted = source, targets, wanted
        self._keys = set(source.entries)
        self._of_owner: dict[int, list[Target]] = {}
        for target in targets:
            self._of_owner.setdefault(id(target.owner), []).append(target)
        self._orders = orders_by_layer(model)
        self.mistakes: list[str] = list(family_rules.problems) if family_rules else []
        rules = KeyRules(mapping or {})
        family = KeyRules(family_rules.keys if family_rules else {})
        # By path of a variable: its key in the mapping, and its possible keys in the file.
        self._choices: dict[str, tuple[Key, dict[str, bool | None]]] = {}
        for target in targets:
            found = rules.keys(target) or family.keys(target)
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
                self._choices[target.path] = key, possible_keys(target, key, is_layer)
        self.unused_family_keys = family.unused_keys()
        self._report_unused(rules)
        self.prefix = self._choose_prefix(prefix)

    def steps(self, ignored: set[str]) -> list[Step]:
        """Returns each variable that has a tensor in the file, with this tensor.

        Args:
            ignored: Keys to treat as if the file lacked them.
        """
        self._keys = set(self._source.entries) - ignored
        steps = [step for target in self._targets if (step := self._step(target)) is not None]
        self._report_repeated_keys(steps)
        self._report_partly_given_orders(steps)
        return steps

    def expected_key(self, target: Target) -> str | None:
        """Returns the key that a variable should have; None if the mapping gives no key."""
        if target.path not in self._choices:
            return None
        _, names = self._choices[target.path]
        return self.prefix + next(iter(names))

    def _step(self, target: Target) -> Step | None:
        """Returns the tensor of a variable; None if the file has none for it."""
        if target.path not in self._choices:
            return None
        key, names = self._choices[target.path]
        found = [self.prefix + name for name in names]
        found = [name for name in found if name in self._keys]
        copies = [self.prefix + copy for copy in key.copies]
        copies = [copy for copy in copies if copy in self._keys]
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
        entry, of_model = self._source.entries[name], self._orders_of_model(target)
        transposed, orders = self._is_transposed(target, key, name), self._orders_at(target, key)
        gain_of = self._weight_of_gain(target)
        if gain_of is not None and transposed:
            layout, error = self._layout_of_gain(target, *gain_of)
        else:
            layout = layout_of(target, transposed, orders)
            error = unknown_layout(target, key, transposed, orders, of_model)
        error = error or self._mixed_names(target, key, name, of_model)
        if error:
            self.mistakes.append(error)
        elif entry.shape != layout.shape:
            self.mistakes.append(_wrong_shape(target, layout, name, entry))
        elif not _is_castable(entry.dtype, target.dtype):
            self.mistakes.append(
                f"'{target.path}' is {target.dtype}, and key '{name}' is {entry.dtype}: convert "
                "the tensor in the file"
            )
        return Step(target, name, entry, layout, tuple(copies))

    def _orders_of_model(self, target: Target) -> LayerOrders:
        """Returns the orders at the owner of a variable that the model shows."""
        return self._orders.get(id(unwrapped(target.owner))) or LayerOrders()

    def _orders_at(self, target: Target, key: Key) -> LayerOrders:
        """Returns the orders at the owner of a variable.

        A `flattened` for one weight of a layer also counts for its other weights without one, if
        tfwd knows how the layer uses them.
        """
        of_model = self._orders_of_model(target)
        if not has_known_use(target):
            reason = f"tfwd does not know how '{target.owner.name}' uses it on flattened features"
            if key.flattened is None and of_model.inputs is not None:
                return LayerOrders(UnknownFeatureOrder(reason))
            if key.flattened is None and isinstance(of_model.outputs, FlattenedAxes):
                return LayerOrders(None, UnknownFeatureOrder(reason))
            return _orders_with_key(of_model, key)
        given = key
        for other in self._of_owner[id(target.owner)] if key.flattened is None else ():
            of_other = self._choices.get(other.path, (key, None))[0]
            given = of_other if of_other.flattened is not None else given
        return _orders_with_key(of_model, given)

    def _is_transposed(self, target: Target, key: Key, name: str | None) -> bool:
        """Returns True if the file has the outputs of a kernel first.

        Args:
            target: The variable.
            key: Its key in the mapping.
            name: str. Its key in the file. None if the file has no such key.
        """
        if key.transposed is not None:
            return key.transposed
        transposed = None if name is None else self._styles(target)[name]
        if transposed is None:
            transposed = self._source.transposed
        is_bias = len(target.shape) == 1 or target.name == "bias"
        has_orders = self._orders_at(target, key) != LayerOrders()
        if (has_orders or isinstance(target.owner, keras.layers.GRUCell)) and is_bias:
            # "bias" is a name in both libraries.
            transposed = transposed and not self._has_keras_kernel(target)
        return transposed

    def _weight_of_gain(self, target: Target) -> tuple[Target, int] | None:
        """Returns the weight of a gain of `WeightNorm`, and its axis; None for other variables."""
        gains = getattr(target.owner, "gain_axes", {})
        if id(target.variable) not in gains:
            return None
        weight, axis = gains[id(target.variable)]
        return next(other for other in self._targets if id(other.variable) == weight), axis

    def _layout_of_gain(
        self, target: Target, weight: Target, axis: int
    ) -> tuple[Layout, str | None]:
        """Returns the layout of a gain, whose entries have the order of its weight, and an error.

        Args:
            target: The gain.
            weight: Its weight.
            axis: int. The axis of the weight with an entry of the gain for each of its positions.
        """
        key, names = self._choices.get(weight.path, (Key(""), {}))
        name = next((n for n in (self.prefix + each for each in names) if n in self._keys), None)
        layout = Layout.unchanged(target.shape)
        if not self._is_transposed(weight, key, name):
            return layout, None
        found = layout_along(layout_of(weight, True, self._orders_at(weight, key)), axis)
        if found is None:
            return layout, (
                f"'{target.path}' has no order in PyTorch, because the positions on axis {axis} of "
                f"'{weight.path}' are on several axes there: write the gain to the file in Keras's "
                "order, and map to Key(..., transposed=False)"
            )
        return found, None

    def _styles(self, target: Target) -> dict[str, bool | None]:
        """Returns the style of each key of a variable, and of each copy, as in `possible_keys`."""
        key, names = self._choices[target.path]
        copies = {copy: style_of_copy(target, copy, names) for copy in key.copies}
        return {self.prefix + name: is_torch for name, is_torch in {**copies, **names}.items()}

    def _mixed_names(self, target: Target, key: Key, name: str, orders: LayerOrders) -> str | None:
        """Returns the error for a key with a name of Keras in a file with names of PyTorch.

        It may be a parameter of PyTorch that is called "scale" or "gamma", so PyTorch's order of a
        flattened image is possible.
        """
        if key.transposed is not None or self._styles(target)[name] is not False:
            return None
        is_clear = any(other.endswith(_KERAS_ENDINGS) for other in self._source.entries)
        if is_clear and _keras.is_of_keras(type(target.owner)):
            return None
        other = next((k for k in self._source.entries if k.endswith(_TORCH_ENDINGS)), None)
        if other is None or not any(feature_orders(target, orders)):
            return None
        return (
            f"'{target.path}': the model flattens an image for this weight. The key '{name}' ends "
            f"as in Keras, but '{other}' in the same file ends as in PyTorch: map to "
            f"Key({key.name!r}, transposed=True) if the file has PyTorch's order of axes; "
            "otherwise map to Key(..., transposed=False)"
        )

    def _has_keras_kernel(self, target: Target) -> bool:
        """Returns True if the file has another weight of the same layer in Keras's style."""
        for other in self._of_owner[id(target.owner)]:
            if other.path not in self._choices:
                continue
            given = self._choices[other.path][0].transposed
            if given is False:
                return True
            if given is None and any(
                is_torch is False and name in self._keys
                for name, is_torch in self._styles(other).items()
            ):
                return True
        return False

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

    def _report_partly_given_orders(self, steps: list[Step]) -> None:
        """Reports weights on flattened features whose order is given for other weights only."""
        given: list[tuple[FeatureOrder, str]] = []
        others: list[tuple[FeatureOrder, Step]] = []
        for step in steps:
            key = self._choices[step.target.path][0]
            order = feature_orders(step.target, self._orders_of_model(step.target))[0]
            if step.target.name == "bias" or key.transposed is False:
                continue  # a bias has the order of the outputs
            if not isinstance(order, FlattenedAxes):
                continue
            if feature_orders(step.target, self._orders_at(step.target, key))[0] is None:
                given.append((order, step.target.path))
            else:
                others.append((order, step))
        for order, step in others:
            same = [path for other, path in given if same_order(order, other)]
            if same:
                key = self._choices[step.target.path][0]
                self.mistakes.append(
                    f"'{step.target.path}' takes the same flattened features as '{same[0]}', whose "
                    f"key has flattened=(): map to Key({key.name!r}, flattened=()) too if PyTorch "
                    "has the same order here; otherwise give their shape in PyTorch"
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


def _first_inside(pattern: str, owners: Iterable[str]) -> str | None:
    """Returns the path of a layer with weights inside a layer that a pattern matches, or None."""
    expression = compiled(pattern, pattern)
    for path in sorted(owners):
        parts = path.split("/")
        if any(matches(expression, "/".join(parts[:i])) for i in range(1, len(parts))):
            return path
    return None


def _orders_with_key(orders: LayerOrders, key: Key) -> LayerOrders:
    """Returns the orders at a layer. A key with `flattened` defines the order of the inputs.

    It also says that the outputs have PyTorch's order, if the plan asks only for this order: an
    empty `flattened` if nothing was flattened before the layer, and the shape of the inputs if the
    model shows this shape.
    """
    inputs, outputs = orders.inputs, orders.outputs
    if key.flattened is None:
        return orders
    is_unknown = isinstance(outputs, UnknownFeatureOrder)
    if not key.flattened:
        is_answer = inputs is None or (is_unknown and inputs == outputs)
    else:
        is_answer = is_unknown and isinstance(inputs, FlattenedAxes)
    given = flattened_image(tuple(key.flattened))
    return LayerOrders(given, None if is_answer else outputs)


def _wrong_shape(target: Target, layout: Layout, key: str, entry: Entry) -> str:
    """Returns the error for a tensor with a wrong shape."""
    error = f"'{target.path}' is {target.shape}"
    if layout.shape != target.shape:
        error += f", so the file must have {layout.shape} ({layout.words} when it is read)"
    error += f"; but key '{key}' is {entry.shape}"
    if entry.shape == target.shape:
        error += f": map to Key({key!r}, transposed=False) if the file has Keras's order of axes"
    return error


def _is_castable(source: str, target: str) -> bool:
    """Returns True if numbers of one dtype can be converted to another."""
    return source in _FLOATS if "float" in target else source == target
