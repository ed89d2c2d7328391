"""Callbacks for `keras.Model.fit`.

- `FiniteCheck`: finds tensors that are not finite before they change the weights.
- `GradientSquaredMean`: measures moments of the gradient, and plots them.
"""

from tfwd.callbacks.finite_check import FiniteCheck
from tfwd.callbacks.gradient_squared_mean import GradientSquaredMean

__all__ = ["FiniteCheck", "GradientSquaredMean"]
