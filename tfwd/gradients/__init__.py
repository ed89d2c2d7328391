"""Moments of per-example gradients, at the price of about one backward pass.

    moments = tfwd.gradients.moments(model, x, y, loss)
    moments.mean, moments.mean_square, moments.methods

Modules:

- `compute` has the public function. `batch_moments` computes a batch and its chunks.
- `record` is the forward pass that records every use of a weight.
- `rules` has the rules of layers. `rule` registers a custom one.
- `per_example_gradients`, `rows` and `combine` do the arithmetic.
- `example_by_example` computes weights without a rule.
- `independence` tries a model on a few examples.
"""

from tfwd.gradients.compute import Moments, moments
from tfwd.gradients.gradient_forms import Materialized, OuterProduct, PerExampleGradient
from tfwd.gradients.record import Call
from tfwd.gradients.rows import Rows

# Importing a module of rules registers them.
from tfwd.gradients.rules import conv, dense, gru, normalization, recurrent  # noqa: F401
from tfwd.gradients.rules.registry import rule

__all__ = [
    "Call",
    "Materialized",
    "Moments",
    "OuterProduct",
    "PerExampleGradient",
    "Rows",
    "moments",
    "rule",
]
