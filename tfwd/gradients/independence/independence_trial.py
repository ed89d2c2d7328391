"""Runs a model on a few examples to check that they are independent, and to find their rows.

A trial makes these checks, on given weights and inputs:

1. The outputs of one example are differentiated. A rule can be used for a weight if gradients
   arrive only at this example's rows, and if only rules lead to the weight.
2. The model runs without rules. The outputs must be the same.
3. The other examples are replaced by copies of the first example. The first example's outputs must
   not change.
4. The first example runs alone. Its outputs must not change. Losses from `add_loss` belong to the
   examples if their number equals the number of examples in both runs.

Changing examples is not enough. Some rows do not depend on the inputs, such as rows of a constant.
Only their gradients show to which example they belong.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import call_interception
from tfwd.gradients.batch_data import Data
from tfwd.gradients.effective_weights import Perturbations
from tfwd.gradients.gradient_forms import PerExampleGradient
from tfwd.gradients.independence.trial_data import Values
from tfwd.gradients.recorded_pass import Pass

# Binary digits of half precision. There, two ways to compute the same value differ more.
_DIGITS = {tf.bfloat16: 8, tf.float16: 11}


class Dependent(Exception):
    """Error for examples that depend on each other."""


@dataclasses.dataclass
class IndependenceReport:
    """Results of trials for the weights, by their ids.

    Attributes:
        folded: Weights that are used where several successive rows belong to one example.
        general: Weights without a usable rule. The trials did not show to which examples the rows
            belong, or did not show that all uses of the weight are known.
        open: Weights that no gradient reached, so that the trials show nothing.
        losses: For each loss from `add_loss`, in their order, True if it has a value per example.
            None if that is unknown.
    """

    folded: set[int] = dataclasses.field(default_factory=set)
    general: set[int] = dataclasses.field(default_factory=set)
    open: set[int] = dataclasses.field(default_factory=set)
    losses: tuple[bool, ...] | None = None

    def joined(self, other: IndependenceReport) -> IndependenceReport:
        """Combines two reports. `open` has the weights that are open in both."""
        return IndependenceReport(
            self.folded | other.folded,
            self.general | other.general,
            self.open & other.open,
            self.losses if other.losses is None else other.losses,
        )

    def per_example(self, losses: list[tf.Tensor], count: int | None) -> list[bool]:
        """Returns for each loss of a pass a bool: True if it has one value per example.

        Args:
            losses: Losses of the pass, from `add_loss`.
            count: int. Number of examples in the pass, or None if it is unknown.
        """
        if self.losses is not None and len(self.losses) == len(losses):
            return list(self.losses)
        return [bool(loss.shape.rank) and loss.shape[0] == count for loss in losses]


class Trial:
    """Trial of a model on a few examples, with checks of their independence.

    Args:
        model: Keras model.
        values: Tensors that replace the weights.
        x: Inputs.
        count: int. Number of examples.
        training: bool. Training flag.

    Attributes:
        report: Result of the checks.

    Raises:
        Dependent: If an example's output depends on another example.
    """

    def __init__(
        self, model: keras.Model, values: Values, x: Any, count: int, training: bool
    ) -> None:
        self.model, self.values, self.x, self.count = model, values, x, count
        self.training, self.perturbations = training, Perturbations()
        self.report, self.ruled, outputs = self._ruled()
        record, plain = self._plain(x)
        if not record.before and not self._as_plain(outputs, plain, record):
            self.report.general.update(self.ruled.uses)
        if count > 1:
            self._compare(plain, self._plain(_repeated(_first(x), count))[1])
        try:
            other, others = self._plain(_first(x) if count > 1 else _repeated(x, 2))
        except Exception:  # the model accepts only this number of examples
            return
        if count > 1 and not record.before and not record.draws:  # otherwise the draws differ
            self._compare(plain, others)
        self._compare_losses(self.ruled.losses, other.losses, 1 if count > 1 else 2)

    def _check_normalizations(self, record: Pass) -> None:
        """Raises an error that names the layer, for layers that usually mix examples."""
        for layer in _keras.layers.all_layers(self.model):
            if isinstance(layer, keras.layers.BatchNormalization) and any(
                id(v) in record.before for v in layer.non_trainable_variables
            ):
                raise Dependent(
                    f"layer '{layer.name}' of type {type(layer).__name__} is called by the model "
                    "with training=True, and normalizes over the batch, so its examples "
                    "depend on each other: pass the model's training flag to the layer"
                )

    def _compare(self, outputs: list[tf.Tensor], others: list[tf.Tensor]) -> None:
        """Checks that the first example's outputs are equal, unless they change in every run."""
        same = _same([t[:1] for t in outputs], [t[:1] for t in others])
        if not same and self._repeats(outputs):
            raise self._dependent(self.report, self.ruled)

    def _plain(self, x: Any, given: bool = True) -> tuple[Pass, list[tf.Tensor]]:
        """Runs the model without rules, from the same random states each time."""
        values = self.values if given else None
        draws = self.ruled.draws
        record = Pass(self.model, self.perturbations, rules=False, values=values, draws=draws)
        with call_interception.Captured():
            return record, _floating(record.run(x, self.training))

    def _as_plain(self, outputs: list, plain: list, plain_record: Pass) -> bool:
        """Returns True if the outputs with rules equal the outputs without rules."""
        if _same(outputs, plain) or not self._repeats(plain):
            return True
        if not plain_record.inside:
            return False
        # A function read weights that the trial did not replace: compare on the model's own
        # weights.
        record = Pass(self.model, self.perturbations, draws=self.ruled.draws)
        with call_interception.Captured(), record.tape:
            found = _floating(record.run(self.x, self.training))
        return _same(found, self._plain(self.x, given=False)[1])

    def _repeats(self, outputs: list[tf.Tensor]) -> bool:
        """Returns True if another run gives equal outputs. Draws without Keras change them."""
        return _same(outputs, self._plain(self.x)[1])

    def _compare_losses(self, losses: list, others: list, count: int) -> None:
        """Stores which losses have one value per example."""
        if len(losses) == len(others):
            own = tuple(
                bool(a.shape.rank) and (a.shape[0], b.shape[:1]) == (self.count, (count,))
                for a, b in zip(losses, others, strict=True)
            )
            self.report.losses = own

    def _ruled(self) -> tuple[IndependenceReport, Pass, list[tf.Tensor]]:
        record = Pass(self.model, self.perturbations, values=self.values)
        flat = [t for t in tf.nest.flatten(self.x) if isinstance(t, tf.Tensor)]
        inputs = [t for t in flat if t.dtype.is_floating]
        ends = sorted({0, self.count - 1})
        with call_interception.Captured(), record.tape:
            record.tape.watch(inputs)
            outputs = _floating(record.run(self.x, self.training))
            total = _wavy([*outputs, *record.losses])
            each = [_wavy([t[i : i + 1] for t in outputs]) for i in ends]
        self._check_normalizations(record)
        ds = [record.tape.gradient(one, [*record.probes, *inputs]) for one in each]
        found = IndependenceReport(general=record.unaccounted(total))
        if self.count > 1:
            for key, uses in record.uses.items():
                for use in uses:
                    self._look(found, key, use, ds, ends)
            for end, gradients in zip(ends, ds, strict=True):
                for d in gradients[len(record.probes) :]:
                    if d is not None and _arrived(_maxima(d), end)[1]:
                        raise self._dependent(found, record)
        return found, record, outputs

    def _dependent(self, found: IndependenceReport, record: Pass) -> Dependent:
        names = [
            _keras.variables.path(record.variables[key]) for key in found.general & set(record.uses)
        ]
        near = f" (detected at {', '.join(names)})" if names else ""
        return Dependent(
            f"the outputs of model '{self.model.name}' for an example change with the other "
            f"examples of the batch{near}: its examples depend on each other. Per-example "
            "gradients need independent examples: remove computations across the batch axis"
        )

    def _look(
        self, found: IndependenceReport, key: int, use: Any, ds: list, ends: list[int]
    ) -> None:
        """Records where the gradients of the first and the last example arrive, in one use."""
        for end, gradients in zip(ends, ds, strict=True):
            given = [gradients[probe] for probe in use.probes]
            if any(d is None for d in given):
                return
            term = use.term(*given)
            if term.batch != self.count and term.batch % self.count == 0:
                found.folded.add(key)
                term = term.folded(self.count)
            if term.batch != self.count:
                found.general.add(key)
                return
            own, others = _arrived(_each(term), end)
            if others:
                found.general.add(key)
            elif not own:
                found.open.add(key)


