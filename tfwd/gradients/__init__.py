"""Moments of per-example gradients at the price of about one backward pass.

    moments = tfwd.gradients.squared_mean(model, x, y, loss)
    moments.mean, moments.squared_mean, moments.methods

`moments` has the whole computation, `record` the pass that notes every use of a weight, `terms` and
`combine` the arithmetic, `general` the way for what no rule is known for, and the `rules_` modules
the rules of layers; `rule` registers another.
"""

from tfwd.gradients import rules_conv, rules_dense, rules_normalization, rules_recurrent  # noqa: F401 (they register)
from tfwd.gradients.moments import Moments, squared_mean
from tfwd.gradients.record import Call
from tfwd.gradients.registry import rule
from tfwd.gradients.terms import Given, Outer, Rows, Term

__all__ = ["Call", "Given", "Moments", "Outer", "Rows", "Term", "rule", "squared_mean"]
