"""Broadcasts data that only the chief reads, and raises the same errors on all workers."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from tfwd._keras_shared.strategy_workers import gather_bytes, worker_index

CHUNK = 4 << 20  # largest number of bytes in one exchange
# Number of int32 words in the first part of a message. Sending it takes as long as sending a few
# words, and most messages fit into it.
_HEAD = 16 << 10
_DIFFERENT = (
    "the workers made different calls while the chief read a file for all workers: make the same "
    "calls on all workers, and restart all workers"
)
_LOST = (
    "another worker ended or cannot be reached while the chief reads a file for all workers: "
    "restart all workers"
)


class Lockstep:
    """Context manager in which all workers make the same calls, and all fail if one fails.

    All workers open it, and make the same calls inside. An exception in the body of one worker
    becomes the same exception on all workers. The body must not catch exceptions of the methods.

    Every message is a sum of integers over the workers. The chief contributes the content, and the
    other workers contribute zeros. Integers keep all bits. A sum needs no private function of
    TensorFlow, and each worker can report a failure in it. Gathering would need memory for one copy
    per worker.

    Args:
        strategy: `tf.distribute.Strategy`, or None for one process, which only runs the body.
        classes: Classes of exceptions that other workers can raise, in addition to Python's
            built-in exceptions. Default none.

    Attributes:
        is_alone: bool. True for one process.
        is_chief: bool. True on the worker that reads files, and in one process.
    """

    def __init__(
        self, strategy: tf.distribute.Strategy | None, classes: tuple[type[Exception], ...] = ()
    ) -> None:
        self._strategy: Any = strategy
        self._classes = {each.__name__: each for each in classes}
        self._ended = False  # all workers know of a failure
        self.is_alone = strategy is None
        self.is_chief = self.is_alone or worker_index(strategy) == 0

    def __enter__(self) -> Lockstep:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.is_alone or self._ended:
            return
        if error is None or isinstance(error, Exception):
            self._exchange(b"", error)

    def bytes_from_chief(self, make: Callable[[], bytes]) -> bytes | bytearray:
        """Returns the bytes that a function returns on the chief.

        Args:
            make: Function without arguments. Only the chief calls it.
        """
        if self.is_alone:
            return make()
        return self._exchange(self._try(make) if self.is_chief else b"")

    def json_from_chief(self, make: Callable[[], Any]) -> Any:
        """Returns the value that a function returns on the chief. Other workers get it as JSON."""
        if self.is_alone:
            return make()
        return json.loads(self.bytes_from_chief(lambda: json.dumps(make()).encode()))

    def _try(self, make: Callable[[], bytes]) -> bytes:
        """Calls a function. Its exception is raised on all workers."""
        try:
            return make()
        except Exception as error:
            self._exchange(b"", error)
            raise

    def _exchange(self, content: bytes, error: Exception | None = None) -> bytes | bytearray:
        """Returns the content of the chief, or raises the exception of a worker."""
        head = np.zeros(_HEAD, np.int32)
        head[:2] = error is not None, len(content)
        room = 4 * (_HEAD - 2)
        _bytes_of(head[2:])[: len(content)] = np.frombuffer(content[:room], np.uint8)
        total = self._sum(head)
        if total[0]:
            self._fail(error)
        if self.is_chief:
            self._share(np.frombuffer(content, np.uint8)[room:])
            return content
        whole = bytearray(int(total[1]))
        found = np.frombuffer(whole, np.uint8)
        found[:room] = _bytes_of(total[2:])[: len(whole)]
        self._share(found[room:], receive=True)
        return whole

    def _share(self, content: np.ndarray, receive: bool = False) -> None:
        """Sends bytes from the chief to all workers, which receive them in place."""
        for start in range(0, len(content), CHUNK):
            part = content[start : start + CHUNK]
            words = np.zeros(-(-len(part) // 4), np.int32)
            if not receive:
                _bytes_of(words)[: len(part)] = part
            total = self._sum(words)
            if receive:
                part[:] = _bytes_of(total)[: len(part)]

    def _sum(self, words: np.ndarray) -> np.ndarray:
        """Returns the sum of the arrays of all workers."""
        mine = iter([words])
        strategy = self._strategy
        try:
            # The first replica of this worker has the words, and its other replicas have zeros.
            values = strategy.experimental_distribute_values_from_function(
                lambda context: tf.constant(next(mine, np.zeros_like(words)))
            )
            return strategy.reduce("SUM", values, axis=None).numpy()
        except tf.errors.OpError as error:
            raise self._lost(error) from error

    def _lost(self, error: tf.errors.OpError) -> Exception:
        """Returns the exception for an exchange that failed."""
        self._ended = True
        if isinstance(error, tf.errors.InvalidArgumentError):  # arrays of different shapes
            return RuntimeError(_DIFFERENT)
        return tf.errors.UnavailableError(None, None, _LOST)

    def _fail(self, error: Exception | None) -> NoReturn:
        """Raises the exception of the first worker that has one."""
        self._ended = True
        mine = b"" if error is None else json.dumps([type(error).__name__, str(error)]).encode()
        try:
            gathered = gather_bytes(self._strategy, mine)
        except tf.errors.OpError as lost:
            raise self._lost(lost) from lost
        number = next(number for number, each in enumerate(gathered) if each)
        name, text = json.loads(gathered[number])
        everywhere = all(each == gathered[number] for each in gathered)
        if error is not None and (everywhere or (number == 0 and self.is_chief)):
            raise error
        said = text if everywhere or number == 0 else f"worker {number}: {text}"
        raise self._class(name)(said) from error

    def _class(self, name: str) -> type[Exception]:
        found = self._classes.get(name, getattr(builtins, name, None))
        if (
            isinstance(found, type)
            and issubclass(found, Exception)
            and str(_error_with_text(found)) == "text"
        ):
            return found
        return RuntimeError


def _error_with_text(kind: type[Exception]) -> Exception | None:
    """Returns an exception of a class with the text "text", or None."""
    try:
        return kind("text")
    except TypeError:
        return None


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Returns the memory of an array as bytes."""
    return array.reshape(-1).view(np.uint8)
