"""Names of Keras 3 that the tests use, on Keras 2.15.

Tests are written for Keras 3. Where Keras 2 has the same feature under another name, this module
adds Keras 3's name during the tests. tfwd itself does not need these names.
"""

import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class _Meta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, tf.Variable)

    def __call__(
        cls, value: Any, dtype: Any = None, trainable: bool = True, name: Any = None
    ) -> tf.Variable:
        if dtype is None and np.asarray(value).dtype.kind == "f":
            dtype = keras.backend.floatx()
        return tf.Variable(value, dtype=dtype, trainable=trainable, name=name)


class _Variable(metaclass=_Meta):
    """The name `keras.Variable` for `tf.Variable`, also in `isinstance`."""


def _ops() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        abs=tf.abs,
        all=tf.reduce_all,
        arange=tf.range,
        array=tf.convert_to_tensor,
        cast=tf.cast,
        concatenate=lambda tensors, axis=-1: tf.concat(tensors, axis),
        convert_to_numpy=np.asarray,
        convert_to_tensor=tf.convert_to_tensor,
        einsum=tf.einsum,
        matmul=tf.matmul,
        mean=tf.reduce_mean,
        ones=tf.ones,
        relu=tf.nn.relu,
        shape=tf.shape,
        softmax=tf.nn.softmax,
        sqrt=tf.sqrt,
        square=tf.square,
        sum=tf.reduce_sum,
        tanh=tf.tanh,
        transpose=tf.transpose,
        zeros=tf.zeros,
    )


def _apply(self: Any, grads: Any, trainable_variables: Any) -> None:
    self.apply_gradients(list(zip(grads, trainable_variables, strict=True)))


def _apply_scaled(self: Any, grads: Any, trainable_variables: Any) -> None:
    _apply(self, self.get_unscaled_gradients(grads), trainable_variables)


def _optimizers() -> None:
    """Adds `apply` and the loss scale to Keras 2's optimizers.

    `apply` takes scaled gradients there.
    """
    LossScale = keras.mixed_precision.LossScaleOptimizer
    keras.optimizers.LossScaleOptimizer = LossScale
    keras.optimizers.Optimizer.apply = keras.optimizers.legacy.Optimizer.apply = _apply
    for kind in LossScale.__subclasses__():
        kind.apply = _apply_scaled
        kind.dynamic_scale = property(lambda self: self._loss_scale.current_loss_scale)
    keras.optimizers.Optimizer.built = property(lambda self: getattr(self, "_built", False))


def install() -> None:
    """Adds the names to Keras 2."""
    _optimizers()
    keras.Layer = keras.layers.Layer
    keras.Variable = _Variable
    keras.ops = _ops()
    keras.tree = tf.nest
    keras.layers.RNN.reset_state = keras.layers.RNN.reset_states
    keras.config = types.SimpleNamespace(
        floatx=keras.backend.floatx,
        set_floatx=keras.backend.set_floatx,
        set_dtype_policy=keras.mixed_precision.set_global_policy,
        dtype_policy=keras.mixed_precision.global_policy,
    )
