"""`Workers`: the processes that train one model, and the values they exchange."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._random import global_batch_rows
from tfwd.runs.errors import UserError

T = TypeVar("T")


class Workers:
    """Processes that train one model together; a single process by default.

    Each worker has a copy of the model. It computes the gradient for its rows of each batch.
    TensorFlow sums the gradients over the workers, and each worker makes the same update. A
    worker's variables are plain variables, so a checkpoint does not depend on the number of
    workers.

    Args:
        strategy: a `tf.distribute.MultiWorkerMirroredStrategy`, whose collective operations are
            used; `None` for a single process.

    Attributes:
        count: int. The number of workers.
        index: int. The number of this worker. Only the chief, number 0, writes files.

    Example:
    >>> alone = Workers()
    >>> alone.count, alone.is_chief, alone.together(lambda: 7)
    (1, True, 7)
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None):
        self._strategy = strategy
        self.count = 1 if strategy is None else _keras.worker_count(strategy)
        self.index = 0 if strategy is None else _keras.worker_index(strategy)
        if self.count > 1:
            # A step sums the votes over the workers. `stop_votes.py` explains the votes.
            self.vote = tf.Variable(tf.zeros([self.count + 1], tf.float64), trainable=False)
            self.votes = tf.Variable(self.vote, trainable=False)

    @property
    def is_chief(self) -> bool:
        """Returns True for the worker that writes files."""
        return self.index == 0

    def rows(self, total: Any) -> tuple[Any, Any]:
        """Returns this worker's range of rows in a batch: the first row, and the last row plus 1.

        Args:
            total: int, or integer tensor. The number of rows of the batch.

        Example:
        >>> Workers().rows(8)
        (0, 8)
        """
        return self.index * total // self.count, (self.index + 1) * total // self.count

    def own_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns this worker's rows of a tensor."""
        if self.count == 1:
            return tensor
        start, end = self.rows(tensor.shape[0])
        return tensor[start:end]

    def assign_rows(self, variable: tf.Variable, rows: tf.Tensor) -> None:
        """Assigns this worker's rows of a variable. See `collect`."""
        if self.count == 1:
            variable.assign(rows)
        else:
            start, end = self.rows(variable.shape[0])
            variable[start:end].assign(rows)

    def collect(self, variables: Iterable[tf.Variable]) -> None:
        """Gives each worker the rows that the others have assigned. All workers must call it."""
        if self.count == 1:
            return
        for variable in variables:
            start, end = self.rows(variable.shape[0])
            parts = self.gather(variable[start:end].numpy().tobytes())
            dtype = variable.dtype.as_numpy_dtype
            variable.assign(np.frombuffer(b"".join(parts), dtype).reshape(variable.shape))

    @contextlib.contextmanager
    def share(self, batch: Sequence[tf.Tensor]) -> Iterator[tuple[list[tf.Tensor], Any]]:
        """Yields this worker's rows of a batch, and the share of these rows in the batch.

        In the context, dropout on activations draws the same masks for these rows as in the whole
        batch. A worker without rows gets the first row, with a share of 0.
        """
        if self.count == 1:
            yield list(batch), None
            return
        total = tf.shape(batch[0])[0]
        start, end = self.rows(total)
        share = tf.cast(end - start, tf.float64) / tf.cast(total, tf.float64)
        start = tf.where(end > start, start, 0)
        end = tf.maximum(end, start + 1)
        with global_batch_rows.part_of(start, total):
            yield [self._sliced(tensor, start, end) for tensor in batch], share

    def _sliced(self, tensor: tf.Tensor, start: tf.Tensor, end: tf.Tensor) -> tf.Tensor:
        rows = tensor[start:end]
        known = tensor.shape[0]
        if known is not None and known % self.count == 0:
            rows.set_shape([known // self.count, *tensor.shape[1:]])
        return rows

    def sum(self, tensors: Sequence[Any]) -> list[Any]:
        """Returns the sums of tensors over the workers, in a `tf.function`.

        Args:
            tensors: tensors or `tf.IndexedSlices`, in the same order on all workers. `None` stays
                `None`.
        """
        if self.count == 1:
            return list(tensors)
        assert self._strategy is not None
        given = [tensor for tensor in tensors if tensor is not None]

        def add(*values: Any) -> list[Any]:
            context = tf.distribute.get_replica_context()
            # TensorFlow cannot reduce an argument of this function itself.
            same = [
                tf.nest.map_structure(tf.identity, value, expand_composites=True)
                for value in values
            ]
            found: dict[int, Any] = {}
            for dtype in dict.fromkeys(value.dtype for value in same):  # in one message per dtype
                positions = [n for n, value in enumerate(same) if value.dtype == dtype]
                sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [same[n] for n in positions])
                found.update(zip(positions, sums, strict=True))
            return [found[n] for n in range(len(same))]

        sums = iter(self._strategy.run(add, args=given))
        return [None if tensor is None else next(sums) for tensor in tensors]

    def gather(self, content: bytes) -> list[bytes]:
        """Returns the `content` of each worker, by its number. All workers must call it."""
        if self.count == 1:
            return [content]
        assert self._strategy is not None
        return _keras.gather_bytes(self._strategy, content)

    def total(self, numbers: Sequence[float] | np.ndarray) -> np.ndarray:
        """Returns the float64 sums of numbers over the workers. All workers must call it."""
        parts = self.gather(np.asarray(numbers, np.float64).tobytes())
        return np.sum([np.frombuffer(part) for part in parts], axis=0)

    def from_chief(self, value: T) -> T:
        """Returns the chief's value on all workers. All workers must call it."""
        if self.count == 1:
            return value
        return pickle.loads(self.gather(pickle.dumps(value) if self.is_chief else b"")[0])

    def together(self, work: Callable[[], T]) -> T:
        """Runs a function on all workers. If a worker raises a `UserError`, all workers raise it.

        Args:
            work: function without collective operations.

        Raises:
            UserError: `work` raised it, on this or another worker.
        """
        if self.count == 1:
            return work()
        problem = ""
        try:
            result = work()
        except UserError as error:
            problem = str(error)
        for index, text in enumerate(self.gather(problem.encode())):
            if text:
                where = f"worker {index}: " if index else ""
                raise UserError(where + text.decode())
        return result

    def on_chief(self, work: Callable[[], T]) -> T:
        """Runs a function on the chief, and returns its result on all workers.

        Args:
            work: function without collective operations.

        Raises:
            UserError: `work` raised it, on the chief.
        """
        if self.count == 1:
            return work()
        error: UserError | None = None
        content = b""
        if self.is_chief:
            try:
                content = pickle.dumps((None, work()))
            except UserError as raised:
                error, content = raised, pickle.dumps((str(raised), None))
        message, result = pickle.loads(self.gather(content)[0])
        if message is not None:
            raise error or UserError(message)
        return result

    def wait(self) -> None:
        """Waits until all workers have called this method."""
        self.gather(b"")
