"""Registry of rules: functions that return the per-example gradients of a layer's weights.

A rule replaces a layer's `call` while moments are computed. It computes the same outputs, and marks
the pre-activations whose gradients it needs. It declares how each weight's per-example gradients
follow from these gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from tfwd import _keras

Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)

_rules: dict[type, Rule] = {}

# Names that subclasses may override: a rule replaces only `call`.
_HARMLESS = {
    *("call", "build", "compute_output_shape", "compute_output_spec", "compute_mask"),
    *("get_config", "from_config", "save_own_variables", "load_own_variables"),
    *("get_initial_state", "reset_state", "reset_states"),
}


def rule(*classes: type) -> Callable[[R], R]:
    """Registers a function as the rule of layer classes. It replaces an earlier rule.

    The rule is also used for subclasses that run the `call` of the class. A subclass must not
    override other methods and properties that `call` may use.

    Args:
        *classes: Keras layer classes.

    Returns:
        A decorator for a function `rule(layer, call, *args, **kwargs)`. `args` and `kwargs` are the
        arguments of the layer's `call`, and `call` is a `Call`. The function returns the result of
        the layer's `call`, or `NotImplemented` for a case that it does not cover. The moments of
        the layer's weights are then computed example by example.

    Raises:
        ValueError: If a class is not a Keras layer class.

    Example:
        A layer multiplies by a vector, `y = x * scale`. For one example, `dl/dscale = x * dl/dy`.

        >>> import keras
        >>> import tensorflow as tf
        >>> from tfwd import gradients
        >>> class Scale(keras.layers.Layer):
        ...     def build(self, shape):
        ...         self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")
        ...     def call(self, x):
        ...         return x * self.scale
        >>> @gradients.rule(Scale)
        ... def scale(layer, call, x):
        ...     y = call.probe(x * call.value(layer.scale))
        ...     call.use(layer.scale, y, lambda d: gradients.Materialized(x * d))
        ...     return y
        >>> model = keras.Sequential([keras.Input((2,)), Scale()])
        >>> x, y = tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.zeros([2, 2])
        >>> moments = gradients.moments(model, x, y, "mse")
        >>> moments.methods
        ['scale']
        >>> moments.mean[0].numpy(), moments.mean_square[0].numpy()  # mean of x * x
        (array([ 5., 10.], dtype=float32), array([ 41., 136.], dtype=float32))
    """
    for cls in classes:
        if not (isinstance(cls, type) and hasattr(cls, "call")):
            raise ValueError(f"rule() expects Keras layer classes, got {cls!r}")

    def register(function: R) -> R:
        for cls in classes:
            _rules[cls] = function
        return function

    return register


def find(cls: type, owner: type) -> Rule | None:
    """Returns the rule for a `call` that `owner` defines and an instance of `cls` runs."""
    for base in cls.__mro__:
        if base in _rules and _keras.calls_of(base) is owner:
            return None if _overrides(cls, base) else _rules[base]
    return None


def _overrides(cls: type, base: type) -> bool:
    """Returns True if a subclass overrides a name that the `call` of a class may use.

    The class, or a base class below `keras.Layer`, defines these names. Examples are an LSTM's
    `inner_loop` and a convolution's `convolution_op`.
    """
    lines = [c for c in base.__mro__ if c not in keras.layers.Layer.__mro__]
    names = {name for c in lines for name in vars(c) if not name.startswith("__")} - _HARMLESS
    own = [c for c in cls.__mro__ if c not in base.__mro__]
    return any(name in names for c in own for name in vars(c))


def owners(cls: type) -> list[type]:
    """Returns the classes whose `call` a rule may replace, in an instance of `cls`."""
    return [_keras.calls_of(base) for base in cls.__mro__ if base in _rules]
