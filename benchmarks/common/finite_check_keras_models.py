"""Keras models of finite_check_cost.py, and the training function that `fit` runs for them.

A *way* is the check for NaN in a step:

    bare                       no check
    FiniteCheck                tfwd's callback checks the whole model in every step
    FiniteCheck(every_n_steps=10)      the same in one of ten steps
    ApplyIfFinite              only tfwd's optimizer around the model's optimizer
    enable_check_numerics      TensorFlow's check of each operation
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from common.finite_check_settings import (
    BLOCK,
    CLASSES,
    CONVOLUTIONS,
    EVERY,
    FILTERS,
    HEADS,
    LEARNING_RATE,
    LSTM,
    MLP,
    OPTIMIZER,
    OURS,
    SHAPES,
    STACK,
    TENSORFLOW,
    UNITS,
    WIDE,
    Side,
    data,
    depth,
    steps,
)
from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError
from tfwd.optimizers import ApplyIfFinite


def model(name: str) -> keras.Model:
    """Returns one of the models, not compiled, with the same weights each time."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(SHAPES[name][1:])
    body = {
        MLP: functools.partial(_mlp, depth=depth(name)),
        STACK: functools.partial(_mlp, depth=depth(name)),
        CONVOLUTIONS: _convolutions,
        LSTM: keras.layers.LSTM(UNITS),
        BLOCK: _block,
    }[name]
    return keras.Model(inputs, keras.layers.Dense(CLASSES)(body(inputs)))


def _mlp(x: keras.KerasTensor, depth: int) -> keras.KerasTensor:
    for _ in range(depth):
        x = keras.layers.Dense(x.shape[-1], activation="relu")(x)
    return x


def _convolutions(x: keras.KerasTensor) -> keras.KerasTensor:
    for filters in FILTERS:
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.MaxPooling2D()(x)
    return keras.layers.Flatten()(x)


def _block(x: keras.KerasTensor) -> keras.KerasTensor:
    width = x.shape[-1]
    h = keras.layers.LayerNormalization()(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(HEADS, width // HEADS)(h, h)])
    h = keras.layers.LayerNormalization()(x)
    h = keras.layers.Dense(WIDE, activation="gelu")(h)
    x = keras.layers.Add()([x, keras.layers.Dense(width)(h)])
    return keras.layers.GlobalAveragePooling1D()(x)


def largest_activation(name: str, batch: int) -> int:
    """Returns the number of bytes of the largest layer output."""
    shapes = [layer.output.shape for layer in model(name).layers]
    return 4 * batch * max(math.prod(shape[1:]) for shape in shapes)


def side(name: str, way: str, compiled: bool, batch: int | None = None) -> Side:
    """Returns a model in one way, after its first step.

    Args:
        name: Name of the model.
        way: A way of this module's docstring.
        compiled: `jit_compile` of `Model.compile`.
        batch: Number of examples in a batch. Default None, for the usual number.
    """
    trained = model(name)
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    if way == OPTIMIZER:
        optimizer = ApplyIfFinite(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(optimizer, loss, jit_compile=compiled)
    optimizer.build(trained.trainable_variables)
    iterator = iter(tf.data.Dataset.from_tensors(data(name, batch)).repeat())
    # `fit` does the following before its first batch, and around each batch.
    trained.make_train_function()
    check = FiniteCheck(every_n_steps=10 if way == EVERY else 1) if way in (OURS, EVERY) else None
    if check:
        check.set_model(trained)
        check.on_train_begin()

    def step() -> float:
        for _ in range(steps(name)):
            if check:
                check.on_train_batch_begin(0)
            logs = trained.train_function(iterator)
        return float(logs["loss"])

    # It acts while a graph is traced. Then it is turned off, so that it slows no other side.
    if way == TENSORFLOW:
        tf.debugging.enable_check_numerics()
    try:
        step()
    finally:
        tf.debugging.disable_check_numerics()
    return Side(step, lambda: _reaction_to_nan(trained, step))


def _reaction_to_nan(trained: keras.Model, step: Callable[[], float]) -> str:
    weights = trained.trainable_variables
    kernel = weights[-2]
    value = kernel.numpy()
    value.flat[0] = np.nan
    kernel.assign(value)
    before = [weight.numpy() for weight in weights]
    said = "passes"
    try:
        step()
    except NonFiniteError as error:
        first = error.report.first
        named = first is not None and first.frame.name == kernel.path
        said = "raises and names it" if named else "raises"
    except tf.errors.InvalidArgumentError:
        said = "raises"
    after = [weight.numpy() for weight in weights]
    if not all(map(_same, before, after)):
        return f"{said}, weights are overwritten"
    return "leaves the step out" if getattr(trained.optimizer, "skipped", 0) else said


def _same(before: np.ndarray, after: np.ndarray) -> bool:
    return np.array_equal(before, after, equal_nan=True)


def reason(error: Exception) -> str:
    """Returns a short reason why a step failed."""
    if "unsupported operations" in str(error):
        return "does not compile"
    return f"{type(error).__name__}: {error}".splitlines()[0][:80]
