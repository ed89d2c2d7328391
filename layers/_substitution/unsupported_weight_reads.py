"""Errors and warnings for weight reads that cannot be substituted.

An error means that a weight would silently have its raw value. A warning means that it may.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterable, Iterator

import keras
import tensorflow as tf

from tfwd import _keras

# A layer's wrong use of a weight, and the remedy.
PAST_KERAS = (
    "reads its weight '{}' without Keras (as a tf.Variable that is stored, or that another "
    "function has captured), so no other value can be substituted: read it as self.<weight> in "
    "call()"
)
ASSIGNED = (
    "assigns to its weight '{}' in its call, so the weight cannot be parametrized: exclude it from "
    "the patterns"
)
IN_BACKWARD = (
    "reads its weight '{}' in backward, in its own tf.recompute_grad or tf.custom_gradient, "
    "where no other value can be substituted: pass the weight to that function as an argument, "
    "not as self.<weight>"
)


def check(
    name: str, parametrized: dict[int, str], found: Iterable[keras.Variable], what: str
) -> None:
    """Raises a ValueError if a parametrized weight is among some variables.

    Args:
        name: Name of the layer.
        parametrized: Names of the parametrized weights, by the ids of the variables.
        found: Variables that the layer uses wrongly.
        what: The wrong use, one of the constants above.
    """
    for variable in found:
        if id(variable) in parametrized:
            raise ValueError(f"layer '{name}' {what.format(parametrized[id(variable)])}")


def check_normalized(owner: keras.Layer, parametrized: dict[int, str]) -> None:
    """Raises a ValueError for a weight that a `SpectralNormalization` assigns to in each call.

    Args:
        owner: Layer that is wrapped.
        parametrized: Names of the parametrized weights, by the ids of the variables.
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
                    "parametrized. Exclude it from the patterns, or remove the "
                    "SpectralNormalization"
                )


def check_calls(name: str, owner: keras.Layer) -> None:
    """Raises a ValueError if a layer's call is a tf.function, which keeps captured values."""
    for layer in _keras.layers.all_layers(owner):
        if isinstance(layer.call, tf.types.experimental.PolymorphicFunction):
            raise ValueError(
                f"the call of layer '{layer.name}', inside '{name}', is itself a tf.function and "
                "keeps using the weights that it was traced with: remove the decorator, and "
                "put a tf.function around the training step"
            )


def warn_of_unread(name: str, parametrized: dict[int, str], read: Collection[int]) -> None:
    """Warns about parametrized weights that a call does not read.

    Args:
        name: Name of the layer.
        parametrized: Names of the parametrized weights, by the ids of the variables.
        read: Ids of the variables that the call reads.
    """
    if unread := [text for key, text in parametrized.items() if key not in read]:
        warnings.warn(
            f"layer '{name}' does not read {', '.join(map(repr, unread))} in its call, so "
            "the parametrization of that weight has no effect",
            stacklevel=2,
        )


def warn_of_python(name: str, operations: list[str]) -> None:
    """Warns about Python code that runs as an operation, which tfwd cannot inspect."""
    if operations:
        warnings.warn(
            f"layer '{name}' calls Python as an operation ({operations[0]}). A weight that this "
            "Python code reads has its raw value, or no gradient: pass the weight to the Python "
            "function as an argument",
            stacklevel=2,
        )


@contextlib.contextmanager
def kept_tensors_explained(name: str) -> Iterator[None]:
    """Explains TensorFlow's error if a call uses a tensor of an earlier call.

    Raises:
        ValueError: Instead of TensorFlow's error.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if "out of scope" not in str(error):
            raise
        raise ValueError(
            f"layer '{name}', or a layer inside it, uses a tensor of an earlier call. The usual "
            "cause is a method that is a tf.function and keeps the weights that it was traced "
            "with: remove its decorator, or pass it the weights as arguments"
        ) from error
