"""`squared_mean`: both moments of the per-example gradients of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras, substitute
from tfwd.gradients import checks, general, independence
from tfwd.gradients.combine import Scaled, sums, total
from tfwd.gradients.data import Data
from tfwd.gradients.losses import Losses
from tfwd.gradients.perturbations import Perturbations
from tfwd.gradients.record import Pass
from tfwd.gradients.terms import Scale, over_blocks, scaled, wide


class Moments(NamedTuple):
    """Moments of per-example gradients, each a list in the order of `model.trainable_variables`.

    Attributes:
        mean: `(1/B) sum_b g_b`, and the gradient of losses that are not of an example.
        squared_mean: `(1/B) sum_b g_b^2`.
        methods: how each was computed: the names of the rules of the layers that use the weight,
            joined by "+", or the general way: "vectorized_map", "loop", "backward_each"; "unused"
            for a weight that no loss depends on.
        batch_size: B, over all replicas: an int, or a scalar tensor where it is not known.
    """

    mean: list[tf.Tensor]
    squared_mean: list[tf.Tensor]
    methods: list[str]
    batch_size: Any


def squared_mean(
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
    """The mean and the mean square of the per-example gradients of a batch.

    Formula: with the losses `l_b`, `b = 1..B`, of the examples,

        mean = (1/B) sum_b dl_b/dw        squared_mean = (1/B) sum_b (dl_b/dw)^2

    element by element, an example's gradient being summed over its positions, time steps and all
    uses of a shared weight before it is squared. It takes one forward and one backward pass that
    computes no weight's gradient, and a product or two for each weight, for the layers that have a
    rule; other weights are computed the general way, which `Moments.methods` names.

    The loss of an example is the mean of the loss object's values over its positions that are not
    masked, times the sample weights, whatever the object's reduction. Losses from `add_loss` of
    shape `[B]` are added to the examples' own, times B, since Keras adds their sum to the mean;
    regularizers and other scalars are added to `mean` and left out of `squared_mean`.

    Args:
        model: any Keras model.
        x: what the model takes, the examples along the first axis: tensors or arrays in any nest.
        y: the targets, for several outputs in their structure.
        loss: a Keras loss of any reduction, its name, or a function `(y_true, y_pred)` that gives
            values of shape `[B]` or `[B, ...]`; for several outputs one for all, or a list or dict.
        sample_weight: None, or weights of shape `[B]` or `[B, ...]`; for several outputs one for
            all, or a list or dict.
        training: the flag that the model is called with. With weight dropout, the layers draw once
            for the batch, as for a training call.
        chunk_size: how many examples are in memory at a time; None for all. The result does not
            depend on it, but for dropout on activations, which draws for each chunk.
        loss_weights: factors of several outputs' losses; a list or dict.

    Returns:
        `Moments`, of the weights' shapes, in float32 (float64 for float64 weights). Under a
        `tf.distribute` strategy, in a replica's context, over the batch of all replicas.

    Raises:
        ValueError: for what cannot be computed, as BatchNormalization in training, whose examples
            depend on each other, and for arguments that do not fit; before any work.

    Example:

    >>> import keras
    >>> from tfwd import gradients
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    >>> model.set_weights([tf.ones([2, 1])])
    >>> x, y = tf.constant([[1.0, 0.0], [1.0, 2.0]]), tf.constant([[0.0], [2.0]])
    >>> moments = gradients.squared_mean(model, x, y, "mse")
    >>> moments.mean[0].numpy().T  # of 2 (x w - y) x = (2, 0) and (2, 4)
    array([[2., 2.]], dtype=float32)
    >>> moments.squared_mean[0].numpy().T
    array([[4., 8.]], dtype=float32)

    References: Dangel et al., "BackPACK: Packing more into Backprop" (2020), whose
    `sum_grad_squared` this is, there a sum for a loss that is divided by B.
    """
    return _squared_mean(
        model, x, y, loss, sample_weight, training, chunk_size, loss_weights=loss_weights
    )


@tf.autograph.experimental.do_not_convert
def _squared_mean(
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
    losses = Losses(loss, loss_weights)
    data = Data.of(x, y, sample_weight)
    checks.build(model, data.x)
    checks.batch_normalization(model, bool(training))
    found = independence.verdict(model, data, bool(training))
    job = _Job(model, losses, data, bool(training), found)
    mean, squares = job.means(chunk_size)
    mean, squares, count = _over_replicas(mean, squares, data.size)
    extra = _regularization(model.trainable_variables)
    mean = [a if b is None else a + wide(b) for a, b in zip(mean, extra, strict=True)]
    return Moments(mean, squares, job.methods(), count)


class _Job:
    """One computation, whose chunks see the same draws."""

    def __init__(
        self,
        model: keras.Model,
        losses: Losses,
        data: Data,
        training: bool,
        verdict: independence.Verdict,
    ) -> None:
        self.model, self.losses, self.data = model, losses, data
        self.training, self.batch = training, data.size
        self.variables = model.trainable_variables
        self.verdict = verdict
        # Each sum is multiplied by 1/B where it is cheapest.
        self.share = (
            1 / data.size if isinstance(data.size, int) else 1 / tf.cast(data.size, tf.float64)
        )
        self.perturbations = Perturbations()
        self._methods: dict[int, str] = {}

    def means(self, chunk_size: int | None) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """`(1/B) sum_b g_b` and `(1/B) sum_b g_b^2` of all weights."""
        if chunk_size is None or (isinstance(self.batch, int) and self.batch <= chunk_size):
            found = self._chunk(0, self.batch)
        else:
            found = over_blocks(self.batch, chunk_size, self._chunk)
        count = len(self.variables)
        return list(found[:count]), list(found[count:])

    def methods(self) -> list[str]:
        """How each weight was computed."""
        return [self._methods[id(v)] for v in self.variables]

    def _share_of(self, length: int | tf.Tensor) -> Scale:
        """What part of the batch a chunk is."""
        both_known = isinstance(length, int) and isinstance(self.share, float)
        return length * self.share if both_known else tf.cast(length, tf.float64) * self.share

    def _chunk(self, start: int | tf.Tensor, length: int | tf.Tensor) -> tuple[tf.Tensor, ...]:
        chunk = self.data.part(start, length)
        record = Pass(self.model, self.perturbations)
        with record.tape:
            per_example, scalar = self._losses(record, chunk)
        ds = record.tape.gradient(per_example, record.probes)
        scalar_ds = None if scalar is None else record.tape.gradient(scalar, record.probes)
        del record.tape
        first: dict[int, tf.Tensor] = {}
        second: dict[int, tf.Tensor] = {}
        for variable in self.variables:
            key = id(variable)
            terms = self._terms(record, variable, ds, length)
            if terms is None:
                continue
            self._methods[key] = "+".join(dict.fromkeys(use.method for use in record.uses[key]))
            first[key], second[key] = sums(terms, self.share)
            if scalar_ds is not None:
                more = self._terms(record, variable, scalar_ds, length)
                if more is not None:
                    # The mean over the chunks, by their sizes.
                    first[key] += total(more, self._share_of(length))
        slow = [v for v in self.variables if id(v) not in first]
        if slow:
            self._general(slow, chunk, record, first, second)
        return tuple(moment[id(v)] for moment in (first, second) for v in self.variables)

    def _terms(
        self,
        record: Pass,
        variable: keras.Variable,
        ds: list[tf.Tensor | None],
        batch: int | tf.Tensor,
    ) -> list[Scaled] | None:
        """The uses of a weight; None if rules do not account for it."""
        uses = record.uses.get(id(variable), [])
        if not uses or id(variable) in record.general | self.verdict.general:
            return None
        terms = []
        for use in uses:
            given = [ds[probe] for probe in use.probes]
            if any(d is None for d in given):  # perhaps recorded where the tape does not see it
                return None
            term = use.term(*given)
            if tuple(term.shape) != tuple(variable.shape):
                raise ValueError(
                    f"the rule '{use.method}' gives gradients of shape {tuple(term.shape)} for the "
                    f"weight '{variable.path}' of shape {tuple(variable.shape)}"
                )
            known = isinstance(term.batch, int) and isinstance(batch, int)
            if term.batch != batch if known else id(variable) in self.verdict.folded:
                if known and term.batch % batch:
                    return None
                term = term.folded(batch)
            terms.append(Scaled(term, use.scale))
        return terms

    def _losses(self, record: Pass, chunk: Data) -> tuple[tf.Tensor, tf.Tensor | None]:
        """The examples' losses `[n]`, and the sum of those that are not of an example."""
        outputs = record.run(chunk.x, self.training)
        per_example = wide(self.losses(chunk.y, outputs, chunk.sample_weight))
        scalar = None
        for loss in record.losses:
            loss = tf.cast(loss, per_example.dtype)
            if loss.shape.rank and loss.shape[0] == per_example.shape[0]:
                own = tf.reduce_sum(tf.reshape(loss, [tf.shape(loss)[0], -1]), 1)
                per_example += tf.cast(self.batch, own.dtype) * own
            else:
                record.scalars = True
                loss = tf.reduce_sum(loss)
                scalar = loss if scalar is None else scalar + loss
        return per_example, scalar

    def _general(
        self,
        slow: list[keras.Variable],
        chunk: Data,
        fast: Pass,
        first: dict[int, tf.Tensor],
        second: dict[int, tf.Tensor],
    ) -> None:
        """Computes the weights that no rule accounts for, from the states before the fast pass."""

        def run(part: Data) -> tuple[tf.Tensor, tf.Tensor | None]:
            record = Pass(self.model, self.perturbations, rules=False)
            values = list(fast.before.values())
            return substitute.call(lambda: self._losses(record, part), values, capture=True).outputs

        def one(index: int | tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(run(chunk.part(index, 1))[0])

        scalar = None
        if fast.before or fast.scalars:
            with tf.GradientTape(persistent=True) as tape:
                per_example, scalar = run(chunk)
        if fast.before:
            method, found = general.backward_each(per_example, tape, slow)
        else:
            method, found = general.one_by_one(one, slow, chunk.size)
        for index, variable in enumerate(slow):
            key = id(variable)
            self._methods[key] = method
            first[key] = scaled(found[index], self.share)
            second[key] = scaled(found[len(slow) + index], self.share)
        if scalar is not None:
            targets = [_keras.tf_variable(v) for v in slow]
            more = tape.gradient(scalar, targets, unconnected_gradients="zero")
            for variable, gradient in zip(slow, more, strict=True):
                wanted = first[id(variable)].dtype
                gradient = tf.cast(tf.convert_to_tensor(gradient), wanted)
                first[id(variable)] += scaled(gradient, self._share_of(chunk.size))


def _regularization(variables: list[keras.Variable]) -> list[tf.Tensor | None]:
    """The gradients of the weights' regularizers."""
    found: list[tf.Tensor | None] = []
    for variable in variables:
        if variable.regularizer is None:
            found.append(None)
            continue
        value = _keras.value(variable)
        with tf.GradientTape() as tape:
            tape.watch(value)
            loss = variable.regularizer(value)
        found.append(tape.gradient(loss, value))
    return found


def _over_replicas(
    mean: list[tf.Tensor], squares: list[tf.Tensor], batch: int | tf.Tensor
) -> tuple[list[tf.Tensor], list[tf.Tensor], int | tf.Tensor]:
    """The means over all replicas' examples, in a replica's context."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return mean, squares, batch
    count = context.all_reduce("SUM", tf.cast(batch, tf.float64))
    share = tf.cast(batch, tf.float64) / count
    moments = context.all_reduce("SUM", [scaled(m, share) for m in [*mean, *squares]])
    return moments[: len(mean)], moments[len(mean) :], tf.cast(count, tf.int32)
