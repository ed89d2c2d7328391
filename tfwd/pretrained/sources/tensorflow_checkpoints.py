"""Weights in TensorFlow checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfwd.pretrained.sources.base import Entry, Source, source_errors

_OBJECT_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_ERRORS = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
_NOT_TENSORS = ("_CHECKPOINTABLE_OBJECT_GRAPH",)


class CheckpointSource(Source):
    """Source of weights in a TensorFlow checkpoint, saved by name or by object.

    Args:
        path: Prefix of the checkpoint, which is the path without `.index`.

    Raises:
        SourceError: If the checkpoint does not exist, or is incomplete.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with source_errors(path, *_ERRORS):
            self._reader = tf.train.load_checkpoint(path)
            shapes = self._reader.get_variable_to_shape_map()
            dtypes = self._reader.get_variable_to_dtype_map()
        self._names = {
            name.removesuffix(_OBJECT_SUFFIX): name for name in shapes if name not in _NOT_TENSORS
        }
        self.entries = {
            key: Entry(tuple(shapes[name]), dtypes[name].name)
            for key, name in sorted(self._names.items())
        }

    def blocks(self, key: str, into: np.ndarray | None = None) -> Iterator[np.ndarray]:
        with source_errors(self.path, *_ERRORS):
            yield np.asarray(self._reader.get_tensor(self._names[key]))

    def close(self) -> None:
        del self._reader
