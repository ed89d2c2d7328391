"""The training function of Keras 3's `fit`, and the iterators that it takes."""

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
    """The loss and the outputs' weights that a model was compiled with, None if with none."""
    found = getattr(model, "_compile_loss", None)
    if found is None:
        return None, None
    return getattr(found, "_user_loss", None), getattr(found, "_user_loss_weights", None)


def loss_as_compiled(model: keras.Model, loss: Any) -> Callable[[Any, Any], Any]:
    """What `compile` makes of a loss: a function of labels and outputs.

    Args:
        model: the model whose outputs are meant.
        loss: what `compile` takes, and not None.
    """
    return CompileLoss(loss, output_names=getattr(model, "output_names", None))


def steps_per_execution(model: keras.Model) -> int:
    """How many batches a call of the model's training function takes, but for an epoch's last."""
    return model.steps_per_execution


def iterator_from(model: keras.Model, data: Any, iterator: Any, steps: int) -> Iterator[Any]:
    """What the training function is given in place of an iterator whose first batch was taken.

    Args:
        model: a compiled model.
        data: the batch that was taken.
        iterator: the iterator.
        steps: how many batches the function will take.
    """
    return itertools.chain([data], iterator)


def train_step(model: keras.Model) -> Callable[[Any], Any]:
    """A model's own training step, as a function of a batch that runs in the present function."""
    step: Any = model.train_step
    return getattr(step, "python_function", step)


def optimizers(model: keras.Model) -> list[Any]:
    """The optimizers that a model has, but not those in them."""
    return [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]


def batch(data: Any) -> Any:
    """A batch of the data of `fit`, in which Keras has optionals for what is `None`."""
    return keras.tree.map_structure(
        lambda part: None if isinstance(part, tf.experimental.Optional) else part, data
    )


def reduced(model: keras.Model, logs: Any) -> Any:
    """What `fit` makes of the logs of several replicas."""
    return reduce_per_replica(logs, model.distribute_strategy, reduction="auto")
