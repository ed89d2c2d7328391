"""The training function of Keras 3's `fit`, and the iterators that it takes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer, reduce_per_replica

from tfwd._keras_shared.patching import swapped


def compiled_loss(model: keras.Model) -> tuple[Any, Any]:
    """The loss and the outputs' weights that a model was compiled with, None if with none."""
    found = getattr(model, "_compile_loss", None)
    if found is None:
        return None, None
    return getattr(found, "_user_loss", None), getattr(found, "_user_loss_weights", None)


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


def is_own_step(model: keras.Model) -> bool:
    """Whether the training step is Keras's: forward, loss, gradients, one update, metrics."""
    return type(model).train_step is TensorFlowTrainer.train_step and "train_step" not in vars(
        model
    )


def optimizers(model: keras.Model) -> list[Any]:
    """The optimizers that a model has, but not those in them."""
    return [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]


def computed_loss(
    model: keras.Model, changed: Callable[[Any, Any], Any]
) -> contextlib.AbstractContextManager[None]:
    """Within the body, the loss that a model computes is `changed(loss, predictions)`."""

    def methods(model: Any) -> dict[str, Callable[..., Any]]:
        own = model.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            predictions = kwargs.get("y_pred", args[2] if len(args) > 2 else None)
            return changed(own(*args, **kwargs), predictions)

        return {"compute_loss": compute_loss}

    return swapped([model], methods, "loss")


def reduced(model: keras.Model, logs: Any) -> Any:
    """What `fit` makes of the logs of several replicas."""
    return reduce_per_replica(logs, model.distribute_strategy, reduction="auto")
