"""Moments of per-example gradients at the price of about one backward pass.

    moments = tfwd.gradients.moments(model, x, y, loss)
    moments.mean, moments.mean_square, moments.methods

Where to look: `batch_moments` has the public function, `job` the computation on a batch and its
chunks, and `record` the forward pass that notes every use of a weight. The rules of layers are in
`rules`; `rule` registers another. `per_example_gradients`, `rows` and `combine` do the
arithmetic. `general` computes what no rule is known for, and `independence` tries a model out.
"""

from tfwd.deprecation import renamed
from tfwd.gradients.batch_moments import Moments, moments
from tfwd.gradients.per_example_gradients import Materialized, OuterProduct, PerExampleGradient
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

__getattr__ = renamed(
    __name__,
    {
        "Given": ("tfwd.gradients.Materialized", Materialized),
        "Outer": ("tfwd.gradients.OuterProduct", OuterProduct),
        "Term": ("tfwd.gradients.PerExampleGradient", PerExampleGradient),
    },
)
