"""Divides inputs into batches."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd.gradients.batch_data import Data


def batches_of(x: Any, batch_size: Any) -> tuple[Iterator[Any], int | None]:
    """Returns an iterator over batches of inputs, and the number of batches if it is known."""
    if isinstance(x, (tf.data.Dataset, _keras.layers.Datasets)):
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size!r}: expected None, because a {type(x).__name__} yields "
                "batches. Set the batch size in the dataset, as with dataset.batch(size)"
            )
        return (_inputs(batch) for batch in _each(x)), _length(x)
    if isinstance(x, Iterator):
        raise ValueError(
            f"x is a {type(x).__name__}: expected arrays or a dataset. Make a dataset with "
            "tf.data.Dataset.from_generator"
        )
    size = 32
    if batch_size is not None:
        size = positive("batch_size", batch_size, "number of examples in a batch")
    if any(t is not None and 0 in np.shape(t)[:1] for t in tf.nest.flatten(x)):
        raise ValueError("x has no examples: its first axis has size 0. Pass at least one example")
    data = Data.of(x, None, None)
    if any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(data.x)):
        raise ValueError(
            "x has a SparseTensor, which tfwd cannot divide into batches: pass a dataset, as "
            "tf.data.Dataset.from_tensor_slices(x).batch(size)"
        )
    count = int(data.size)
    starts = range(0, count, size)
    parts = (data.part(start, min(size, count - start)).x for start in starts)
    return parts, math.ceil(count / size)


def _each(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, tf.data.Dataset):
        return iter(dataset)
    return (dataset[i] for i in range(len(dataset)))


def _length(dataset: Any) -> int | None:
    """Returns the number of batches, or None if it is not known.

    Raises:
        ValueError: If the dataset is infinite.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return len(dataset)
    length = int(dataset.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        raise ValueError("x is an infinite dataset: pass a finite part, as dataset.take(100)")
    return None if length < 0 else length


def _inputs(batch: Any) -> Any:
    """Returns the inputs of a dataset's batch as tensors, without targets and sample weights."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    return Data.of(x, None, None).x


def positive(name: str, value: Any, meaning: str) -> int:
    """Returns an argument as an int.

    Raises:
        ValueError: If the argument is not an integer of at least 1.
    """
    try:
        number = 0 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1, the {meaning}")
    return number
