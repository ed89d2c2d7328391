"""Callbacks for `keras.Model.fit`.

- `FiniteCheck`: finds what is not finite before it reaches the weights.
- `GradientSquaredMean`: moments of the gradient, and `write_plot`, the plot that it draws.
"""

from tfwd.callbacks.finite_check import FiniteCheck
from tfwd.callbacks.gradients import KEYS, GradientSquaredMean, scalars
from tfwd.callbacks.plot import write_plot

__all__ = ["KEYS", "FiniteCheck", "GradientSquaredMean", "scalars", "write_plot"]
