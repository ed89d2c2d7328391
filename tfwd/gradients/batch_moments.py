"""Computes the moments of a batch in chunks: with rules, and example by example without a rule."""

from __future__ import annotations

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import stateless_call
from tfwd.dtypes import at_least_float32, wide
from tfwd.gradients import example_by_example
from tfwd.gradients.batch_data import Data
from tfwd.gradients.block_sums import sum_over_blocks
from tfwd.gradients.effective_weights import Perturbations
from tfwd.gradients.example_losses import Losses
from tfwd.gradients.gradient_forms import Scale, scaled
from tfwd.gradients.independence import independence_report
from tfwd.gradients.recorded_pass import Pass
from tfwd.gradients.shared_weights import Scaled, sums, total


class BatchMoments:
    """Computation of the moments of a batch. All chunks use the same effective weights.

    Args:
        model: Keras model.
        losses: Per-example losses.
        data: The batch.
        training: bool. Training flag.
        report: Report on the independence of examples.
    """

    def __init__(
        self,
        model: keras.Model,
        losses: Losses,
        data: Data,
        training: bool,
        report: independence_report.IndependenceReport,
    ) -> None:
        self.model, self.losses, self.data = model, losses, data
        self.training, self.batch = training, data.size
        self.variables = model.trainable_variables
        self.report = report
        # Weights without a rule on which the examples' losses depend. Known after the first chunk.
        self._used: set[int] | None = None
        self._penalized: list[int] = []  # weights in losses that belong to no example
        # The factor 1/B of each sum is applied where it is cheapest.
        self.share = (
            1 / data.size if isinstance(data.size, int) else 1 / tf.cast(data.size, tf.float64)
        )
        self.perturbations = Perturbations()
        self._methods: dict[int, str] = {}

    def means(
        self, chunk_size: int | None
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor | None]]:
        """Returns the moments of all weights, in three lists.

        They are `(1/B) sum_b g_b`, `(1/B) sum_b g_b^2`, and the gradient of losses that belong to
        no example (None if there is none).
        """
        if chunk_size is None or (isinstance(self.batch, int) and self.batch <= chunk_size):
            found = self._chunk(0, self.batch)
        else:
            found = sum_over_blocks(self.batch, chunk_size, self._chunk)
        count = len(self.variables)
        penalties: list[tf.Tensor | None] = [None] * count
        for index, penalty in zip(self._penalized, found[2 * count :], strict=True):
            penalties[index] = penalty
        return list(found[:count]), list(found[count : 2 * count]), penalties

    def methods(self) -> list[str]:
        """Returns the method for each weight."""
        return [self._methods[id(v)] for v in self.variables]

    def _share_of(self, length: int | tf.Tensor) -> Scale:
        """Returns the share of a chunk's examples in the batch."""
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
        penalties: dict[int, tf.Tensor] = {}
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
                    # The mean over the chunks, weighted by their sizes.
                    penalties[key] = total(more, self._share_of(length))
        slow = [v for v in self.variables if id(v) not in first]
        if slow and record.draws.inside:  # another pass would draw other numbers
            slow = list(self.variables)
        if slow:
            self._general(slow, chunk, record, first, second, penalties)
        self._penalized = [i for i, v in enumerate(self.variables) if id(v) in penalties]
        moments = [moment[id(v)] for moment in (first, second) for v in self.variables]
        return (*moments, *(penalties[id(self.variables[i])] for i in self._penalized))

    def _terms(
        self,
        record: Pass,
        variable: keras.Variable,
        ds: list[tf.Tensor | None],
        batch: int | tf.Tensor,
    ) -> list[Scaled] | None:
        """Returns the uses of a weight, or None if rules do not cover all of them."""
        uses = record.uses.get(id(variable), [])
        if not uses or id(variable) in record.general | self.report.general:
            return None
        terms = []
        for use in uses:
            given = [ds[probe] for probe in use.probes]
            if any(d is None for d in given):  # the tape may not have recorded this use
                return None
            term = use.term(*given)
            if tuple(term.shape) != tuple(variable.shape):
                raise ValueError(
                    f"the rule '{use.method}' gives gradients of shape {tuple(term.shape)} for the "
                    f"weight '{_keras.variables.path(variable)}' of shape {tuple(variable.shape)}: "
                    "return gradients of the weight's shape"
                )
            known = isinstance(term.batch, int) and isinstance(batch, int)
            if term.batch != batch if known else id(variable) in self.report.folded:
                if known and term.batch % batch:
                    return None
                term = term.folded(batch)
            terms.append(Scaled(term, use.scale))
        return terms

    def _losses(self, record: Pass, chunk: Data) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns the examples' losses `[n]`, and the sum of losses that belong to no example."""
        outputs = record.run(chunk.x, self.training)
        per_example = at_least_float32(self.losses(chunk.y, outputs, chunk.sample_weight))
        scalar = None
        each = self.report.per_example(record.losses, per_example.shape[0])
        for loss, is_own in zip(record.losses, each, strict=True):
            loss = tf.cast(loss, per_example.dtype)
            if is_own:
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
        penalties: dict[int, tf.Tensor],
    ) -> None:
        """Computes the moments of weights that no rule covers.

        It starts from the states before the pass with rules.
        """

        def run(part: Data) -> tuple[tf.Tensor, tf.Tensor | None]:
            record = Pass(self.model, self.perturbations, rules=False, draws=fast.draws)
            values = list(fast.before.values())
            return stateless_call.call(
                lambda: self._losses(record, part), values, capture=True
            ).outputs

        def one(index: int | tf.Tensor) -> tf.Tensor:
            return tf.reduce_sum(run(chunk.part(index, 1))[0])

        sources = [_keras.variables.tf_variable(v) for v in slow]
        drawn = bool(fast.before or fast.draws)
        needs_chunk = drawn or fast.scalars
        if needs_chunk or self._used is None:
            with tf.GradientTape(persistent=True) as tape:
                per_example, scalar = run(chunk if needs_chunk else chunk.part(0, 1))
        if self._used is None:
            # The tape knows on which weights a loss depends. In a graph this backward pass never
            # runs.
            found = tape.gradient(per_example, sources)
            self._used = {id(v) for v, g in zip(slow, found, strict=True) if g is not None}
        used = [v for v in slow if id(v) in self._used]
        for variable in slow:
            dtype = wide(_keras.variables.value(variable).dtype)
            zeros = tf.zeros(variable.shape, dtype)
            first[id(variable)] = second[id(variable)] = zeros
            self._methods[id(variable)] = "unused"
        if used:
            if drawn:
                method, both = example_by_example.backward_each(per_example, tape, used)
            else:
                method, both = example_by_example.one_by_one(one, used, chunk.size)
            for index, variable in enumerate(used):
                self._methods[id(variable)] = method
                first[id(variable)] = scaled(both[index], self.share)
                second[id(variable)] = scaled(both[len(used) + index], self.share)
        if fast.scalars:
            for variable, gradient in zip(slow, tape.gradient(scalar, sources), strict=True):
                if gradient is not None:
                    gradient = tf.cast(tf.convert_to_tensor(gradient), first[id(variable)].dtype)
                    penalties[id(variable)] = scaled(gradient, self._share_of(chunk.size))
