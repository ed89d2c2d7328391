"""Variables of Keras 2.15, which are `tf.Variable`s."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd._keras2.substitution import StandIn, original


def is_variable(value: Any) -> bool:
    """Whether it is a variable of the kind that layers have."""
    return isinstance(value, tf.Variable)


def value(variable: tf.Variable) -> tf.Tensor:
    """The variable's present value in its own dtype, whatever autocast scope is open."""
    return StandIn(original(variable)).in_own_dtype()


def constant(variable: tf.Variable) -> tf.Tensor:
    """The variable's own value, of which no tape and no function takes notice.

    Keras 2 makes states of recurrent layers as if they were to be trained.
    """
    plain = tf_variable(variable)
    return tf.raw_ops.ReadVariableOp(resource=plain.handle, dtype=plain.dtype)


def read(variable: tf.Variable) -> tf.Tensor:
    """The variable's present value as a layer reads it, in the dtype that it computes in."""
    return StandIn(original(variable)).value()


def cast_as_read(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """A part of a variable's value in the dtype in which an embedding reads it."""
    return rows


def assign(variable: tf.Variable, value: Any) -> None:
    """Assigns to a variable, as a layer's call does."""
    StandIn(original(variable)).assign(value)


def tf_variables(variable: tf.Variable) -> list[tf.Variable]:
    """The `tf.Variable` behind a variable of a layer, and its copies on replicas."""
    own = tf_variable(variable)
    return [own, *getattr(own, "values", ())]


def tf_variable(variable: tf.Variable) -> tf.Variable:
    """The `tf.Variable` behind a variable of a layer, which TensorFlow's checkpoints can track."""
    variable = original(variable)
    return getattr(variable, "_variable", variable)


def path(variable: Any) -> str:
    """The names of the layers that a variable is in, and its own, joined by `/`."""
    return str(variable.name).partition(":")[0]


def name(variable: Any) -> str:
    """The variable's own name in its layer."""
    return path(variable).rpartition("/")[2]


def dtype_name(variable: Any) -> str:
    """The name of the dtype in which a variable is held."""
    return tf.as_dtype(variable.dtype).base_dtype.name


def new_variable(
    value: Any, dtype: Any, name: str, trainable: bool = False, **kwargs: Any
) -> tf.Variable:
    """A variable for the state of something that is no layer."""
    return tf.Variable(value, dtype=dtype, name=name, trainable=trainable, **kwargs)


class SeedState(tf.__internal__.tracking.AutoTrackable):
    """A root seed and the number of the next call, which TensorFlow's checkpoints save.

    A layer that has it as an attribute has no weight more.

    Args:
        seed: an integer of up to 63 bits, or None for one drawn from Keras's global seed.

    Attributes:
        state: int64 `[root, next call]`.
    """

    def __init__(self, seed: int | None) -> None:
        generator = getattr(keras.src.backend._SEED_GENERATOR, "generator", None) or random
        root = generator.randint(1, 10**9) if seed is None else seed
        self.state = tf.Variable(
            np.asarray([root, 0], np.int64),
            trainable=False,
            name="seed_generator_state",  # each replica's copy is its own, and all count alike
        )


def checkpoint(layer: Any, generator: SeedState) -> None:
    """Lets TensorFlow's checkpoints of a layer save a seed state; they do."""


def checkpoint_list(layer: Any, name: str) -> None:
    """Lets TensorFlow's checkpoints save the layers in a list; on Keras 2 they do by themselves."""


def paths(layer: Any) -> list[str]:
    """The path of each of a built layer's weights, in their order.

    The names of the layers that hold it, from the given one on, and its own. Keras 2 names a
    variable by the scopes in which it was made, which are those of calls: what a layer builds by
    hand lacks the name of its layer.
    """
    found: dict[int, str] = {}

    def walk(inner: Any, prefix: str) -> None:
        for variable in [*inner._trainable_weights, *inner._non_trainable_weights]:
            found.setdefault(id(variable), f"{prefix}/{name(variable)}")
        for held in inner._flatten_layers(recursive=False, include_self=False):
            # A wrapper that stands in a layer's place has its name.
            walk(held, prefix if held.name == inner.name else f"{prefix}/{held.name}")

    walk(layer, layer.name)
    return [found.get(id(variable), path(variable)) for variable in layer.weights]


def add_counter(layer: Any, name: str, shape: tuple[int, ...]) -> None:
    """Gives a layer an int64 variable in which each replica counts by itself.

    It is none of the layer's weights, whose files know nothing of it; TensorFlow's checkpoints do.

    Args:
        layer: the layer.
        name: the name of the attribute.
        shape: the shape.
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
