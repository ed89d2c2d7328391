"""`fit` of Keras 3 on several workers: replaces functions that fail, and callbacks that write.

Under `MultiWorkerMirroredStrategy`, three functions of Keras 3's trainer fail. Two of them reduce
values over the replicas in a way that fails for scalars. The third function makes a loop that
TensorFlow cannot run. Keras's callbacks write the same files from every worker. The replaced
functions act as before with any other strategy.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfwd._keras_shared.strategy_workers import has_workers, is_chief, own_path, wait_for_all

_repaired = False


def repair_fit() -> None:
    """Lets `fit`, `evaluate` and the callbacks of Keras 3 work on several workers.

    Raises:
        RuntimeError: If this release of Keras lacks a function that must be replaced.
    """
    global _repaired
    if _repaired:
        return
    callbacks = keras.callbacks
    replaced: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (keras_trainer, "reduce_per_replica", _reduce_per_replica),
        (keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build),
        (keras_trainer.TensorFlowTrainer, "_make_function", _make_function),
        (callbacks.ModelCheckpoint, "_get_file_path", _get_file_path),
        (callbacks.BackupAndRestore, "on_train_begin", _begin_with_backup),
        (callbacks.BackupAndRestore, "_save_model", _save_backup),
        (callbacks.BackupAndRestore, "on_train_end", _end_with_backup),
        (callbacks.TensorBoard, "set_model", _set_model_of_tensorboard),
        (callbacks.CSVLogger, "on_train_begin", _begin_csv),
    ]
    for owner, name, _ in replaced:
        if not hasattr(owner, name):
            raise RuntimeError(
                f"this release of Keras has no {owner.__name__}.{name}, which tfwd replaces for "
                "fit on several workers: install a release of Keras from 3.5 to 3.15"
            )
    for owner, name, make in replaced:
        stood = getattr(owner, name)
        setattr(owner, name, functools.wraps(stood)(make(stood)))
    _repaired = True


def _reduce_per_replica(stood: Any) -> Any:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if has_workers(strategy) and reduction in ("auto", "mean"):
            # Keras takes the mean along the first axis, which a scalar does not have.
            return keras.tree.map_structure(
                lambda value: strategy.reduce("MEAN", value, axis=None), values
            )
        return stood(values, strategy, reduction)

    return reduce_per_replica


def _maybe_symbolic_build(stood: Any) -> Any:
    def build(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is None or not has_workers(self._distribute_strategy):
            return stood(self, iterator=iterator, data_batch=data_batch)
        local = self._distribute_strategy.experimental_local_results
        for _, _, batches in iterator:
            # Keras reduces the batch over the replicas. The build needs only shapes.
            data_batch = keras.tree.map_structure(lambda part: local(part)[0], next(batches))
            break
        return stood(self, data_batch=data_batch)

    return build


def _make_function(stood: Any) -> Any:
    def make_function(self: Any, step_function: Any) -> Any:
        steps = self.steps_per_execution
        if steps == 1 or not has_workers(self.distribute_strategy):
            return stood(self, step_function)
        # TensorFlow cannot run Keras's loop of several steps on several workers. So the steps run
        # one by one.
        self.steps_per_execution = 1
        one_step = stood(self, step_function)

        def several_steps(iterator: Any) -> Any:
            self.steps_per_execution = 1  # read when the step is traced
            try:
                logs = one_step(iterator)
                for _ in range(steps - 1):
                    try:
                        logs = one_step(iterator)
                    except (StopIteration, tf.errors.OutOfRangeError):
                        break
            finally:
                self.steps_per_execution = steps
            return logs

        self.steps_per_execution = steps
        return several_steps

    return make_function


def _get_file_path(stood: Any) -> Any:
    def get_file_path(self: Any, *args: Any, **kwargs: Any) -> str:
        return own_path(stood(self, *args, **kwargs), self.model)

    return get_file_path


def _begin_with_backup(stood: Any) -> Any:
    def begin(self: Any, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if not has_workers(strategy):
            stood(self, logs)
            return
        # The chief may restore the second copy of the backup. The other workers then find it.
        if is_chief(self.model):
            stood(self, logs)
            wait_for_all(strategy)
        else:
            wait_for_all(strategy)
            stood(self, logs)
        wait_for_all(strategy)  # all workers have read before a worker writes

    return begin


def _save_backup(stood: Any) -> Any:
    def save(self: Any) -> None:
        if is_chief(self.model):
            stood(self)
            return
        # Reading a variable may need all workers. So all workers write a backup. Workers other than
        # the chief write it to a temporary folder.
        other = copy.copy(self)
        other.backup_dir = own_path(self.backup_dir, self.model)
        for name in ("_weights_path", "_training_metadata_path"):
            path = os.path.join(other.backup_dir, os.path.basename(getattr(self, name)))
            setattr(other, name, path)
        other.double_checkpoint = False
        stood(other)

    return save


def _end_with_backup(stood: Any) -> Any:
    def end(self: Any, logs: Any = None) -> None:
        if is_chief(self.model):
            stood(self, logs)

    return end


def _set_model_of_tensorboard(stood: Any) -> Any:
    def set_model(self: Any, model: Any) -> None:
        if is_chief(model):
            stood(self, model)
            return
        folder = self.log_dir
        self.log_dir = own_path(folder, model)
        try:
            stood(self, model)
        finally:
            self.log_dir = folder

    return set_model


def _begin_csv(stood: Any) -> Any:
    def begin(self: Any, logs: Any = None) -> None:
        if is_chief(self.model):
            stood(self, logs)
            return
        path = self.filename
        self.filename = os.devnull
        try:
            stood(self, logs)
        finally:
            self.filename = path

    return begin


def reduced(model: keras.Model, logs: Any) -> Any:
    """Reduces the logs of several replicas as `fit` does."""
    return keras_trainer.reduce_per_replica(logs, model.distribute_strategy, reduction="auto")
