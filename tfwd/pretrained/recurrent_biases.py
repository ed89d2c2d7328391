"""Biases of recurrent layers. PyTorch has two tensors where Keras has one variable."""

from __future__ import annotations

import re
from collections.abc import Collection

import keras

from tfwd.pretrained.key_rules import Key, last_component
from tfwd.pretrained.known_weights import CELLS
from tfwd.pretrained.target_variables import Target


def wrong_recurrent_bias(
    target: Target, key: Key, transposed: bool, name: str, keys: Collection[str]
) -> str | None:
    """Returns the error for a bias of a recurrent layer in PyTorch's form; None without one.

    Args:
        target: The variable.
        key: Its key in the mapping.
        transposed: bool. True if the file has the outputs of a kernel first, as in PyTorch.
        name: str. Its key in the file.
        keys: Keys of the file.
    """
    owner = target.owner
    if not isinstance(owner, CELLS) or target.name != "bias":
        return None
    last = last_component(key.name)
    is_half = last.startswith(("bias_ih", "bias_hh"))
    new = key.name.removesuffix(last) + re.sub("^bias_[ih]h", "bias", last)
    other_half = name.removesuffix(last) + _other_half(last)
    if key.transposed is False and not (is_half and other_half in keys):
        return None
    is_gru = isinstance(owner, keras.layers.GRUCell)
    if is_half:
        how = "stack them, with the gates in the order update, reset, new" if is_gru else "add them"
        return (
            f"'{target.path}' is one variable, and PyTorch has two biases, bias_ih and bias_hh: "
            f"{how}, write the result to the file as '{new}', and map to Key({new!r}, "
            "transposed=False)"
        )
    if is_gru and transposed:
        return (
            f"'{target.path}' has its gates in another order in PyTorch: write the bias with the "
            "gates in the order update, reset, new to the file, and map to "
            f"Key({key.name!r}, transposed=False)"
        )
    return None


def _other_half(last: str) -> str:
    """Returns the last component of the key of PyTorch's other recurrent bias."""
    first, second = "bias_ih", "bias_hh"
    return last.replace(first, second) if first in last else last.replace(second, first)
