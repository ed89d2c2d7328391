"""Optimizers and weights whose updates are finite for all finite gradients of moderate size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfwd import _keras
from tfwd._keras import update_interception, wrapped_optimizers
from tfwd.numerics.leaf_optimizers import SAFE

SMALLEST_EPSILON = 1e-12
# Arguments of these optimizers that multiply a weight or a gradient, and arguments of averages.
FACTORS, LARGEST_FACTOR = ("weight_decay", "clipnorm", "global_clipnorm", "clipvalue"), 1e6
AVERAGES = ("beta_1", "beta_2", "rho", "momentum")


def is_safe(leaf: Any) -> bool:
    """Returns True if finite gradients of moderate size always give finite updates."""
    epsilon = getattr(leaf, "epsilon", 1.0)
    factors, averages = _numbers(leaf, FACTORS), _numbers(leaf, AVERAGES)
    return (
        all(0 <= factor <= LARGEST_FACTOR for factor in factors)
        and all(0 <= np.float32(average) < 1 for average in averages)
        and type(leaf).__name__ in SAFE
        and update_interception.assigns_by_methods(leaf)
        and not update_interception.may_divide_by_zero(leaf)
        and not wrapped_optimizers.accumulates(leaf)  # it also updates with earlier gradients
        and isinstance(epsilon, (int, float))
        and epsilon >= SMALLEST_EPSILON
        and not getattr(leaf, "centered", False)
    )


def has_short_floats(model: keras.Model) -> bool:
    """Returns True if a weight is float16 or bfloat16.

    The square of a number above 256 is infinite in float16. In bfloat16, 0.999 is 1, so that the
    corrections of averages divide by 0.
    """
    weights = _keras.variables.trainable_variables(model)
    return any(_keras.variables.tf_variable(v).dtype.size < 4 for v in weights)


def _numbers(leaf: Any, names: Sequence[str]) -> list[float]:
    """Returns the arguments of an optimizer that are numbers. Other arguments are not in use."""
    values = [getattr(leaf, name, None) for name in names]
    return [value for value in values if isinstance(value, (int, float))]


def has_own_constraint(model: keras.Model) -> bool:
    """Returns True if a custom constraint changes a weight after an update."""
    weights = _keras.variables.trainable_variables(model)
    constraints = [getattr(variable, "constraint", None) for variable in weights]
    return any(not _keras.is_of_keras(type(one)) for one in constraints if one is not None)
