"""The functions of `_keras3.multi_worker_fit` for Keras 2.15, whose `fit` needs no repair.

Callbacks of workers other than the chief already write to temporary folders.
"""

from __future__ import annotations

from typing import Any

import keras
from keras.src.engine.training import reduce_per_replica


def repair_fit() -> None:
    """Does nothing: Keras 2.15 needs no repair."""


def reduced(model: keras.Model, logs: Any) -> Any:
    """Reduces the logs of several replicas as `fit` does."""
    return reduce_per_replica(
        logs, model.distribute_strategy, reduction=model.distribute_reduction_method
    )
