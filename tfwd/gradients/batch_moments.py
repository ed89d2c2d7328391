"""Both moments of the per-example gradients of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd._keras import calls as _keras_calls
from tfwd.dtypes import at_least_float32
from tfwd.gradients import checks
from tfwd.gradients.data import Data
from tfwd.gradients.independence import independence
from tfwd.gradients.job import Job
from tfwd.gradients.losses import Losses
from tfwd.gradients.per_example_gradients import scaled
from tfwd.layers._substitution import references

Parts = tuple[list[Any], list[Any], list[Any]]  # as Job.means gives them


class Moments(NamedTuple):
    """Moments of per-example gradients, each a list in the order of `model.trainable_variables`.

    Attributes:
        mean: `(1/B) sum_b g_b`, and `penalty`.
        mean_square: `(1/B) sum_b g_b^2`.
        methods: how each was computed: the names of the rules of the layers that use the weight,
            joined by "+", or the general way: "vectorized_map", "loop", "backward_each"; "unused"
            for a weight that no example's loss depends on, whose moments are zero.
        batch_size: B, over all replicas: an int, or a scalar tensor where it is not known.
        penalty: what is in `mean` and the same for every example: the gradients of regularizers and
            other losses that are not of an example; None for a weight without. So the variance of
            an example's gradient is about `mean_square - (mean - penalty)^2`.
    """

    mean: list[tf.Tensor]
    mean_square: list[tf.Tensor]
    methods: list[str]
    batch_size: Any
    penalty: list[tf.Tensor | None] | None = None


def moments(
    model: keras.Model,
    x: Any,
    y: Any,
    loss: Any,
    sample_weight: Any = None,
    training: bool = False,
    chunk_size: int | None = None,
    *,
    loss_weights: Any = None,
) -> Moments:
    """Returns the mean and the mean square of the per-example gradients of a batch.

    Formula: with the losses `l_b`, `b = 1..B`, of the examples,

        mean = (1/B) sum_b dl_b/dw        mean_square = (1/B) sum_b (dl_b/dw)^2

    element by element, an example's gradient being summed over its positions, time steps and all
    uses of a shared weight before it is squared. It takes one forward and one backward pass that
    computes no weight's gradient, and a product or two for each weight, for the layers that have a
    rule; other weights are computed the general way, which `Moments.methods` names.

    The loss of an example is the mean of the loss object's values over its positions that are not
    masked, times the sample weights, whatever the object's reduction. Losses from `add_loss` of
    shape `[B]` are added to the examples' own, times B, since Keras adds their sum to the mean;
    regularizers and other scalars are added to `mean` and left out of `mean_square`.

    Args:
        model: any Keras model.
        x: what the model takes, the examples along the first axis: tensors or arrays in any nest.
            Of a `tf.data.Dataset`, one batch.
        y: the targets, for several outputs in their structure.
        loss: a Keras loss of any reduction, its name, or a function `(y_true, y_pred)` that gives
            values of shape `[B]` or `[B, ...]`; for several outputs one for all, or a list or dict.
        sample_weight: None, or weights of shape `[B]` or `[B, ...]`; for several outputs one for
            all, or a list or dict. A list of numbers is an array.
        training: the flag that the model is called with. With weight dropout, the layers draw once
            for the batch, and count it as a training call.
        chunk_size: how many examples are in memory at a time; None for all. The result does not
            depend on it, but for dropout on activations, which draws for each chunk.
        loss_weights: factors of several outputs' losses; a list or dict.

    Returns:
        `Moments`, of the weights' shapes, in float32 (float64 for float64 weights). Under a
        `tf.distribute` strategy, in a replica's context, over the batch of all replicas. In a
        `tf.function` that does not know the batch's size, a batch without examples has moments
        of zero, and adds nothing to those of other replicas.

    Raises:
        ValueError: for what cannot be computed, as BatchNormalization in training, whose examples
            depend on each other, for arguments that do not fit, and for a batch that is known to
            have no examples; before any work.

    Example:

    >>> import keras
    >>> from tfwd import gradients
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    >>> model.set_weights([tf.ones([2, 1])])
    >>> x, y = tf.constant([[1.0, 0.0], [1.0, 2.0]]), tf.constant([[0.0], [2.0]])
    >>> found = gradients.moments(model, x, y, "mse")
    >>> found.mean[0].numpy().T  # of 2 (x w - y) x = (2, 0) and (2, 4)
    array([[2., 2.]], dtype=float32)
    >>> found.mean_square[0].numpy().T
    array([[4., 8.]], dtype=float32)

    References: Dangel et al., "BackPACK: Packing more into Backprop" (2020), whose
    `sum_grad_squared` this is, there a sum for a loss that is divided by B.
    """
    return _moments(
        model, x, y, loss, sample_weight, training, chunk_size, loss_weights=loss_weights
    )


@tf.autograph.experimental.do_not_convert
def _moments(
    model: keras.Model,
    x: Any,
    y: Any,
    loss: Any,
    sample_weight: Any,
    training: Any,
    chunk_size: int | None,
    loss_weights: Any,
) -> Moments:
    checks.arguments(model, training, chunk_size)
    losses = Losses(loss, loss_weights, getattr(model, "output_names", None))
    given = Data.of(x, y, sample_weight)
    data = given.never_empty()
    checks.build(model, data.x)
    checks.batch_normalization(model, bool(training))
    references.begin(model, bool(training))  # before other weights are tried
    found = independence.report(model, data, bool(training))
    job = Job(model, losses, data, bool(training), found)
    parts = job.means(chunk_size)
    if data is not given:
        own, squares, scalars = ([_unless_empty(m, given.size) for m in group] for group in parts)
        parts = own, squares, scalars
    (own, squares, scalars), count = _over_replicas(parts, given.size)
    regularizers = _keras_calls.regularization(model)
    penalties = [
        _sum(scalar, None if gradient is None else at_least_float32(gradient))
        for scalar, gradient in zip(scalars, regularizers, strict=True)
    ]
    mean = [_sum(a, b) for a, b in zip(own, penalties, strict=True)]
    return Moments(mean, squares, job.methods(), count, penalties)


def _sum(one: tf.Tensor | None, two: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the sum of two gradients of which each may be missing."""
    if one is None or two is None:
        return two if one is None else one
    return one + two


def _unless_empty(moment: tf.Tensor | None, batch: tf.Tensor) -> tf.Tensor | None:
    return None if moment is None else tf.where(batch > 0, moment, tf.zeros_like(moment))


def _over_replicas(parts: Parts, batch: int | tf.Tensor) -> tuple[Parts, int | tf.Tensor]:
    """Returns the means over all replicas' examples, in a replica's context."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return parts, batch
    count = context.all_reduce("SUM", tf.cast(batch, tf.float64))
    share = tf.math.divide_no_nan(tf.cast(batch, tf.float64), count)
    flat = [part for group in parts for part in group if part is not None]
    reduced = iter(context.all_reduce("SUM", [scaled(part, share) for part in flat]))
    own, squares, scalars = (
        [None if part is None else next(reduced) for part in group] for group in parts
    )
    return (own, squares, scalars), tf.cast(count, tf.int32)