def _first(x: Any) -> Any:
    """Returns the first example."""
    return Data(x, None, None, -1).part(0, 1).x


def _repeated(x: Any, count: int) -> Any:
    return tf.nest.map_structure(lambda t: None if t is None else tf.concat([t] * count, 0), x)


def _floating(outputs: Any) -> list[tf.Tensor]:
    flat = [t for t in tf.nest.flatten(outputs) if tf.is_tensor(t)]
    return [t for t in flat if t.dtype.is_floating and t.shape.rank > 0]


def _same(one: list[tf.Tensor], two: list[tf.Tensor]) -> bool:
    for a, b in zip(one, two, strict=True):
        rough = max(1e-4, 16 * 2.0 ** (1 - _DIGITS.get(b.dtype, 24)))
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.shape != b.shape:
            return False
        largest = np.abs(b[np.isfinite(b)]).max(initial=0)
        if not np.allclose(a, b, rough, rough * (1e-6 + largest), equal_nan=True):
            return False
    return True


def _each(term: PerExampleGradient) -> np.ndarray:
    """Returns the largest entry of each example's gradient, computed one by one."""
    assert isinstance(term.batch, int)
    parts = (term.part(index, 1).gradients() for index in range(term.batch))
    return np.asarray([float(tf.reduce_max(tf.abs(g))) for g in parts])


def _maxima(tensor: Any) -> np.ndarray:
    values = np.abs(np.asarray(tf.convert_to_tensor(tensor), np.float64))
    return values.reshape(len(values), -1).max(1, initial=0)


def _arrived(sizes: np.ndarray, at: int) -> tuple[bool, bool]:
    """Checks if gradients arrived at an example's rows, and at other rows. NaN is neither."""
    if not np.isfinite(sizes).all():
        return False, False
    others = np.delete(sizes, at).max(initial=0)
    return bool(sizes[at] > 0), bool(others > 1e-6 * sizes[at])


def _wavy(tensors: list[tf.Tensor]) -> tf.Tensor:
    """Returns a sum of all entries with different factors, so that the entries do not cancel."""
    total = tf.zeros([])
    for tensor in tensors:
        flat = tf.reshape(tensor, [-1])
        weights = 1 + tf.sin(tf.cast(tf.range(tf.size(flat)), tf.float32))
        total += tf.cast(tf.reduce_sum(flat * tf.cast(weights, flat.dtype)), tf.float32)
    return total
