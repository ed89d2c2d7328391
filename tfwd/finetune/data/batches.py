"""Batches of texts of different lengths, in an order that depends on the seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

# Pairs: batches up to this length are padded to a multiple of this step. A batch can then have only
# a few lengths, and TensorFlow compiles each length only once.
_STEPS = ((64, 16), (256, 32), (1 << 30, 128))


def padded_length(longest: int, most: int) -> int:
    """Returns the padded length of a batch whose longest text has `longest` tokens.

    The padded length is a multiple of 16 up to 64, of 32 up to 256, and then of 128. It is at most
    `most`.

    Example:
    >>> [padded_length(n, 300) for n in (3, 16, 17, 65, 257, 300)]
    [16, 16, 32, 96, 300, 300]
    """
    step = next(step for end, step in _STEPS if longest <= end)
    return max(longest, min(most, -(-longest // step) * step), 1)


def pad(texts: Sequence[np.ndarray], padding_id: int, most: int) -> np.ndarray:
    """Pads the token ids of texts to int32 `[texts, padded_length]`."""
    length = padded_length(max(map(len, texts)), most)
    batch = np.full((len(texts), length), padding_id, np.int32)
    for row, text in zip(batch, texts, strict=True):
        row[: len(text)] = text
    return batch


def sizes(count: int, batch_size: int) -> np.ndarray:
    """Returns the sizes of the batches of `count` texts. The last batch has the remaining texts.

    Example:
    >>> sizes(10, 4).tolist()
    [4, 4, 2]
    """
    whole, rest = divmod(count, batch_size)
    return np.array([batch_size] * whole + [rest] * bool(rest))


def order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of `count` texts in an epoch. It depends only on seed and epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def by_length(texts: Sequence[np.ndarray], batch_size: int) -> Iterator[np.ndarray]:
    """Yields the numbers of texts in batches of similar lengths, the longest first."""
    numbers = np.argsort([-len(text) for text in texts], kind="stable")
    for start in range(0, len(numbers), batch_size):
        yield numbers[start : start + batch_size]
