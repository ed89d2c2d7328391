"""Trains one Keras model on several GPUs or machines, with TensorFlow's `tf.distribute`.

- `scope` makes `fit` of Keras 3 work under `tf.distribute.MultiWorkerMirroredStrategy`.
- `is_chief` returns True in the process that writes files.

The guide is docs/many_workers.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from tfwd import _keras

__all__ = ["is_chief", "scope"]


@contextlib.contextmanager
def scope(strategy: tf.distribute.Strategy) -> Iterator[tf.distribute.Strategy]:
    """Opens `strategy.scope()`, and makes `fit` work on several workers.

    Keras 3 raises an error in `fit` and `evaluate` under `MultiWorkerMirroredStrategy`
    (keras-team/keras issue 20585). Call `compile` in this scope, and `fit` inside or outside. The
    first use with several workers replaces three functions of Keras's trainer in this process.
    These functions act as before under any other strategy. Keras 2.15 needs no replacement.

    Only the chief (worker 0) writes the files of `ModelCheckpoint`, `BackupAndRestore`,
    `TensorBoard` and `CSVLogger`. The other workers write these files to a temporary folder,
    because TensorFlow may need all workers to read a variable. `BackupAndRestore` needs a folder
    that all workers can read. If `steps_per_execution` is above 1, the steps still run one by one.

    Args:
        strategy: `tf.distribute.Strategy`. Any strategy works.

    Yields:
        The strategy.

    Raises:
        TypeError: If `strategy` is not a `tf.distribute.Strategy`.
        RuntimeError: If tfwd cannot repair `fit` of this release of Keras.

    Example:
        >>> import keras, tensorflow as tf
        >>> import tfwd
        >>> # Instead of the default: tf.distribute.MultiWorkerMirroredStrategy()
        >>> strategy = tf.distribute.get_strategy()
        >>> with tfwd.distribute.scope(strategy):
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> _ = model.fit(tf.ones([8, 3]), tf.ones([8, 1]), batch_size=4, verbose=0)
    """
    if not isinstance(strategy, tf.distribute.Strategy):
        raise TypeError(
            f"scope() expects a tf.distribute.Strategy, got {type(strategy).__name__}: pass "
            "tf.distribute.MultiWorkerMirroredStrategy(), or another strategy"
        )
    if _keras.has_workers(strategy):
        _keras.multi_worker_fit.repair_fit()
    with strategy.scope():
        yield strategy


def is_chief(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Returns True in the process that writes files: worker 0, or the only process.

    Args:
        strategy: `tf.distribute.Strategy`. Default None, for the strategy of the current scope.

    Example:
        >>> import tfwd
        >>> tfwd.distribute.is_chief()
        True
    """
    return _keras.is_chief(tf.distribute.get_strategy() if strategy is None else strategy)
