"""Reports whether the examples of a batch are independent, and which weights rules can be used for.

The rules take the first axis of what enters a layer for the examples. A model's own code may have
put them elsewhere, or mixed them. So each model is tried once on a few examples (`trial`), without
a trace in its states. What the trials do not show goes the general way.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfwd._graph import graphs
from tfwd.gradients.data import Data
from tfwd.gradients.independence import trial_data
from tfwd.gradients.independence.trial import Dependent, IndependenceReport, Trial

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
        with graphs.eagerly():
            found = _tried(model, data, training)
        if found is None:  # perhaps made-up values are nothing that it can take
            return IndependenceReport(general={id(v) for v in model.trainable_variables})
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
            found = trial.report if found is None else found.joined(trial.report)
            if not found.open:
                break
        if found is not None:
            found.general |= found.open
            return found
    return None
