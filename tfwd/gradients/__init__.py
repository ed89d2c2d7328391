"""Moments of per-example gradients, at about the cost of one backward pass.

    moments = tfwd.gradients.moments(model, x, y, loss)
    moments.mean, moments.mean_square, moments.methods

Modules:

- `compute_moments` has the public function. `batch_moments` computes a batch and its chunks.
- `recorded_pass` is the forward pass that records every use of a weight.
- `rules` has the rules of layers. `rule` registers a custom one.
- `gradient_forms`, `embedding_gradients` and `shared_weights` compute the sums.
- `example_by_example` computes the moments of weights without a rule.
- `independence` runs a model on a few examples, to check that examples are independent.
"""

from tfwd.gradients.compute_moments import Moments, moments
from tfwd.gradients.embedding_gradients import Rows
from tfwd.gradients.gradient_forms import Materialized, OuterProduct, PerExampleGradient
from tfwd.gradients.recorded_pass import Call

# Importing a module of rules registers them.
from tfwd.gradients.rules import (  # noqa: F401
    convolution,
    dense,
    embedding,
    gru,
    layer_and_group_normalization,
    lstm,
    simple_rnn,
)
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
