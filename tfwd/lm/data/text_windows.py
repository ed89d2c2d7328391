"""Cuts a text of token ids into windows, for training a recurrent model.

This is truncated back-propagation through time. The text is cut into `batch_size` contiguous
columns. All columns are read together, a window of a few dozen steps at a time. The state at the
end of a window is the state at the start of the next window. The lengths of the windows depend only
on (seed, epoch), so that a run can resume in the middle of an epoch.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfwd.runs.errors import UserError

SHORTEST = 5  # minimum length of a random window, except the last window of an epoch
HALVED = 0.05  # probability that the mean length of a window is half the base
DEVIATION = 5.0  # standard deviation of a random window's length


def columns(
    ids: np.ndarray, batch_size: int, *, window: int = 1, what: str = "the text"
) -> np.ndarray:
    """Cuts a text into contiguous columns of equal length.

    Args:
        ids: the token ids of the text, `[tokens]`.
        batch_size: int. The number of columns. The last `tokens % batch_size` tokens are dropped.
        window: int. A column must hold at least one window of this many steps, and the next token.
        what: str. The text's name for an error message.

    Returns:
        int32 `[batch_size, tokens // batch_size]`. Row `i` is the `i`-th part of the text.

    Raises:
        UserError: the text is too short. The message says which batch size would fit.

    Example:
    >>> columns(np.arange(7), 2)
    array([[0, 1, 2],
           [3, 4, 5]], dtype=int32)
    """
    if batch_size < 1 or window < 1:
        raise ValueError(f"batch_size={batch_size}, window={window}: both must be at least 1")
    ids = np.asarray(ids, np.int32)
    length = len(ids) // batch_size
    if length < window + 1:
        largest = len(ids) // (window + 1)
        raise UserError(
            f"{what} has {len(ids)} tokens, too few for {batch_size} columns with a window of "
            f"{window}: "
            + (
                f"the largest batch size that fits is {largest}"
                if largest
                else f"even one column needs {window + 1} tokens; give a longer text or a shorter "
                "window"
            )
        )
    return ids[: length * batch_size].reshape(batch_size, length)


def window_lengths(n: int, base: int, *, random: bool, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """Draws the lengths of one epoch's windows.

    `random` uses the published rule. The mean is `base`, or `base / 2` with probability 0.05. The
    length is normal around the mean with standard deviation 5, rounded, and at least 5. Over the
    epochs, each token is therefore at each position of a window.

    Args:
        n: int. The number of steps to divide, `columns.shape[1] - 1`. The last token of a column
            has no next token to predict.
        base: int. The base length.
        random: bool. False uses the length `base` for all windows.
        seed: int, at least 0.
        epoch: int, at least 0. Equal (seed, epoch) give equal lengths.

    Returns:
        int32 `[windows]` with the sum `n`. The last window may be shorter than the rules allow.

    Raises:
        ValueError: `n` or `base` is not positive.

    References:
        Merity, Keskar and Socher (2017), section 4.1 (variable length sequences). Difference: the
        authors' program truncates the normal number. This function rounds it, which keeps the mean.

    Example:
    >>> window_lengths(100, 35, random=False)
    array([35, 35, 30], dtype=int32)
    >>> int(window_lengths(100, 35, random=True).sum())
    100
    """
    if n < 1 or base < 1:
        raise ValueError(f"n={n}, base={base}: both must be at least 1")
    if random:
        generator = np.random.default_rng([seed, epoch])
        count = -(-n // SHORTEST)  # enough windows for any draw
        mean = np.where(generator.random(count) < HALVED, base / 2, base)
        lengths = np.rint(generator.normal(mean, DEVIATION)).astype(np.int64)
        lengths = np.maximum(lengths, SHORTEST)
    else:
        lengths = np.full(-(-n // base), base, np.int64)
    ends = np.cumsum(lengths)
    last = int(np.searchsorted(ends, n))
    lengths = lengths[: last + 1]
    lengths[last] -= ends[last] - n
    return lengths.astype(np.int32)


def windows(columns: np.ndarray, lengths: np.ndarray, first: int = 0) -> tf.data.Dataset:
    """Returns the windows of one epoch, in order.

    Args:
        columns: int32 `[batch, steps + 1]`, from `columns`.
        lengths: int32 `[windows]` with the sum `steps`, from `window_lengths`.
        first: int. The number of windows to skip, to resume in the middle of an epoch.

    Returns:
        A dataset of (inputs, targets), both int32 `[batch, length]`. `length` is unknown in the
        element's specification. Targets are the inputs one step later.

    Raises:
        ValueError: the sum of the lengths is not the number of steps, or `first` is out of range.

    Example:
    >>> for inputs, targets in windows(columns(np.arange(8), 2), np.array([2, 1])):
    ...     print(inputs.numpy().tolist(), targets.numpy().tolist())
    [[0, 1], [4, 5]] [[1, 2], [5, 6]]
    [[2], [6]] [[3], [7]]
    """
    steps = columns.shape[1] - 1
    if int(np.sum(lengths)) != steps:
        raise ValueError(f"the lengths add up to {int(np.sum(lengths))}, not to {steps} steps")
    if not 0 <= first <= len(lengths):
        raise ValueError(f"first={first}: there are {len(lengths)} windows")
    starts = np.cumsum(lengths) - lengths
    with tf.device("CPU:0"):
        # The function below captures this tensor. Slicing it needs no Python at run time.
        table = tf.constant(columns, tf.int32)
        batch = columns.shape[0]
        ranges = np.stack([starts, starts + lengths], axis=1).astype(np.int32)[first:]
        dataset = tf.data.Dataset.from_tensor_slices(ranges)

    def window(bounds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start, end = bounds[0], bounds[1]
        inputs = tf.ensure_shape(table[:, start:end], [batch, None])
        targets = tf.ensure_shape(table[:, start + 1 : end + 1], [batch, None])
        return inputs, targets

    return dataset.map(window).prefetch(2)
