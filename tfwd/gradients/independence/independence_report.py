"""Reports whether the examples of a batch are independent, and which weights can use rules.

The rules assume that the first axis of a layer's inputs is the examples. Custom code of a model may
have moved or mixed the examples. Each model is therefore tried once on a few examples
(`independence_trial`), without a change of its states. If the trials show nothing for a weight, its
moments are computed example by example.
"""

from __future__ import annotations

import weakref
from typing import Any

import keras
import tensorflow as tf

from tfwd._graph import private_graph_apis
from tfwd.gradients.batch_data import Data
from tfwd.gradients.independence import trial_data
from tfwd.gradients.independence.independence_trial import Dependent, IndependenceReport, Trial

_reports: weakref.WeakKeyDictionary[Any, dict[Any, IndependenceReport]] = (
    weakref.WeakKeyDictionary()
)


def report(model: keras.Model, data: Data, training: bool) -> IndependenceReport:
    """Tries the model, unless it was already tried on inputs of these shapes and dtypes.

    If the model cannot be tried, the report says that no weight can use rules.

    Raises:
        ValueError: If an example's output depends on another example.
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
        with private_graph_apis.eagerly():
            found = _tried(model, data, training)
        if found is None:  # possibly the model cannot process made-up values
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
            except Exception:  # an error of the model, which the computation will raise again
                continue
            found = trial.report if found is None else found.joined(trial.report)
            if not found.open:
                break
        if found is not None:
            found.general |= found.open
            return found
    return None
