"""`References`: what the weights of a layer are held to, a copy of each.

As `SeedStream`, it is a layer of its own without weights, that stands inside the layer which mixes:
so files that were written by a plain layer still load, and no optimizer sees the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, pretrained
from tfwd.layers.weight_selection import Target, TargetedWeights
from tfwd.parametrizations import Parametrization


class References(keras.layers.Layer):
    """Holds the references of a layer's weights, and takes them in its first training call.

    Args:
        layer: the name of the layer that mixes, for messages.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(name="references")
        self._layer_name = layer
        # By the place of the weight and of the element in its chain. Keras is not to see them.
        object.__setattr__(self, "_held", {})
        object.__setattr__(self, "_from_start", set())
        self._hold("started", np.zeros([], bool), "bool")
        self.built = True

    def make(self, targeted: TargetedWeights) -> None:
        """Makes the copies that there are none of yet, and fills those that come from a source.

        Raises:
            ValueError: a source has no tensor for a weight, or one of another shape.
        """
        for target, parametrization in targeted:
            for name, element in _places(target, parametrization):
                if name in self._held:
                    continue
                dtype = element.reference_dtype or _keras.variables.dtype_name(target.variable)
                if element.towards == "start":
                    value = np.zeros(tuple(target.variable.shape))
                    self._from_start.add(name)
                else:
                    value = _read(self._layer_name, target, element.towards)
                self._hold(name, value, dtype)

    def of(self, targeted: TargetedWeights, training: bool | tf.Tensor) -> list[list[tf.Tensor]]:
        """The references of each weight's elements; taken from the weights in the first call.

        Args:
            targeted: the weights, each with its parametrization.
            training: whether this is a training call, which is the first one if none was yet.
        """
        first = tf.logical_not(self._held["started"].read_value())
        starts = [
            (self._held[name], target.variable)
            for target, parametrization in targeted
            for name, _ in _places(target, parametrization)
            if name in self._from_start
        ]
        if starts:
            begins = tf.logical_and(first, training)
            if not tf.executing_eagerly():
                tf.cond(begins, lambda: self._start(starts), tf.no_op)
            elif begins:
                self._start(starts)
        return [
            [self._value(name, target) for name, _ in _places(target, parametrization)]
            for target, parametrization in targeted
        ]

    def looked_up(self, target: Target, parametrization: Parametrization) -> list[tf.Tensor]:
        """The references of one weight; before the first training call, what they would become."""
        raw = _keras.variables.value(target.variable)
        started = self._held["started"].read_value()
        return [
            tf.cond(started, lambda name=name: self._value(name, target), lambda: raw)
            if name in self._from_start
            else self._value(name, target)
            for name, _ in _places(target, parametrization)
        ]

    def _value(self, name: str, target: Target) -> tf.Tensor:
        dtype = tf.as_dtype(_keras.variables.dtype_name(target.variable))
        return tf.cast(self._held[name].read_value(), dtype)

    def _start(self, starts: list[tuple[tf.Variable, keras.Variable]]) -> tf.Operation | None:
        for held, variable in starts:
            held.assign(tf.cast(_keras.variables.value(variable), held.dtype))
        self._held["started"].assign(True)
        return tf.no_op()

    def _hold(self, name: str, value: np.ndarray, dtype: str) -> None:
        with tf.init_scope():
            variable = tf.Variable(
                tf.cast(value, dtype),
                trainable=False,
                name=f"{self._layer_name}/references/{name}",
                # Each replica has its own, and all the same.
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        self._held[name] = variable
        self._track_trackable(variable, name)

    def save_own_variables(self, store: Any) -> None:
        for name, variable in self._held.items():
            # Half precision is no dtype of every file.
            store[name] = np.asarray(tf.cast(variable, _in_files(variable.dtype)))

    def load_own_variables(self, store: Any) -> None:
        absent = [name for name in self._held if name not in store]
        if absent:
            raise ValueError(
                f"the file has no references of layer '{self._layer_name}', which Mixout mixes its "
                f"weights with (there is none of {', '.join(absent)}): read what a plain model "
                "wrote by tfwd.unwrap(model).load_weights(file)"
            )
        for name, variable in self._held.items():
            variable.assign(tf.cast(np.asarray(store[name]), variable.dtype))


def _places(target: Target, parametrization: Parametrization) -> list[tuple[str, Any]]:
    """The elements with a reference, each with the name of it."""
    return [
        (f"{target.position}_{i}", element)
        for i, element in enumerate(parametrization.elements())
        if element.has_reference
    ]


def _in_files(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype


def _read(layer: str, target: Target, source: Any) -> np.ndarray:
    """What a source has for a weight."""
    where = f"weight '{target.name}' of layer '{layer}': Mixout"
    if isinstance(source, pretrained.Plan):
        value = source.value_of(target.variable)
        if value is None:
            raise ValueError(f"{where}: the plan has nothing for it")
        return value
    if isinstance(source, Mapping):
        key = _key(where, target, list(source))
        value = np.asarray(source[key])
    else:
        with pretrained.open_source(source) as file:
            key = _key(where, target, list(file.entries))
            value = file.read(key)
    if value.shape != tuple(target.variable.shape):
        raise ValueError(
            f"{where}: '{key}' is {value.shape}, and the weight {tuple(target.variable.shape)}"
        )
    return value


def _key(where: str, target: Target, keys: list[str]) -> str:
    """The key that is the weight's path, or an end of it, or ends in it."""
    path = f"/{target.path}"
    found = [key for key in keys if path.endswith(f"/{key}") or f"/{key}".endswith(path)]
    if len(found) == 1:
        return found[0]
    said = f"is that of {', '.join(sorted(found))}" if found else "is that of none"
    some = ", ".join(sorted(keys)[:5])
    raise ValueError(
        f"{where}: '{target.path}' {said} in its source, which has {some}"
        f"{', ...' if len(keys) > 5 else ''}"
    )
