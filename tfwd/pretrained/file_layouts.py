"""Layout in which the file has each variable: by its key, its layer and the model around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

from tfwd.pretrained.flatten_order.layer_groups import unwrapped
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders, Side
from tfwd.pretrained.flatten_order.orders import (
    FlattenedAxes,
    JoinedFeatures,
    UnknownFeatureOrder,
)
from tfwd.pretrained.gains import gain_layout, gain_of
from tfwd.pretrained.given_orders import (
    OPTIONS,
    Features,
    conflicting_orders,
    with_given,
    with_given_in_keras,
)
from tfwd.pretrained.key_rules import Key
from tfwd.pretrained.key_styles import Choices, KeyStyles
from tfwd.pretrained.known_weights import (
    feature_orders,
    feature_sides,
    has_known_use,
    is_power_iteration,
)
from tfwd.pretrained.layouts import Layout, Step
from tfwd.pretrained.recurrent_biases import wrong_recurrent_bias
from tfwd.pretrained.recurrent_gates import unknown_gates
from tfwd.pretrained.sources.base import Source
from tfwd.pretrained.square_kernels import Kernel, is_kernel, square_kernel_errors
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import inputs_first_layout, layout_of
from tfwd.pretrained.unknown_layouts import unknown_layout
from tfwd.pretrained.unknown_orders import missing_order, unknown_order


class FileLayouts:
    """Layouts in which a file has the variables of a model.

    Args:
        source: The open file.
        targets: Variables of the model.
        choices: Keys of the variables.
        keys: Keys of the file that `ignore` does not match.
        orders: Orders of features that the model shows, by the id of a layer.
    """

    def __init__(
        self,
        source: Source,
        targets: Sequence[Target],
        choices: Choices,
        keys: Collection[str],
        orders: Mapping[int, LayerOrders],
    ) -> None:
        self._source, self._choices, self._orders = source, choices, orders
        self._keys = keys
        self._by_id = {id(target.variable): target for target in targets}
        self._of_owner: dict[int, list[Target]] = {}
        for target in targets:
            self._of_owner.setdefault(id(target.owner), []).append(target)
        self._styles = KeyStyles(source, self._of_owner, choices, keys)

    def layout(self, target: Target, name: str) -> tuple[Layout, str | None]:
        """Returns the layout in which the file has a variable, and an error, or None.

        Args:
            target: The variable.
            name: str. Its key in the file.
        """
        key, _ = self._choices[target.path]
        of_model = self._orders_of_model(target)
        transposed = self._styles.is_transposed(target, key, name)
        gain = gain_of(target, self._by_id)
        if error := wrong_recurrent_bias(target, key, transposed, name, self._source.entries):
            return Layout.unchanged(target.shape), error
        if gain is not None:
            in_keras = not transposed or self._is_in_keras_order(gain.weight)
            of_weight = self._layout_of_weight(gain.weight)
            layout, error = gain_layout(gain, of_weight, self._source.entries[name].shape, in_keras)
        elif transposed:
            orders = self._orders_at(target, key)
            layout = layout_of(target, orders)
            if not has_known_use(target):  # it needs its own entry in the mapping
                key = dataclasses.replace(key, name=name)
            error = unknown_layout(target, key, orders, of_model)
        else:
            orders = self._orders_at(target, key, inputs_first=True)
            layout = inputs_first_layout(target, orders, self._source.entries[name].shape)
            error = unknown_order(target, key, orders, of_model)
            is_clear = key.transposed is None or self._styles.is_keras_name(target, name)
            if not (error or is_clear):
                error = missing_order(target, key, self._options(target, key), of_model)
        error = error or unknown_gates(target, key, name)
        return layout, error or self._styles.mixed_names(target, key, name, of_model)

    def square_kernels(self, steps: Sequence[Step]) -> list[str]:
        """Returns the errors of square kernels whose order of axes in the file is not known.

        Args:
            steps: The variables that are loaded.
        """
        kernels = []
        for step in filter(is_kernel, steps):
            key = self._choices[step.target.path][0]
            style = self._styles.of(step.target)[step.key]
            transposed = self._styles.is_transposed(step.target, key, step.key)
            kernels.append(Kernel(step, style, key.transposed, transposed))
        names_show = not self._source.transposed
        return square_kernel_errors(kernels, self._source.entries, names_show)

    def conflicting_orders(self, steps: Sequence[Step]) -> list[str]:
        """Returns the errors of features whose order some weights have, and others have not.

        Args:
            steps: The variables that are loaded.
        """
        return conflicting_orders([one for step in steps for one in self._features(step)])

    def _features(self, step: Step) -> Iterator[Features]:
        """Yields the features that a weight has on its axes, with their order in the file."""
        target, key = step.target, self._choices[step.target.path][0]
        if not has_known_use(target):
            return
        of_model, options = self._orders_of_model(target), self._options(target, key)
        inputs_first = not self._styles.is_transposed(target, key, step.key)
        orders = feature_orders(target, self._orders_at(target, key, inputs_first))
        for side, order in zip(feature_sides(target), orders, strict=True):
            if side in of_model.axes and not isinstance(order, UnknownFeatureOrder):
                axis, option, shape = of_model.axes[side], OPTIONS[side], options[side]
                is_own = getattr(key, option) is not None
                yield Features(
                    axis, order, target.path, option, shape, is_own, inputs_first, step.key
                )

    def _orders_of_model(self, target: Target) -> LayerOrders:
        """Returns the orders at the owner of a variable that the model shows."""
        return self._orders.get(id(unwrapped(target.owner))) or LayerOrders()

    def _orders_at(self, target: Target, key: Key, inputs_first: bool = False) -> LayerOrders:
        """Returns the orders at the owner of a variable, with those that the mapping gives.

        Args:
            target: The variable.
            key: Its key in the mapping.
            inputs_first: bool. True if the file has the tensor in Keras's order of axes. It then
                has PyTorch's order of features only if the mapping gives a shape. Default False.
        """
        of_model = self._orders_of_model(target)
        if not has_known_use(target):
            return self._orders_of_unknown_use(target, key, of_model, inputs_first)
        options = self._options(target, key)
        given = with_given_in_keras if inputs_first else with_given
        return given(of_model, options["inputs"], options["outputs"])

    def _options(self, target: Target, key: Key) -> dict[Side | None, tuple[int, ...] | None]:
        """Returns the shapes that the mapping gives for the sides of a weight's layer.

        A shape for one weight of a layer also counts for its other weights without one, if tfwd
        knows how the layer uses them. But () beside `transposed=False` states that one tensor is in
        Keras's order, so it does not count for a tensor in PyTorch's order.
        """
        found: dict[Side | None, tuple[int, ...] | None] = {
            side: getattr(key, option) for side, option in OPTIONS.items()
        }
        for other in self._of_owner[id(target.owner)] if has_known_use(target) else ():
            if other.path not in self._choices or not has_known_use(other):
                continue
            of_other = self._choices[other.path][0]
            for side, option in OPTIONS.items():
                shape = getattr(of_other, option)
                if found[side] is None and (
                    shape or of_other.transposed is not False or self._is_in_keras_order(target)
                ):
                    found[side] = shape
        return found

    def _is_in_keras_order(self, target: Target) -> bool:
        """Returns True if the file has a variable in Keras's order of axes."""
        key, names = self._choices.get(target.path, (Key(""), {}))
        name = next((name for name in names if name in self._keys), None)
        return not self._styles.is_transposed(target, key, name)

    def _orders_of_unknown_use(
        self, target: Target, key: Key, of_model: LayerOrders, inputs_first: bool
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
        if is_power_iteration(target) or (inputs_first and not is_given):
            return LayerOrders()
        if not is_given:
            unknown = UnknownFeatureOrder(
                f"tfwd does not know how '{target.owner.name}' uses it on flattened features"
            )
            inputs, outputs = (
                unknown if isinstance(order, (FlattenedAxes, JoinedFeatures)) else order
                for order in (of_model.inputs, of_model.outputs)
            )
            return LayerOrders(inputs, outputs)
        given = with_given_in_keras if inputs_first else with_given
        orders = given(of_model, key.flattened, key.unflattened)
        if len(target.shape) == 1:  # its only axis
            return LayerOrders(orders.inputs if key.flattened is not None else orders.outputs)
        return orders

    def _layout_of_weight(self, weight: Target) -> Layout:
        """Returns the layout in which the file has the weight of a gain."""
        if self._is_in_keras_order(weight):
            return Layout.unchanged(weight.shape)
        key, _ = self._choices.get(weight.path, (Key(""), {}))
        return layout_of(weight, self._orders_at(weight, key))
