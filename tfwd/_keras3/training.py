"""The training function of Keras 3's `fit`, and its iterators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import reduce_per_replica
from keras.src.trainers.compile_utils import CompileLoss

from tfwd._keras_shared.training import computed_loss, is_of_keras, is_own_step

__all__ = [
    "batch",
    "compiled_loss",
    "computed_loss",
    "forget_functions",
    "is_of_keras",
    "is_own_step",
    "iterator_from",
    "loss_as_compiled",
    "optimizers",
    "reduced",
    "steps_per_execution",
    "train_step",
]


def compiled_loss(model: keras.Model) -> tuple[Any, Any]:
    """Returns the loss and the outputs' weights that a model was compiled with, or None."""
    found = getattr(model, "_compile_loss", None)
    if found is None:
        return None, None
    return getattr(found, "_user_loss", None), getattr(found, "_user_loss_weights", None)


def loss_as_compiled(model: keras.Model, loss: Any) -> Callable[[Any, Any], Any]:
    """Converts a loss as `compile` does, to a function of labels and outputs.

    Args:
        model: Model with the outputs.
        loss: Loss as in `compile`, but not None.
    """
    return CompileLoss(loss, output_names=getattr(model, "output_names", None))


def steps_per_execution(model: keras.Model) -> int:
    """Returns the number of batches per call of the training function, except an epoch's last."""
    return model.steps_per_execution


def iterator_from(model: keras.Model, data: Any, iterator: Any, steps: int) -> Iterator[Any]:
    """Returns an iterator for the training function that also yields the batch already taken.

    Args:
        model: Compiled model.
        data: Batch that was taken.
        iterator: Iterator after that batch.
        steps: Number of batches that the function will take.
    """
    return itertools.chain([data], iterator)


def train_step(model: keras.Model) -> Callable[[Any], Any]:
    """Returns a model's own training step as a Python function of a batch."""
    step: Any = model.train_step
    return getattr(step, "python_function", step)


def forget_functions(model: keras.Model) -> None:
    """Lets `fit`, `evaluate` and `predict` of a model trace their functions again."""
    for name in ("train_function", "test_function", "predict_function", "generate_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def optimizers(model: keras.Model) -> list[Any]:
    """Returns the optimizers that are attributes of a model, without optimizers inside them."""
    return [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]


def batch(data: Any) -> Any:
    """Returns a batch of `fit`'s data with None in place of Keras's optionals."""
    return keras.tree.map_structure(
        lambda part: None if isinstance(part, tf.experimental.Optional) else part, data
    )


def reduced(model: keras.Model, logs: Any) -> Any:
    """Reduces the logs of several replicas as `fit` does."""
    return reduce_per_replica(logs, model.distribute_strategy, reduction="auto")
