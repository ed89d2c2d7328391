"""Cuts a numbered text into the windows that a recurrent model is trained on.

Truncated back-propagation through time: the text is cut into `batch_size` contiguous columns that
are read side by side, a window of a few dozen steps at a time, and the state at a window's end
is the state at the next one's beginning. The lengths of the windows are a pure function of
(seed, epoch), so that a run can be continued in the middle of an epoch.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfwd.runs.errors import UserError

SHORTEST = 5  # of the random windows; the last window of an epoch may be shorter
HALVED = 0.05  # the share of windows around half the base
DEVIATION = 5.0  # of a random window's length


def columns(
    ids: np.ndarray, batch_size: int, *, window: int = 1, what: str = "the text"
) -> np.ndarray:
    """Cuts a text into contiguous columns of one length.

    Args:
        ids: the text's numbers, `[tokens]`.
        batch_size: the number of columns. The `tokens % batch_size` last tokens are left out.
        window: a column must hold at least one window of so many steps, and the token after it.
        what: the text's name for an error message.

    Returns:
        int32 `[batch_size, tokens // batch_size]`; row `i` is the `i`-th part of the text.

    Raises:
        UserError: the text is too short; the message says which batch size would fit.

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
                else f"even one column needs {window + 1}; give a longer text or a shorter window"
            )
        )
    return ids[: length * batch_size].reshape(batch_size, length)


def window_lengths(n: int, base: int, *, random: bool, seed: int = 0, epoch: int = 0) -> np.ndarray:
    """The lengths of one epoch's windows.

    With `random`, the published rule: the mean is `base`, or with probability 0.05 half of it;
    the length is normal around the mean with deviation 5, rounded, and at least 5. So that over
    the epochs every token is at every place of a window.

    Args:
        n: the number of steps to divide, `columns.shape[1] - 1`: the last token of a column has
            none after it to be predicted.
        base: the base length.
        random: False gives `base` everywhere.
        seed: a whole number, at least 0.
        epoch: the epoch's number, at least 0. Equal (seed, epoch) give equal lengths.

    Returns:
        int32 `[windows]` with the sum `n`; the last may be shorter than all rules say.

    Raises:
        ValueError: `n` or `base` is not positive.

    References:
        Merity, Keskar and Socher (2017), section 4.1 (variable length sequences). Departure: the
        authors' program takes the whole part of the normal number; here it is rounded, which
        keeps the mean.

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
        count = -(-n // SHORTEST)  # so many are enough whatever is drawn
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
    """The windows of one epoch, in order.

    Args:
        columns: int32 `[batch, steps + 1]`, from `columns`.
        lengths: int32 `[windows]` with the sum `steps`, from `window_lengths`.
        first: leave out so many windows at the beginning, to go on in the middle of an epoch.

    Returns:
        A dataset of (inputs, targets), both int32 `[batch, length]` with `length` left open in
        the element's specification; targets are the inputs one step later.

    Raises:
        ValueError: the lengths do not add up to the columns, or `first` is out of range.

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
        # One tensor that the function below captures: slicing it needs no Python at run time.
        table = tf.constant(columns, tf.int32)
        batch = columns.shape[0]
        places = np.stack([starts, starts + lengths], axis=1).astype(np.int32)[first:]
        dataset = tf.data.Dataset.from_tensor_slices(places)

    def window(place: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start, end = place[0], place[1]
        inputs = tf.ensure_shape(table[:, start:end], [batch, None])
        targets = tf.ensure_shape(table[:, start + 1 : end + 1], [batch, None])
        return inputs, targets

    return dataset.map(window).prefetch(2)
