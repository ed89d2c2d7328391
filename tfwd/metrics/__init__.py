"""Keras metrics.

- `GradientSquaredMean`: the mean of squared per-example gradients.
"""

from tfwd.metrics.gradient_squared_mean import GradientSquaredMean

__all__ = ["GradientSquaredMean"]
