"""Gates of recurrent layers. The name of a tensor shows their order, or the mapping must."""

from __future__ import annotations

import re

import keras

from tfwd.pretrained.key_rules import Key, last_component
from tfwd.pretrained.known_weights import MATRICES, WITH_GATES
from tfwd.pretrained.target_variables import Target

# Last components of keys that PyTorch's or Keras's recurrent layers have. AWD-LSTM adds "_raw".
_KNOWN = re.compile(r"(weight|bias)_(ih|hh)(_.*)?|kernel|recurrent_kernel|bias")
_ORDERS = {
    keras.layers.LSTMCell: ("LSTM", "input, forget, cell, output", "input, forget, cell, output"),
    keras.layers.GRUCell: ("GRU", "update, reset, new", "reset, update, new"),
}


def unknown_gates(target: Target, key: Key, name: str) -> str | None:
    """Returns the error for a weight with gates in an unknown order; None if the order is known.

    A handwritten LSTM in PyTorch may have the gates in any order, as may other libraries.

    Args:
        target: The variable.
        key: Its key in the mapping.
        name: str. Its key in the file.
    """
    is_weight = isinstance(target.owner, WITH_GATES) and target.name in (*MATRICES, "bias")
    if not is_weight or key.transposed is not None or _KNOWN.fullmatch(last_component(name)):
        return None
    layer, in_keras, in_torch = next(
        names for kind, names in _ORDERS.items() if isinstance(target.owner, kind)
    )
    error = (
        f"'{target.path}' has gates, and the key '{name}' is no name of a recurrent layer, so it "
        f"does not show their order: write the tensor to the file like Keras's {layer} (gates "
        f"{in_keras}), and map to Key({key.name!r}, transposed=False)"
    )
    if target.name == "bias":
        return error
    return (
        f"{error}; or map to Key({key.name!r}, transposed=True) if it is like torch.nn.{layer} "
        f"(outputs first, gates {in_torch})"
    )
