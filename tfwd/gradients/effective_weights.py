"""Effective weights of tfwd's layers, drawn once for all passes of one computation.

Weight dropout draws one mask for the batch. All chunks of the batch, and examples that are computed
one by one, must therefore use the same mask. A layer draws in the first pass. Later passes use the
same draw.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd.layers._substitution import weight_selection
from tfwd.layers._substitution.weight_perturbation_mixin import WeightPerturbationMixin

# A variable, its effective weight, and the derivative of the effective weight by the raw weight,
# entry by entry. The derivative is None if the parametrization is not elementwise.
Effective: TypeAlias = "list[tuple[keras.Variable, tf.Tensor, tf.Tensor | None]]"


class Perturbations:
    """The draws of one computation."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], Any] = {}
        self._found: dict[tuple[int, int], Effective] = {}
        self._calls: dict[int, int] = {}

    def begin(self) -> None:
        """Starts another pass. The next call of each layer is its first call in this pass."""
        self._calls = {}

    def state(self, owner: Any, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Returns the seed and the number of the next call, for parametrizations in place.

        Args:
            owner: Parametrizations in place.
            draw: Function that draws a new number.
        """
        index = self._calls.get(id(owner), 0)
        self._calls[id(owner)] = index + 1
        key = id(owner), index
        if key not in self._numbers:
            self._numbers[key] = draw()
        return self._numbers[key]

    def take(self, layer: WeightPerturbationMixin, differentiable: bool = False) -> Effective:
        """Returns the effective weights of a layer's next training call in this pass.

        Args:
            layer: Layer of tfwd, in training.
            differentiable: bool. Computes the effective weights again, so that an outer tape
                records their computation from the raw weights. The values are the same. Default
                False.
        """
        index = self._calls.get(id(layer), 0)
        self._calls[id(layer)] = index + 1
        key = id(layer), index
        if key not in self._numbers:
            _check(layer)
            self._numbers[key] = layer.calls
            self._found[key] = _effective(layer, self._numbers[key])
            layer.draws.next(True)
        if differentiable:
            return _effective(layer, self._numbers[key], scales=False)
        return self._found[key]


def plain_call(
    owner: type, layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """Returns the layer's training call without its own perturbation.

    Returns None if the layer is not in training, or if this call is unknown. The layer's own call
    must then run.
    """
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    training = training_flag.standardize({**given, **given.get("kwargs", {})}.get("training"))
    if training is not True:
        return None
    unperturbed = vars(owner).get("_unperturbed_call")  # not one from a subclass of `owner`
    if unperturbed is None:
        return None
    flags = _keras.layer_calls.CallState()

    def call() -> Any:
        with flags.restored(True):
            return unperturbed(layer, *args, **kwargs)

    return call


def _check(layer: Any) -> None:
    """Raises a ValueError if the examples of a batch have different effective weights."""
    for given in layer._all_parametrizations():
        if any(element.per_example for element in weight_selection.elements(given)):
            raise ValueError(
                f"layer '{layer.name}' has Dropout(per_example=True), for which tfwd.gradients "
                "cannot compute moments in training: pass training=False, or use per_example=False"
            )


def _effective(layer: Any, call: Any, scales: bool = True) -> Effective:
    named = {target.name: target.variable for target, _ in layer._targeted()}
    if not scales:
        values = layer.effective_weights(call)
        return [(named[name], value, None) for name, value in values.items()]
    elementwise = _is_elementwise(layer)
    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        raw = {id(v): _keras.variables.value(v) for v in layer._subject().weights}
        for value in raw.values():
            tape.watch(value)
        values = layer.effective_weights(call)
    found: Effective = []
    for name, value in values.items():
        variable = named[name]
        scale = None
        if elementwise:
            scale = tape.gradient(value, raw[id(variable)])
        found.append((variable, tf.stop_gradient(value), scale))
    return found


def _is_elementwise(layer: Any) -> bool:
    """Returns True if all parametrizations of the layer, and of layers inside it, are elementwise.

    Then each entry of an effective weight depends only on the same entry of the raw weight.
    """
    return all(
        parametrization.elementwise
        for given in layer._all_parametrizations()
        for parametrization in weight_selection.elements(given)
    )
