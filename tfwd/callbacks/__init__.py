"""Callbacks for `keras.Model.fit`.

- `FiniteCheck`: finds tensors that are not finite before they change the weights.
- `GradientSquaredMean`: measures moments of the gradient, and `write_plot` draws them.
"""

from tfwd.callbacks.finite_check import FiniteCheck
from tfwd.callbacks.gradients import KEYS, GradientSquaredMean, scalars
from tfwd.callbacks.plot import write_plot

__all__ = ["KEYS", "FiniteCheck", "GradientSquaredMean", "scalars", "write_plot"]
