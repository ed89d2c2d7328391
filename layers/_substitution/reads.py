"""Errors and warnings for weight reads that cannot be substituted.

Errors where a weight would silently have its raw value, warnings where it may.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator

import keras
import tensorflow as tf

from tfwd import _keras

# What a layer does with a weight, and what would be right.
PAST_KERAS = (
    "reads its weight '{}' past Keras (a tf.Variable kept aside, or one that another function has "
    "captured), so that no other value can be given to it: read it as self.<weight> in call()"
)
ASSIGNED = "assigns to its weight '{}' when it is called; such a weight cannot be parametrized"
IN_BACKWARD = (
    "reads its weight '{}' in backward, in a tf.recompute_grad or tf.custom_gradient of its own, "
    "where no other value can be given to it: give it to that function as an argument, and not as "
    "self.<weight>"
)


def check(
    name: str, parametrized: dict[int, str], found: Iterable[keras.Variable], what: str
) -> None:
    """Raises a ValueError if a parametrized weight is among those that something was done with.

    Args:
        name: the layer's name.
        parametrized: the names of the parametrized weights by the variables' ids.
        found: the variables.
        what: what was done with them, one of the above.
    """
    for variable in found:
        if id(variable) in parametrized:
            raise ValueError(f"layer '{name}' {what.format(parametrized[id(variable)])}")


def check_normalized(owner: keras.Layer, parametrized: dict[int, str]) -> None:
    """Raises a ValueError for a weight that a `SpectralNormalization` assigns to in each call.

    Args:
        owner: the layer that is wrapped.
        parametrized: the names of the parametrized weights by the variables' ids.
    """
    for layer in _keras.layers.all_layers(owner):
        if type(layer).__name__ != "SpectralNormalization":
            continue
        for name in ("kernel", "embeddings", "w"):  # Keras's and tensorflow-addons' names
            held = getattr(layer, name, None)
            if id(held) in parametrized:
                raise ValueError(
                    f"weight '{parametrized[id(held)]}' of layer '{layer.name}': a "
                    "SpectralNormalization assigns to it in each training call, so it cannot be "
                    "parametrized. Leave it out of the patterns, or take the SpectralNormalization "
                    "away"
                )


def check_calls(name: str, owner: keras.Layer) -> None:
    """Raises a ValueError if a layer's call is a tf.function, which keeps what it once read."""
    for layer in _keras.layers.all_layers(owner):
        if isinstance(layer.call, tf.types.experimental.PolymorphicFunction):
            raise ValueError(
                f"the call of layer '{layer.name}', inside '{name}', is itself a tf.function and "
                "goes on with the weights that it was traced with: take the decorator off, and "
                "put a tf.function around the training step"
            )


def tell_of_unread(name: str, parametrized: dict[int, str], read: Collection[int]) -> None:
    """Warns of parametrized weights that a call does not read.

    Args:
        name: the layer's name.
        parametrized: the names of the parametrized weights by the variables' ids.
        read: the ids of the variables that it reads.
    """
    if unread := [text for key, text in parametrized.items() if key not in read]:
        warnings.warn(
            f"layer '{name}' does not read {', '.join(map(repr, unread))} when it is called, so "
            "that the parametrization there has no effect",
            stacklevel=2,
        )


def tell_of_python(name: str, operations: list[str]) -> None:
    """Warns of Python that a call runs as operations, into which nothing can look."""
    if operations:
        warnings.warn(
            f"layer '{name}' calls Python as an operation ({operations[0]}); a weight that is read "
            "in there has its raw value, or no gradient: give it to that function as an argument",
            stacklevel=2,
        )


@contextlib.contextmanager
def kept_tensors_explained(name: str) -> Iterator[None]:
    """Says more than TensorFlow where a call fails on a tensor that another call has left behind.

    Raises:
        ValueError: instead of TensorFlow's error.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise ValueError(
            f"layer '{name}', or one inside it, goes on with a tensor of an earlier call, most "
            "often because a method is a tf.function, which keeps the weights that it was traced "
            "with: take its decorator off, or give it the weights as arguments"
        ) from error
