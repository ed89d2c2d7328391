"""`parametrize(in_place=True)` for a whole model, and the removal of its parametrizations."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfwd import _keras
from tfwd.layers._substitution import unsupported_weight_reads, weight_selection
from tfwd.layers._substitution.in_place import installation
from tfwd.layers._substitution.in_place.layer_call import around
from tfwd.layers._substitution.in_place.parametrization_in_place import InPlace
from tfwd.parametrizations import Parametrization


def parametrize_in_place(
    target: Any,
    parametrizations: Mapping[str, Parametrization],
    seed: int | None,
    recompute: bool,
    share_across_replicas: bool,
    exclude: Sequence[str],
) -> Any:
    """Adds parametrizations to the weights of a layer or model, as `tfwd.parametrize` describes."""
    kind = "model" if isinstance(target, keras.Model) else "layer"
    if not _keras.layer_building.has_weights(target):
        raise ValueError(
            f"{kind} '{target.name}' has no weights yet, or not all of them: call it on a batch "
            "first, or build it. For a Sequential model, an Input layer is enough"
        )
    unsupported_weight_reads.check_calls(target.name, target)
    if any(p.trains_reference for p in weight_selection.elements(parametrizations)):
        raise ValueError(
            f"{kind} '{target.name}': WeightNorm(gain=True) adds trainable weights, which "
            "in_place=True does not support: call tfwd.parametrize without in_place=True"
        )
    targeted = weight_selection.select(target, parametrizations, exclude)
    patterns = weight_selection.patterns(target, parametrizations, exclude)
    by_pattern: dict[str | None, list[weight_selection.Target]] = {}
    for (chosen, parametrization), pattern in zip(targeted, patterns, strict=True):
        where = f"weight '{chosen.name}' of {kind} '{target.name}'"
        parametrization.check(where, tuple(chosen.variable.shape))
        by_pattern.setdefault(pattern, []).append(chosen)
    trainable = {id(v) for v in target.trainable_weights}
    for pattern, found in by_pattern.items():
        if not any(id(t.variable) in trainable for t in found):
            raise ValueError(
                f"'{pattern}' selects only frozen weights of {kind} '{target.name}' "
                f"({', '.join(t.name for t in found)}): set layer.trainable = True, or remove the "
                "pattern"
            )
    installation.add(InPlace(target, targeted, patterns, seed, recompute, share_across_replicas))
    _forget_functions(target)
    return target


def _forget_functions(target: keras.Layer) -> None:
    """Makes each model that contains a layer of the target trace its functions again.

    A layer does not know which models contain it. So the function searches all existing models.
    """
    inside = {id(layer) for layer in _keras.layers.all_layers(target)}
    for found in gc.get_objects():
        if not issubclass(type(found), keras.Model) or not _keras.training.functions(found):
            continue
        if any(id(layer) in inside for layer in _keras.layers.all_layers(found)):
            _keras.training.forget_functions(found)


def remove_in_place(target: keras.Layer, fold: bool) -> None:
    """Removes all parametrizations that were added in place to a layer or to layers in it.

    Args:
        target: Layer.
        fold: bool. Sets the weights to the values that evaluation uses.

    Raises:
        ValueError: If the layer was parametrized as a part of another layer; if a parametrization
            also acts in evaluation and `fold` is False.
    """
    installed = installation.inside(target)
    if not installed and (outer := around(target)):
        raise ValueError(
            f"layer '{target.name}' was parametrized as a part of '{outer[0].target.name}': "
            f"call tfwd.unwrap with '{outer[0].target.name}'"
        )
    for added in installed:
        given = {target.path: p for target, p in added.targeted}
        if not fold and weight_selection.acts_in_evaluation(given):
            raise ValueError(
                f"'{added.target.name}' has a parametrization that also acts in evaluation, such "
                "as WeightNorm. Without it, the model would compute different outputs. Call "
                "tfwd.unwrap(model, fold=True), which sets the weights to the effective weights"
            )
    if fold:
        for variable, value in installation.evaluation_weights(target):
            _keras.variables.assign(variable, value)
    for added in reversed(installed):
        installation.remove(added)
    if installed:
        _forget_functions(target)


def added_parametrizations(model: keras.Layer) -> list[InPlace]:
    """Returns the parametrizations that were added in place to a model and to layers in it.

    Each has `calls`, the number of training calls so far. `effective_weights(calls)` returns, by
    name, the exact weights that the next training call uses on replica 0. It computes them from the
    current raw weights, so call it before the step.

    Args:
        model: Model or layer.

    Returns:
        A list, in the order in which they were added. They act in this order. The list is empty if
        the model has no such parametrization.

    Example:
        >>> import keras, tensorflow as tf, tfwd
        >>> from tfwd import parametrizations as P
        >>> dense = keras.layers.Dense(2)
        >>> _ = dense(tf.ones([1, 8]))
        >>> _ = tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
        >>> _ = dense(tf.ones([1, 8]), training=True)
        >>> (added,) = tfwd.added_parametrizations(dense)
        >>> added.calls, list(added.effective_weights(0))
        (1, ['kernel'])
    """
    return sorted(installation.inside(model), key=lambda one: one.addition_number)
