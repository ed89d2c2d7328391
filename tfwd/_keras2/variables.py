"""Variables of Keras 2.15, which are `tf.Variable`s."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd._keras2.substitution import StandIn, original


def is_variable(value: Any) -> bool:
    """Returns True if it is a variable of layers."""
    return isinstance(value, tf.Variable)


def value(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's present value in its own dtype, even in an autocast scope."""
    return StandIn(original(variable)).in_own_dtype()


def constant(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's own value. No tape and no function records the read.

    Keras 2 creates states of recurrent layers as trainable variables.
    """
    plain = tf_variable(variable)
    return tf.raw_ops.ReadVariableOp(resource=plain.handle, dtype=plain.dtype)


def read(variable: tf.Variable) -> tf.Tensor:
    """Returns the variable's present value in the dtype in which a layer reads it."""
    return StandIn(original(variable)).value()


def cast_as_read(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns a part of a variable's value in the dtype in which an embedding reads it."""
    return rows


def assign(variable: tf.Variable, value: Any) -> None:
    """Assigns to a variable, as a layer's call does."""
    StandIn(original(variable)).assign(value)


def tf_variables(variable: tf.Variable) -> list[tf.Variable]:
    """Returns the `tf.Variable` of a layer's variable, and its copies on replicas."""
    own = tf_variable(variable)
    return [own, *getattr(own, "values", ())]


def tf_variable(variable: tf.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a layer's variable, which TensorFlow's checkpoints can track."""
    variable = original(variable)
    return getattr(variable, "_variable", variable)


def path(variable: Any) -> str:
    """Returns the path of a variable: the names of its layers and its own name, joined by `/`."""
    return str(variable.name).partition(":")[0]


def name(variable: Any) -> str:
    """Returns the variable's own name in its layer."""
    return path(variable).rpartition("/")[2]


def dtype_name(variable: Any) -> str:
    """Returns the name of the dtype in which a variable is stored."""
    return tf.as_dtype(variable.dtype).base_dtype.name


def new_variable(
    value: Any, dtype: Any, name: str, trainable: bool = False, **kwargs: Any
) -> tf.Variable:
    """Creates a variable for the state of an object that is not a layer."""
    return tf.Variable(value, dtype=dtype, name=name, trainable=trainable, **kwargs)


class SeedState(tf.__internal__.tracking.AutoTrackable):
    """A root seed and the number of the next call, which TensorFlow's checkpoints save.

    A layer with such an attribute does not get another weight.

    Args:
        seed: int of up to 63 bits. None draws one from Keras's global seed.

    Attributes:
        state: int64 `[root, next call]`.
    """

    def __init__(self, seed: int | None) -> None:
        generator = getattr(keras.src.backend._SEED_GENERATOR, "generator", None) or random
        root = generator.randint(1, 10**9) if seed is None else seed
        self.state = tf.Variable(
            np.asarray([root, 0], np.int64),
            trainable=False,
            name="seed_generator_state",  # each replica has its own copy, and all count the same
        )


def checkpoint(layer: Any, generator: SeedState) -> None:
    """Lets TensorFlow's checkpoints save a seed state. On Keras 2 they do it by themselves."""


def checkpoint_list(layer: Any, name: str) -> None:
    """Lets TensorFlow's checkpoints save a list of layers. On Keras 2 they do it by themselves."""


def paths(layer: Any) -> list[str]:
    """Returns the path of each of a built layer's weights, in their order.

    A path has the names of the layers that contain the weight, from the given layer on, and its own
    name. Keras 2 names a variable by the scopes of the call that created it. A weight that a layer
    builds by hand lacks the name of its layer.
    """
    found: dict[int, str] = {}

    def walk(inner: Any, prefix: str) -> None:
        for variable in [*inner._trainable_weights, *inner._non_trainable_weights]:
            found.setdefault(id(variable), f"{prefix}/{name(variable)}")
        for held in inner._flatten_layers(recursive=False, include_self=False):
            # A wrapper that replaces a layer has the layer's name.
            walk(held, prefix if held.name == inner.name else f"{prefix}/{held.name}")

    walk(layer, layer.name)
    return [found.get(id(variable), path(variable)) for variable in layer.weights]


def name_scope(name: str) -> Any:
    """Returns a context in which the paths of new variables begin with a name."""
    return tf.name_scope(name)


def add_counter(layer: Any, name: str, shape: tuple[int, ...]) -> None:
    """Gives a layer an int64 variable in which each replica counts separately.

    The variable is not among the layer's weights or in weight files. TensorFlow's checkpoints save
    it.

    Args:
        layer: Layer.
        name: str. Name of the attribute.
        shape: Shape.
    """
    with tf.init_scope():
        variable = tf.Variable(
            np.zeros(shape, np.int64),
            trainable=False,
            name=f"{layer.name}/{name}",
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    object.__setattr__(layer, name, variable)
    layer._track_trackable(variable, name)
