"""Traces a model as a function that predicts with the next effective weights."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import call_interception
from tfwd.layers._substitution import caller_detection, reference_weights
from tfwd.layers._substitution.seed_stream import SeedStream
from tfwd.parametrizations.parametrized_layers import ParametrizedLayer


class Sampled:
    """Model that predicts with the effective weights of its next training calls.

    Args:
        model: Model.
        drawing: Layers of the model with parametrized weights.
        training: bool. Training flag of everything except the parametrizations.
    """

    def __init__(self, model: Any, drawing: list[ParametrizedLayer], training: bool) -> None:
        self._model = model
        self._draws = [layer.draws for layer in drawing]
        self._first = [_held(draws.state) for draws in self._draws]
        self._states = _states(model, self._draws)
        found = [*self._draws, *(w.parametrization for layer in drawing for w in layer.weights)]
        self.predict = _function(model, training, self._states, found)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores seeds, counters and references at the end of the `with` block."""
        before = [_held(state) for state in self._states]
        try:
            with reference_weights.borrowed(self._model):
                yield
        finally:
            for state, value in zip(self._states, before, strict=True):
                state.assign(value)

    def begin(self) -> None:
        """Resets the draws to the first sample."""
        for draws, value in zip(self._draws, self._first, strict=True):
            draws.state.assign(value)


def _states(model: Any, draws: list[SeedStream]) -> list[Any]:
    """Returns the seeds and counters of a model, each once.

    Keras lists the states of its generators in `variables`, but not in `weights`.
    """
    weights = {id(v) for v in model.weights}
    states = [x.state for x in _keras.layers.all_layers(model) if isinstance(x, SeedStream)]
    # Draws of parametrizations in place are not layers of the model.
    states += [stream.state for stream in draws]
    states += [v for v in model.variables if id(v) not in weights]
    return list({id(state): state for state in states}.values())


class _Traced(NamedTuple):
    """Traced function of a model, with the flags and objects that it depends on."""

    function: Callable[[Any], Any]
    flags: list[bool]
    objects: list[weakref.ref[Any]]

    def fits(self, flags: list[bool], objects: list[Any]) -> bool:
        """Returns True if tracing again would give the same function."""
        same = flags == self.flags and len(objects) == len(self.objects)
        return same and all(ref() is obj for ref, obj in zip(self.objects, objects, strict=True))


# The last traced function of each model. It has no strong reference to the model or its layers.
_traced: weakref.WeakKeyDictionary[Any, _Traced] = weakref.WeakKeyDictionary()


def _function(
    model: Any, training: bool, states: list[Any], found: list[Any]
) -> Callable[[Any], Any]:
    """Returns the function that maps a batch to the outputs of the next sample.

    Reuses the function of an earlier call if the layers, flags and states are the same.

    Args:
        model: Model.
        training: bool. Training flag of everything except the parametrizations.
        states: Seeds and counters.
        found: Counters and parametrizations of the model.
    """
    if getattr(model, "run_eagerly", False):
        return _forward(model, training, states)
    layers = _keras.layers.all_layers(model)
    flags = [training, *(layer.trainable for layer in layers)]
    objects = [*layers, *found, *states]
    known = _traced.get(model)
    if known is not None and known.fits(flags, objects):
        return known.function
    forward = _forward(model, training, states)
    function = tf.function(forward, autograph=False, reduce_retracing=True)
    _traced[model] = _Traced(function, flags, [weakref.ref(obj) for obj in objects])
    return function


def _forward(model: Any, training: bool, states: list[Any]) -> Callable[[Any], Any]:
    reference = weakref.ref(model)
    layers = _keras.layers.all_layers(model)
    normalizations = [type(x) for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    flag = {"training": training} if _keras.layer_calls.accepts_training(model) else {}

    def forward(batch: Any) -> Any:
        frozen: Any = contextlib.nullcontext()
        if training and normalizations:
            kinds = map(_keras.calls_of, normalizations)
            frozen = call_interception.intercepted(kinds, _in_evaluation)
        run: Any = reference()  # a strong reference in the function would keep the model alive
        with (
            call_interception.Discarded(states),
            call_interception.users_code(),
            caller_detection.sampling(),
            frozen,
        ):
            return run(batch, **flag)

    return forward


def _in_evaluation(
    cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Calls a layer with `training=False`, whatever training flag the model passes."""
    signature = inspect.signature(own)
    if "training" not in signature.parameters:
        return own(*args, **kwargs)
    given = signature.bind(*args, **kwargs)
    given.arguments["training"] = False
    return own(*given.args, **given.kwargs)


def _held(variable: Any) -> np.ndarray:
    return _keras.variables.value(variable).numpy()
