"""Whether the examples of a model's batch are independent, and which rows are whose.

The rules take the first axis of what enters a layer for the examples. A model's own code may have
put them elsewhere, or mixed them. So each model is tried once, on few examples, without a trace.
A trial that shows nothing is no pass: what it leaves open goes the general way.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _graphs
from tfwd.gradients import trial_data
from tfwd.gradients.data import Data
from tfwd.gradients.trial import Dependent, Trial


class IndependenceReport(NamedTuple):
    """What a trial has shown.

    Attributes:
        folded: ids of weights used where several rows are of one example, one after the other.
        general: ids of weights for which it does not show whose the rows are, or that all uses are
            known, so that no rule can be used.
        losses: which of the losses from `add_loss`, in their order, have a value for each example;
            None if that is not known.
    """

    folded: frozenset[int] = frozenset()
    general: frozenset[int] = frozenset()
    losses: tuple[bool, ...] | None = None

    def per_example(self, losses: list[tf.Tensor], count: int | None) -> list[bool]:
        """Which of the losses of a pass over `count` examples have a value for each of them."""
        if self.losses is not None and len(self.losses) == len(losses):
            return list(self.losses)
        return [bool(loss.shape.rank) and loss.shape[0] == count for loss in losses]


_reports: weakref.WeakKeyDictionary[Any, dict[Any, IndependenceReport]] = (
    weakref.WeakKeyDictionary()
)


def report(model: keras.Model, data: Data, training: bool) -> IndependenceReport:
    """Tries the model, unless it was tried on such inputs before.

    Where it cannot be tried, all its weights are left to the general way.

    Raises:
        ValueError: if an example's output depends on another example.
    """
    flat = [t for t in tf.nest.flatten(data.x) if t is not None]
    key = (
        training,
        data.size == 1 if isinstance(data.size, int) else False,
        tuple((tuple(t.shape[1:]), t.dtype) for t in flat),
        tuple(id(v) for v in model.trainable_variables),
    )
    known = _reports.setdefault(model, {})
    if key not in known:
        with _graphs.eagerly():
            found = _tried(model, data, training)
        if found is None:  # perhaps made-up values are nothing that it can take
            return IndependenceReport(general=frozenset(id(v) for v in model.trainable_variables))
        known[key] = found
    return known[key]


def _tried(model: keras.Model, data: Data, training: bool) -> IndependenceReport | None:
    for setting in trial_data.settings(model, data):
        found = None
        for values, x in trial_data.attempts(model, setting.x):
            try:
                trial = Trial(model, values, x, setting.size, training)
            except Dependent as error:
                raise ValueError(str(error)) from None
            except Exception:  # the model's own, which the computation will meet again
                continue
            found = trial.findings if found is None else found.joined(trial.findings)
            if not found.open:
                break
        if found is not None:
            general = found.general | found.open
            return IndependenceReport(
                frozenset(found.folded - general), frozenset(general), found.losses
            )
    return None
