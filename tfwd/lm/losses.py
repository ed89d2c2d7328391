"""Cross entropy, perplexity and activation regularization, in at least float32.

Activation regularization (AR) pulls the last LSTM's output towards zero. Temporal activation
regularization (TAR) makes it change slowly over time. Both are part of the training loss, and never
of the reported loss.
"""

from __future__ import annotations

import math

import tensorflow as tf

from tfwd.dtypes import at_least_float32
from tfwd.runs.interfaces import Score


def perplexity(nats: float) -> float:
    """Returns exp(nats), or infinity if that overflows.

    Example:
    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(nats) if nats < 700 else math.inf


def token_nats(logits: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
    """Returns the cross entropy of each token in nats, `[batch, time]`."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=targets, logits=at_least_float32(logits)
    )


PERPLEXITY = Score("perplexity", perplexity, unit="token")


def activation_penalty(
    raw: tf.Tensor, dropped: tf.Tensor, alpha: float = 0.0, beta: float = 0.0
) -> tf.Tensor | None:
    """Computes activation regularisation (AR) and temporal activation regularisation (TAR).

        alpha * mean(dropped_t ** 2)  +  beta * mean((raw_t - raw_{t-1}) ** 2)

    Both are means over batch, time and units, so neither depends on the window's length.

    Args:
        raw: the last LSTM's output, `[batch, time, units]`.
        dropped: the same output after dropout.
        alpha: float. AR's factor; 0 disables AR.
        beta: float. TAR's factor; 0 disables TAR. A window of one step has no TAR.

    Returns:
        A scalar in at least float32, or `None` if both factors are 0.

    References:
        Merity, McCann and Socher, "Revisiting Activation Regularization for Language RNNs"
        (2017).

    Example:
    >>> values = tf.constant([[[1.0], [3.0]]])
    >>> float(activation_penalty(values, values, alpha=2.0, beta=1.0))
    14.0
    """
    terms = []
    if alpha:
        terms.append(alpha * tf.reduce_mean(tf.square(at_least_float32(dropped))))
    if beta:
        raw = at_least_float32(raw)
        squares = tf.square(raw[:, 1:] - raw[:, :-1])
        # A window of one step has no differences: the mean is 0 here, and not NaN.
        count = tf.cast(tf.size(squares), squares.dtype)
        terms.append(beta * tf.math.divide_no_nan(tf.reduce_sum(squares), count))
    return tf.add_n(terms) if terms else None
