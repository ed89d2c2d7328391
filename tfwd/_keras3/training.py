"""Training on Keras 3: the steps and backups of `fit`, and the optimizer in a custom loop.

A custom loop has gradients, variables, and its own learning rate. If the optimizer scales the loss,
the loop multiplies the loss before it computes gradients. The optimizer divides the gradients.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import Optimizer

from tfwd._keras_shared.held_objects import held_by


def steps_per_execution(model: keras.Model) -> int:
    """Returns the number of batches per call of the training function. An epoch may end earlier."""
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


_FUNCTIONS = ("train_function", "test_function", "predict_function", "generate_function")


def functions(model: keras.Model) -> list[str]:
    """Returns the attributes that hold a function that `fit` or another method has created."""
    return [name for name in _FUNCTIONS if vars(model).get(name) is not None]


def forget_functions(model: keras.Model) -> None:
    """Lets `fit`, `evaluate` and `predict` of a model trace their functions again."""
    for name in functions(model):
        setattr(model, name, None)


def optimizers(model: keras.Model) -> list[Any]:
    """Returns the optimizers that a model holds, also in lists and dicts.

    Optimizers inside other optimizers are left out.
    """
    found = [x for x in held_by(model) if isinstance(x, keras.optimizers.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def batch(data: Any) -> Any:
    """Returns a batch of `fit`'s data with None in place of Keras's optionals."""
    return keras.tree.map_structure(
        lambda part: None if isinstance(part, tf.experimental.Optional) else part, data
    )


# With these arguments a backup still exists after `fit`, and after a crash during its writing.
BACKUP_ARGUMENTS: dict[str, Any] = {"double_checkpoint": True, "delete_checkpoint": False}


def epochs_in_backup(callback: keras.callbacks.BackupAndRestore) -> int:
    """Returns the number of epochs in the backup from which training resumed."""
    return callback.model._initial_epoch or 0


def extend_backups(
    state_of: Callable[[keras.Model], dict[str, Any]],
    restore: Callable[[keras.Model, dict[str, Any], str], None],
) -> None:
    """Makes `BackupAndRestore` store an additional state in its weight file.

    Args:
        state_of: Function from a model to arrays by name, or an empty dict.
        restore: Function that gets the model, the arrays in the file and the backup's folder.
    """
    backups: Any = keras.callbacks.BackupAndRestore
    save, load = backups._save_model, backups._load_model

    @functools.wraps(save)
    def save_with_state(self: Any) -> None:
        save(self)
        arrays = state_of(self.model)
        if arrays:
            with h5py.File(self._weights_path, "a") as file:
                for name, value in arrays.items():
                    text = value.dtype.kind == "U"
                    file[f"{_STATE}/{name}"] = str(value) if text else value

    @functools.wraps(load)
    def load_with_state(self: Any) -> None:
        load(self)
        if os.path.exists(self._weights_path):
            with h5py.File(self._weights_path, "r") as file:
                restore(self.model, _arrays_in(file), self.backup_dir)

    backups._save_model, backups._load_model = save_with_state, load_with_state


_STATE = "tfwd"  # a group of the weight file


def _arrays_in(file: h5py.File) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, h5py.Dataset):
            content = value[()]
            found[name] = np.asarray(content.decode() if isinstance(content, bytes) else content)

    if _STATE in file:
        file[_STATE].visititems(add)
    return found


def is_compiled(model: keras.Model) -> bool:
    """Returns True if a model has an optimizer and a loss. Returns False for other objects."""
    return getattr(model, "compiled", False)


def can_back_up(model: keras.Model) -> bool:
    """Returns True if `BackupAndRestore` accepts the model. The model must have its weights."""
    return model.built


_LossScale: Any = keras.optimizers.LossScaleOptimizer


def optimizer_names() -> list[str]:
    """Returns the names of the available optimizers."""
    return [
        name
        for name, found in vars(keras.optimizers).items()
        if inspect.isclass(found)
        and issubclass(found, Optimizer)
        and name not in ("Optimizer", "LossScaleOptimizer")
    ]


def optimizer_class(name: str) -> type:
    """Returns the optimizer class of a name."""
    return getattr(keras.optimizers, name)


def with_loss_scale(optimizer: Optimizer) -> Optimizer:
    """Returns the optimizer inside a dynamic loss scale, for float16."""
    return _LossScale(optimizer)


def scales_loss(optimizer: Optimizer) -> bool:
    """Returns True if the loss must be scaled before the gradients are computed."""
    return isinstance(optimizer, _LossScale)


def scale_loss(optimizer: Optimizer, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss times the optimizer's scale."""
    return optimizer.scale_loss(loss)


def loss_scale(optimizer: Optimizer) -> tf.Tensor:
    """Returns the scale of an optimizer that scales the loss."""
    if not optimizer.built:
        return tf.constant(optimizer.initial_scale, tf.float32)
    return tf.convert_to_tensor(optimizer.dynamic_scale.value)


def build_optimizer(optimizer: Optimizer, variables: Sequence[Any]) -> None:
    """Creates the optimizer's state for the variables, if it has none yet."""
    if not optimizer.built:
        optimizer.build(variables)


def optimizer_state(optimizer: Optimizer) -> list[Any]:
    """Returns the optimizer's own variables that exist so far."""
    return list(optimizer.variables)


def set_learning_rate(optimizer: Optimizer, rate: tf.Tensor) -> None:
    """Assigns the learning rate of the next step."""
    optimizer.learning_rate.assign(rate)


def make_step(optimizer: Optimizer, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Makes one step.

    Args:
        optimizer: Optimizer that is built for the variables.
        gradients: List as long as `variables`, with None for a missing gradient. If the optimizer
            scales the loss, these are gradients of the scaled loss.
        variables: Variables that the optimizer was built for.
    """
    optimizer.apply(gradients, variables)


def replace_traced_function(model: keras.Model, function: Any) -> Any:
    """Does nothing: no callback of Keras 3 reads the traced training function."""
    return None


def build_compiled_metrics(model: keras.Model, batch: Any) -> None:
    """Builds the metrics of `compile`, as the first step of `fit` does.

    Keras returns no results of metrics that are not built. Metrics stay as they are if Keras cannot
    call the model with symbolic tensors.

    Args:
        model: A compiled model.
        batch: Batch of `fit`, which shows the shapes.
    """
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        with contextlib.suppress(Exception):
            model._symbolic_build(data_batch=batch)
