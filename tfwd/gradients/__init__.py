"""Moments of per-example gradients at the price of about one backward pass.

    moments = tfwd.gradients.squared_mean(model, x, y, loss)
    moments.mean, moments.squared_mean, moments.methods

`moments` and `job` have the whole computation, `record` the pass that notes every use of a weight,
`terms`, `rows` and `combine` the arithmetic, `general` the way for what no rule is known for, and
the `rules_` modules the rules of layers; `rule` registers another.
"""

# The modules of rules are imported because they register them.
from tfwd.gradients import (
    rules_conv,
    rules_dense,
    rules_gru,
    rules_normalization,
    rules_recurrent,
)
from tfwd.gradients.moments import Moments, squared_mean
from tfwd.gradients.record import Call
from tfwd.gradients.registry import rule
from tfwd.gradients.rows import Rows
from tfwd.gradients.terms import Given, Outer, Term

__all__ = [
    "Call",
    "Given",
    "Moments",
    "Outer",
    "Rows",
    "Term",
    "rule",
    "rules_conv",
    "rules_dense",
    "rules_gru",
    "rules_normalization",
    "rules_recurrent",
    "squared_mean",
]
