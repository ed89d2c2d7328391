"""Callbacks for `keras.Model.fit`: `GradientSquaredMean`, and the plot that it draws."""

from tfwd.callbacks.gradients import KEYS, GradientSquaredMean, scalars
from tfwd.callbacks.plot import write_plot

__all__ = ["KEYS", "GradientSquaredMean", "scalars", "write_plot"]
