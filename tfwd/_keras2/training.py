"""The training function of Keras 2.15's `fit`, and its iterators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.engine.compile_utils import LossesContainer
from keras.src.engine.training import reduce_per_replica
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from tfwd._keras2.wrapped_optimizers import Legacy, New
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
    """Returns the loss and the outputs' weights that a model was compiled with, or None."""
    found = getattr(model, "compiled_loss", None)
    if found is None:
        return None, None
    return found._user_losses, found._user_loss_weights


def loss_as_compiled(model: keras.Model, loss: Any) -> Callable[[Any, Any], Any]:
    """Converts a loss as `compile` does, to a function of labels and outputs.

    Args:
        model: Model with the outputs.
        loss: Loss as in `compile`, but not None.
    """
    return LossesContainer(loss, output_names=getattr(model, "output_names", None))


def steps_per_execution(model: keras.Model) -> int:
    """Returns the number of batches of the next call of the model's training function."""
    return int(model.steps_per_execution.numpy())


def iterator_from(model: keras.Model, data: Any, iterator: Any, steps: int) -> Iterator[Any]:
    """Returns an iterator for the training function that also yields the batch already taken.

    A function of TensorFlow accepts only an iterator over a dataset with the same elements.
    Otherwise it is traced again, and its dropout starts again.

    Args:
        model: Compiled model.
        data: Batch that was taken.
        iterator: Iterator after that batch. The function's other batches are taken from it.
        steps: Number of batches that the function will take.
    """
    if model.run_eagerly:
        return itertools.chain([data], iterator)
    batches = [data, *itertools.islice(iterator, steps - 1)]
    if isinstance(iterator, tf.data.Iterator):
        return iter(_dataset(batches, iterator.element_spec))
    strategy = model.distribute_strategy
    parts = [part for batch in batches for part in _parts(strategy, batch)]
    spec = tf.nest.map_structure(lambda one: one._value_specs[0], iterator.element_spec)
    return iter(strategy.distribute_datasets_from_function(lambda _: _dataset(parts, spec)))


def train_step(model: keras.Model) -> Callable[[Any], Any]:
    """Returns a model's own training step as a Python function of a batch."""
    own: Any = getattr(model.train_step, "python_function", model.train_step)

    def step(data: Any) -> Any:
        run = own
        if not tf.executing_eagerly():
            enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
            run = autograph.tf_convert(own, enabled)
        logs = run(data)
        model._train_counter.assign_add(1)
        return logs

    return step


def forget_functions(model: Any) -> None:
    """Lets `fit`, `evaluate` and `predict` of a model trace their functions again."""
    for name in ("train_function", "train_tf_function", "test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def optimizers(model: keras.Model) -> list[Any]:
    """Returns the optimizers that are attributes of a model, without optimizers inside them."""
    return [value for value in vars(model).values() if isinstance(value, (New, Legacy))]


def batch(data: Any) -> Any:
    """Returns a batch of `fit`'s data."""
    return data


def reduced(model: keras.Model, logs: Any) -> Any:
    """Reduces the logs of several replicas as `fit` does."""
    return reduce_per_replica(
        logs, model.distribute_strategy, reduction=model.distribute_reduction_method
    )


def _parts(strategy: tf.distribute.Strategy, batch: Any) -> list[Any]:
    """Returns each replica's part of a batch."""
    leaves = [strategy.experimental_local_results(leaf) for leaf in tf.nest.flatten(batch)]
    return [tf.nest.pack_sequence_as(batch, part) for part in zip(*leaves, strict=True)]


def _dataset(elements: list[Any], spec: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=spec)
