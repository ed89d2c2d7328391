"""`moments`: means of the per-example gradients of a batch, and of their squares."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd._keras import losses as _keras_losses
from tfwd.dtypes import at_least_float32
from tfwd.gradients import argument_checks
from tfwd.gradients.batch_data import Data
from tfwd.gradients.batch_moments import BatchMoments
from tfwd.gradients.example_losses import Losses
from tfwd.gradients.gradient_forms import scaled
from tfwd.gradients.independence import independence_report
from tfwd.layers._substitution import reference_weights

Parts = tuple[list[Any], list[Any], list[Any]]  # the result of BatchMoments.means


class Moments(NamedTuple):
    """Moments of per-example gradients, as lists in the order of `model.trainable_variables`.

    Attributes:
        mean: `(1/B) sum_b g_b`, plus `penalty`.
        mean_square: `(1/B) sum_b g_b^2`.
        methods: Method for each weight: the names of the rules of layers that use the weight,
            joined by "+". Without a rule it is "vectorized_map", "loop" or "backward_each".
            "unused" means that no example's loss depends on the weight. Its moments are zero.
        batch_size: B over all replicas: an int, or a scalar tensor if it is not known.
        penalty: Part of `mean` that is the same for every example: the gradients of regularizers
            and other losses that belong to no example. None for a weight without such
            losses. The variance of an example's gradient is about
            `mean_square - (mean - penalty)^2`.
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

    element by element. An example's gradient is summed over its positions, its time steps and all
    uses of a shared weight before it is squared. For layers with a rule, it takes one forward pass,
    one backward pass without gradients of weights, and one or two products per weight. Other
    weights are computed example by example. `Moments.methods` names the method.

    The loss of an example is the mean of the loss object's values over its unmasked positions,
    times the sample weights. The reduction of the loss object has no effect. Losses from `add_loss`
    of shape `[B]` are added to the examples' losses, times B, because Keras adds their sum to the
    mean. Regularizers and other scalars are added to `mean`, and left out of `mean_square`.

    Args:
        model: Any Keras model.
        x: Inputs of the model, tensors or arrays in any nest, with the examples on the first axis.
            Of a `tf.data.Dataset`, pass one batch.
        y: Targets. For several outputs, in the outputs' structure.
        loss: Keras loss of any reduction, its name, or a function `(y_true, y_pred)` that returns
            values of shape `[B]` or `[B, ...]`. For several outputs, one for all, or a list or
            dict.
        sample_weight: Weights of shape `[B]` or `[B, ...]`. For several outputs, one for all, or a
            list or dict. A list of numbers counts as one array. Default None.
        training: bool. Training flag of the model's call. With weight dropout, the layers draw once
            for the batch, and count one training call. Default False.
        chunk_size: int. Number of examples that are in memory at a time. The result does not depend
            on it, except with dropout on activations, which draws for each chunk. Default None, for
            all.
        loss_weights: Factors of several outputs' losses, as a list or dict. Default None.

    Returns:
        `Moments` with the weights' shapes, in float32 (float64 for float64 weights). In a replica
        context of `tf.distribute`, the moments are over the batch of all replicas. If the batch
        size is unknown in a `tf.function`, an empty batch has moments of zero. It adds nothing to
        the moments of other replicas.

    Raises:
        ValueError: Before any computation: for BatchNormalization in training, whose examples
            depend on each other; for arguments that do not fit; for a batch that is known to be
            empty.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd import gradients
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        >>> model.set_weights([tf.ones([2, 1])])
        >>> x, y = tf.constant([[1.0, 0.0], [1.0, 2.0]]), tf.constant([[0.0], [2.0]])
        >>> found = gradients.moments(model, x, y, "mse")
        >>> found.mean[0].numpy().T  # mean of 2 (x w - y) x = (2, 0), (2, 4)
        array([[2., 2.]], dtype=float32)
        >>> found.mean_square[0].numpy().T
        array([[4., 8.]], dtype=float32)

    References: Dangel et al., "BackPACK: Packing more into Backprop" (2020). Its
    `sum_grad_squared` is the same quantity as a sum, for a loss that is divided by B.
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
    argument_checks.arguments(model, training, chunk_size)
    losses = Losses(loss, loss_weights, getattr(model, "output_names", None))
    given = Data.of(x, y, sample_weight)
    data = given.never_empty()
    argument_checks.build(model, data.x)
    argument_checks.batch_normalization(model, bool(training))
    reference_weights.copy_due_references(model, bool(training))  # before trials replace weights
    found = independence_report.report(model, data, bool(training))
    computation = BatchMoments(model, losses, data, bool(training), found)
    parts = computation.means(chunk_size)
    if data is not given:
        own, squares, scalars = ([_unless_empty(m, given.size) for m in group] for group in parts)
        parts = own, squares, scalars
    (own, squares, scalars), count = _over_replicas(parts, given.size)
    regularizers = _keras_losses.regularization(model)
    penalties = [
        _sum(scalar, None if gradient is None else at_least_float32(gradient))
        for scalar, gradient in zip(scalars, regularizers, strict=True)
    ]
    mean = [_sum(a, b) for a, b in zip(own, penalties, strict=True)]
    return Moments(mean, squares, computation.methods(), count, penalties)


def _sum(one: tf.Tensor | None, two: tf.Tensor | None) -> tf.Tensor | None:
    """Returns the sum of two gradients. Each of them may be None."""
    if one is None or two is None:
        return two if one is None else one
    return one + two


def _unless_empty(moment: tf.Tensor | None, batch: tf.Tensor) -> tf.Tensor | None:
    return None if moment is None else tf.where(batch > 0, moment, tf.zeros_like(moment))


def _over_replicas(parts: Parts, batch: int | tf.Tensor) -> tuple[Parts, int | tf.Tensor]:
    """Returns the means over the examples of all replicas, in a replica context."""
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
