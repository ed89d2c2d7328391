"""The workers of a `tf.distribute` strategy: their number, this process's number, and its files."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from typing import Any

import numpy as np
import tensorflow as tf


def has_workers(strategy: Any) -> bool:
    """Returns True for a `MultiWorkerMirroredStrategy` of at least two workers."""
    return worker_count(strategy) > 1


def worker_count(strategy: Any) -> int:
    """Returns the number of processes that train one model. It is 1 for other strategies."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    tasks = strategy.cluster_resolver.cluster_spec().as_dict()
    return max(1, len(tasks.get("chief", ())) + len(tasks.get("worker", ())))


def worker_index(strategy: Any) -> int:
    """Returns the number of this process among the workers, from 0. The chief has number 0."""
    if worker_count(strategy) == 1:
        return 0
    resolver = strategy.cluster_resolver
    if resolver.task_type == "chief":
        return 0
    chiefs = len(resolver.cluster_spec().as_dict().get("chief", ()))
    return chiefs + int(resolver.task_id)


def is_chief(model_or_strategy: Any) -> bool:
    """Returns True in the process that writes files. Without workers it is True in each process.

    Args:
        model_or_strategy: A Keras model, or a strategy.
    """
    strategy = getattr(model_or_strategy, "distribute_strategy", model_or_strategy)
    return worker_index(strategy) == 0


def wait_for_all(strategy: tf.distribute.Strategy) -> None:
    """Waits until all workers have called this function."""
    if has_workers(strategy):
        strategy.reduce("SUM", tf.constant(0, tf.int32), axis=None)


def own_path(path: str | os.PathLike[str], model_or_strategy: Any) -> str:
    """Returns the path on the chief, and a path in a temporary folder on other workers.

    All workers write, because TensorFlow may need all of them to read a variable.
    """
    if is_chief(model_or_strategy):
        return os.fspath(path)
    return os.path.join(_scratch(), os.path.basename(os.path.normpath(os.fspath(path))))


@functools.cache
def _scratch() -> str:
    """Returns a temporary folder of this process, which is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="tfwd-worker-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def gather_bytes(strategy: tf.distribute.Strategy, content: bytes) -> list[bytes]:
    """Returns the bytes of each worker, in the order of the workers. All workers must call it.

    Args:
        strategy: `tf.distribute.Strategy`.
        content: Bytes of this worker. Their number may differ between workers.
    """
    if not has_workers(strategy):
        return [content]
    padded = content + bytes(-len(content) % 4)
    words = np.frombuffer(padded, "<i4").astype(np.int32)
    # TensorFlow chooses the order of the parts. So each part begins with its worker's number.
    head = np.array([worker_index(strategy), len(content), len(words)], np.int32)
    whole = _gatherer(strategy)(tf.constant(np.concatenate([head, words]))).numpy()
    found: dict[int, bytes] = {}
    while len(whole):
        index, length, count = (int(number) for number in whole[:3])
        found[index] = whole[3 : 3 + count].astype("<i4").tobytes()[:length]
        whole = whole[3 + count :]
    return [found[index] for index in sorted(found)]


@functools.cache
def _gatherer(strategy: tf.distribute.Strategy) -> Any:
    """Returns a function that concatenates the int32 `[n]` tensors of all workers.

    It is traced once. `strategy.gather` traces a new function in each call.
    """

    def gather(words: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        return context.all_gather(tf.identity(words), axis=0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)], autograph=False)
    def gather_all(words: tf.Tensor) -> tf.Tensor:
        found = strategy.run(gather, args=(words,))
        return strategy.experimental_local_results(found)[0]

    return gather_all
