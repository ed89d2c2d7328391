"""Parametrizations: functions from a weight to the effective weight of a layer.

A parametrization is a small object that maps a tensor and a seed to a tensor of the same shape and
dtype. It does not depend on layers. `tfwd.layers.Parametrized` applies it to a layer's weights. To
write a custom one, subclass `Parametrization` and register it with Keras, as the classes below do.
"""

from tfwd.parametrizations.base import Parametrization
from tfwd.parametrizations.chain import Chain
from tfwd.parametrizations.dropout import Dropout
from tfwd.parametrizations.gaussian_noise import GaussianNoise
from tfwd.parametrizations.mixout import Mixout
from tfwd.parametrizations.weight_norm import WeightNorm
from tfwd.parametrizations.weight_table import table

__all__ = [
    "Chain",
    "Dropout",
    "GaussianNoise",
    "Mixout",
    "Parametrization",
    "WeightNorm",
    "table",
]
