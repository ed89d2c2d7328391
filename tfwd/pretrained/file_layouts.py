"""Layout in which the file has each variable: by its key, its layer and the model around it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import keras

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_groups import unwrapped
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import (
    FlattenedAxes,
    JoinedFeatures,
    UnknownFeatureOrder,
)
from tfwd.pretrained.given_orders import (
    OPTIONS,
    Features,
    conflicting_orders,
    orders_in_keras,
    with_given,
)
from tfwd.pretrained.key_rules import Key, style_of_copy
from tfwd.pretrained.layouts import Layout, Step
from tfwd.pretrained.recurrent_biases import wrong_recurrent_bias
from tfwd.pretrained.sources.base import Source
from tfwd.pretrained.square_kernels import Kernel, is_matrix, square_kernel_errors
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import (
    feature_orders,
    feature_sides,
    has_known_use,
    inputs_first_layout,
    layout_along,
    layout_of,
)
from tfwd.pretrained.unknown_layouts import unknown_layout
from tfwd.pretrained.unknown_orders import missing_order, wrong_option

# Ends of keys that only Keras gives to the weights of its layers, and that only PyTorch gives.
_KERAS_ENDINGS = (".kernel", ".moving_mean", ".moving_variance", ".embeddings")
_TORCH_ENDINGS = (".weight", ".running_mean", ".running_var", ".num_batches_tracked")

# By path of a variable: its key in the mapping, and its possible keys in the file, as
# `possible_keys` returns them.
Choices = Mapping[str, tuple[Key, dict[str, bool | None]]]


class FileLayouts:
    """Layouts in which a file has the variables of a model.

    Args:
        source: The open file.
        targets: Variables of the model.
        choices: Keys of the variables, without the prefix.
        prefix: str. Beginning of all keys.
        keys: Keys of the file that `ignore` does not match.
        orders: Orders of features that the model shows, by the id of a layer.
    """

    def __init__(
        self,
        source: Source,
        targets: Sequence[Target],
        choices: Choices,
        prefix: str,
        keys: Collection[str],
        orders: Mapping[int, LayerOrders],
    ) -> None:
        self._source, self._choices, self._orders = source, choices, orders
        self._prefix, self._keys = prefix, keys
        self._by_id = {id(target.variable): target for target in targets}
        self._of_owner: dict[int, list[Target]] = {}
        for target in targets:
            self._of_owner.setdefault(id(target.owner), []).append(target)

    def layout(self, target: Target, name: str) -> tuple[Layout, str | None]:
        """Returns the layout in which the file has a variable, and an error, or None.

        Args:
            target: The variable.
            name: str. Its key in the file.
        """
        key, _ = self._choices[target.path]
        of_model = self._orders_of_model(target)
        transposed = self._is_transposed(target, key, name)
        gain_of = self._weight_of_gain(target)
        if error := wrong_recurrent_bias(
            target, key, transposed, self._prefix, self._source.entries
        ):
            return Layout.unchanged(target.shape), error
        if gain_of is not None and transposed:
            layout, error = self._layout_of_gain(target, *gain_of)
        elif transposed:
            orders = self._orders_at(target, key)
            layout = layout_of(target, orders)
            if not has_known_use(target):  # it needs its own entry in the mapping
                key = dataclasses.replace(key, name=name.removeprefix(self._prefix))
            error = unknown_layout(target, key, orders, of_model)
        else:
            given = orders_in_keras(key, of_model)
            layout = inputs_first_layout(target, given, self._source.entries[name].shape)
            error = wrong_option(target, key, of_model)
            if not error and key.transposed is False and not self._has_keras_names(target, name):
                error = missing_order(target, key, self._options(target, key), of_model)
        shape = self._source.entries[name].shape
        if gain_of is not None and math.prod(shape) == max(shape, default=0) == target.shape[0]:
            layout = dataclasses.replace(layout, shape=shape)  # PyTorch has (outputs, 1, 1)
        return layout, error or self._mixed_names(target, key, name, of_model)

    def square_kernels(self, steps: Sequence[Step]) -> list[str]:
        """Returns the errors of square kernels whose order of axes in the file is not known.

        Args:
            steps: The variables that are loaded.
        """
        kernels = []
        for step in filter(is_matrix, steps):
            key = self._choices[step.target.path][0]
            style = self._styles(step.target)[step.key]
            transposed = self._is_transposed(step.target, key, step.key)
            kernels.append(Kernel(step, style, key.transposed, transposed))
        return square_kernel_errors(kernels)

    def conflicting_orders(self, steps: Sequence[Step]) -> list[str]:
        """Returns the errors of features whose order some weights have, and others have not.

        Args:
            steps: The variables that are loaded.
        """
        return conflicting_orders([one for step in steps for one in self._features(step)])

    def _features(self, step: Step) -> Iterator[Features]:
        """Yields the features that a weight in PyTorch's order has on its axes."""
        target, key = step.target, self._choices[step.target.path][0]
        if not (has_known_use(target) and self._is_transposed(target, key, step.key)):
            return
        of_model, options = self._orders_of_model(target), self._options(target, key)
        orders = feature_orders(target, self._orders_at(target, key))
        for side, order in zip(feature_sides(target), orders, strict=True):
            if side in of_model.axes and not isinstance(order, UnknownFeatureOrder):
                is_own = getattr(key, OPTIONS[side]) is not None
                axis = of_model.axes[side]
                yield Features(axis, order, target.path, OPTIONS[side], options[side], is_own)

    def _orders_of_model(self, target: Target) -> LayerOrders:
        """Returns the orders at the owner of a variable that the model shows."""
        return self._orders.get(id(unwrapped(target.owner))) or LayerOrders()

    def _orders_at(self, target: Target, key: Key) -> LayerOrders:
        """Returns the orders at the owner of a variable, with those that the mapping gives."""
        of_model = self._orders_of_model(target)
        if not has_known_use(target):
            return self._orders_of_unknown_use(target, key, of_model)
        options = self._options(target, key)
        return with_given(of_model, options["inputs"], options["outputs"])

    def _options(self, target: Target, key: Key) -> dict[Side | None, tuple[int, ...] | None]:
        """Returns the shapes that the mapping gives for the sides of a weight's layer.

        A shape for one weight of a layer also counts for its other weights without one, if tfwd
        knows how the layer uses them.
        """
        flattened, unflattened = key.flattened, key.unflattened
        for other in self._of_owner[id(target.owner)] if has_known_use(target) else ():
            if other.path in self._choices and has_known_use(other):
                of_other = self._choices[other.path][0]
                flattened = of_other.flattened if flattened is None else flattened
                unflattened = of_other.unflattened if unflattened is None else unflattened
        return {"inputs": flattened, "outputs": unflattened}

    def _orders_of_unknown_use(
        self, target: Target, key: Key, of_model: LayerOrders
    ) -> LayerOrders:
        """Returns the orders at a weight of a user's layer, such as one that a subclass adds.

        A shape in a key for the whole layer does not count, because only some of its weights may
        have this order.
        """
        is_given = key.flattened is not None or key.unflattened is not None
        is_of_layer = key.name not in self._choices[target.path][1]
        if is_of_layer and (key.flattened or key.unflattened):
            unknown = UnknownFeatureOrder(
                f"a key for all weights of '{target.owner.name}' gives it no order, so map "
                f"'{target.path}' by itself"
            )
            return LayerOrders(unknown, of_model.outputs and unknown)
        if not is_given:
            unknown = UnknownFeatureOrder(
                f"tfwd does not know how '{target.owner.name}' uses it on flattened features"
            )
            inputs, outputs = (
                unknown if isinstance(order, (FlattenedAxes, JoinedFeatures)) else order
                for order in (of_model.inputs, of_model.outputs)
            )
            return LayerOrders(inputs, outputs)
        orders = with_given(of_model, key.flattened, key.unflattened)
        if len(target.shape) == 1 and is_given:  # its only axis
            return LayerOrders(orders.inputs if key.flattened is not None else orders.outputs)
        return orders

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
        if len(target.shape) != 1 and target.name != "bias":
            return transposed
        is_gru = isinstance(target.owner, keras.layers.GRUCell)
        depends = is_gru or self._orders_at(target, key) != LayerOrders()
        options = self._options(target, key)
        if any(options.get(side) is not None for side in feature_sides(target)):
            return transposed  # the mapping gives the order of its features
        # "bias" is a name in both libraries.
        return transposed and not (depends and self._has_keras_kernel(target))

    def _weight_of_gain(self, target: Target) -> tuple[Target, int] | None:
        """Returns the weight of a gain of `WeightNorm`, and its axis; None for other variables."""
        gains = getattr(target.owner, "gain_axes", {})
        number, axis = gains.get(id(target.variable), (None, 0))
        weight = self._by_id.get(number)
        return None if weight is None else (weight, axis)

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
        name = next((n for n in (self._prefix + each for each in names) if n in self._keys), None)
        layout = Layout.unchanged(target.shape)
        if not self._is_transposed(weight, key, name):
            return layout, None
        found = layout_along(layout_of(weight, self._orders_at(weight, key)), axis)
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
        return {self._prefix + name: is_torch for name, is_torch in {**copies, **names}.items()}

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

    def _has_keras_names(self, target: Target, name: str) -> bool:
        """Returns True if a key, or another key of the layer, ends with Keras's name of a weight.

        Args:
            target: The variable.
            name: str. Its key in the file.
        """
        if self._styles(target)[name] is False:
            return True
        return target.name == "bias" and self._has_keras_kernel(target, by_names=True)

    def _has_keras_kernel(self, target: Target, by_names: bool = False) -> bool:
        """Returns True if the file has another weight of the same layer in Keras's style.

        Args:
            target: The variable.
            by_names: bool. Only names count, and not `transposed=False`. Default False.
        """
        for other in self._of_owner[id(target.owner)]:
            if other.path not in self._choices:
                continue
            given = self._choices[other.path][0].transposed
            if given is False and not by_names:
                return True
            if given is not True and any(
                is_torch is False and name in self._keys
                for name, is_torch in self._styles(other).items()
            ):
                return True
        return False
