"""Whose order a tensor of a file has, by the name of its key: PyTorch's order or Keras's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfwd import _keras
from tfwd.pretrained.flatten_order.layer_orders import LayerOrders
from tfwd.pretrained.flatten_order.orders import Shape
from tfwd.pretrained.key_rules import Key, last_component, style_of_copy
from tfwd.pretrained.known_weights import feature_orders, is_known_layout
from tfwd.pretrained.sources.base import Source
from tfwd.pretrained.target_variables import Target
from tfwd.pretrained.torch_layouts import layout_of
from tfwd.pretrained.unknown_orders import in_keras_order

# Ends of keys that only Keras gives to the weights of its layers, and that only PyTorch gives.
_KERAS_ENDINGS = {"kernel", "moving_mean", "moving_variance", "embeddings"}
_TORCH_ENDINGS = {"weight", "running_mean", "running_var", "num_batches_tracked"}

# By path of a variable: its key in the mapping, and its possible keys in the file, as
# `possible_keys` returns them.
Choices = Mapping[str, tuple[Key, dict[str, bool | None]]]


class KeyStyles:
    """Orders of axes that the names of keys show.

    Args:
        source: The open file.
        of_owner: Variables of each layer that has variables, by the id of the layer.
        choices: Keys of the variables.
        keys: Keys of the file that `ignore` does not match.
    """

    def __init__(
        self,
        source: Source,
        of_owner: Mapping[int, Sequence[Target]],
        choices: Choices,
        keys: Collection[str],
    ) -> None:
        self._of_owner, self._choices = of_owner, choices
        self._keys = keys
        self._shapes = {key: entry.shape for key, entry in source.entries.items()}
        endings = {last_component(key) for key in keys}
        self._has_keras_endings = not endings.isdisjoint(_KERAS_ENDINGS)
        self._torch_key = next(
            (k for k in source.entries if last_component(k) in _TORCH_ENDINGS), None
        )
        # A file of safetensors that JAX or Keras wrote has no name of PyTorch.
        is_of_keras = self._has_keras_endings and self._torch_key is None
        self._default = source.transposed and not is_of_keras

    def of(self, target: Target) -> dict[str, bool | None]:
        """Returns the style of each key of a variable, and of each copy, as in `possible_keys`."""
        key, names = self._choices[target.path]
        copies = {copy: style_of_copy(target, copy, names) for copy in key.copies}
        return {**copies, **names}

    def is_transposed(self, target: Target, key: Key, name: str | None) -> bool:
        """Returns True if the file has a tensor in PyTorch's order of axes.

        The mapping decides, then the key's name, then the other weights of the layer if the name is
        one of both libraries, then the file.

        Args:
            target: The variable.
            key: Its key in the mapping.
            name: str. Its key in the file. None if the file has no such key.
        """
        if key.transposed is not None:
            return key.transposed
        style = None if name is None else self._by_name(target, name)
        if style is None and (len(target.shape) == 1 or target.name == "bias"):
            style = self._of_layer(target, by_names=False)
        return self._default if style is None else style

    def is_keras_name(self, target: Target, name: str) -> bool:
        """Returns True if a key's name is Keras's, or a name of both libraries beside one of Keras.

        Args:
            target: The variable.
            name: str. Its key in the file.
        """
        style = self._by_name(target, name)
        if style is None and target.name == "bias":
            style = self._of_layer(target, by_names=True)
        return style is False

    def mixed_names(self, target: Target, key: Key, name: str, orders: LayerOrders) -> str | None:
        """Returns the error for a key with a name of Keras in a file with names of PyTorch.

        It may be a parameter of PyTorch that is called "scale" or "kernel", so PyTorch's order of
        axes is possible if the shape fits both orders, and PyTorch's order of a flattened image.

        Args:
            target: The variable.
            key: Its key in the mapping.
            name: str. Its key in the file.
            orders: Orders at the variable's layer that the model shows.
        """
        is_mixed = key.transposed is None and self._torch_key is not None
        if not is_mixed or self.of(target)[name] is not False:
            return None
        is_of_keras = self._has_keras_endings and _keras.is_of_keras(type(target.owner))
        start = f"'{target.path}': "
        if any(feature_orders(target, orders)) and not is_of_keras:
            start += "the model flattens an image for this weight. "
        elif not _fits_both_orders(target, self._shapes[name]):
            return None
        advice = (
            f"map to Key({key.name!r}, transposed=True) if the file has PyTorch's order of axes; "
            "otherwise map to Key(..., transposed=False)"
        )
        if len(target.shape) != 2 and not is_known_layout(target):
            advice = in_keras_order(target, key, orders)
        return (
            f"{start}The key '{name}' ends as in Keras, but '{self._torch_key}' in the same file "
            f"ends as in PyTorch: {advice}"
        )

    def _by_name(self, target: Target, name: str) -> bool | None:
        """Returns the style that a key's name shows; None for "bias", a name of both libraries."""
        return None if last_component(name) == "bias" else self.of(target)[name]

    def _of_layer(self, target: Target, by_names: bool) -> bool | None:
        """Returns the style of a layer's other weights in the file: Keras's if one has it.

        Args:
            target: The variable.
            by_names: bool. True if only names count, and not `transposed=`.
        """
        found: set[bool | None] = set()
        for other in self._of_owner[id(target.owner)]:
            if other is target or other.path not in self._choices:
                continue
            given = self._choices[other.path][0].transposed
            if given is not None and not by_names:
                found.add(given)
                continue
            found.update(self._by_name(other, n) for n in self.of(other) if n in self._keys)
        return False if False in found else (True if True in found else None)


def _fits_both_orders(target: Target, in_file: Shape) -> bool:
    """Returns True if a tensor may have PyTorch's order of axes or Keras's, by its shape."""
    if is_known_layout(target):
        layout = layout_of(target, LayerOrders())
        merged = layout.merged()
        return layout.shape == in_file and (merged is None or len(merged[1]) > 1)
    axes = tuple(size for size in in_file if size != 1)
    return len(axes) > 1 and axes in (axes[::-1], axes[-1:] + axes[:-1])
