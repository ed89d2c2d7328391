"""`rates`: a keras-tuner hypermodel that searches rates of weight dropout and weight noise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import keras_tuner

from tfwd import _keras
from tfwd import parametrizations as P
from tfwd.parametrized_model import parametrize
from tfwd.tuning.search_space import Choice, Float, Int, Spec


def rates(
    make_model: Callable[..., keras.Model],
    dropout: Mapping[str, Spec | float] | None = None,
    noise: Mapping[str, Spec | float] | None = None,
) -> Rates:
    """Returns a hypermodel: a model with `tfwd.parametrize`, at rates that a tuner chooses.

    Formula: `w' = Dropout(rate)(GaussianNoise(stddev)(w))`.

    Args:
        make_model: Function that returns a new compiled model in each call. If it has an argument,
            it receives the trial's `hp`, and may declare further hyperparameters.
        dropout: dict from a pattern, as in `tfwd.parametrize`, to the drop rates to try: a `Float`,
            `Int` or `Choice`, or a single number. Default None, for no weight dropout.
        noise: dict as in `dropout`, for the standard deviations of variational noise. If both match
            a weight, noise is applied first. Default None, for no noise.

    Returns:
        A `keras_tuner.HyperModel`. Its hyperparameters are "dropout/PATTERN" and "noise/PATTERN".

    Raises:
        ValueError: If `make_model` is not a function; if neither `dropout` nor `noise` is given; if
            an end of a range is not a valid rate or deviation. `build` raises the errors of
            `tfwd.parametrize`, and an error if `make_model` does not return a compiled model.

    Example:
    >>> import keras, keras_tuner
    >>> from tfwd import tuning
    >>> def make_model():
    ...     model = keras.Sequential([keras.Input((3, 8)), keras.layers.LSTM(4)])
    ...     model.compile("adam", "mse")
    ...     return model
    >>> hypermodel = tuning.rates(make_model, {"recurrent_kernel": tuning.Float(0, 0.7, step=0.1)})
    >>> hp = keras_tuner.HyperParameters()
    >>> hp.values["dropout/recurrent_kernel"] = 0.3
    >>> dict(hypermodel.build(hp).layers[0].parametrizations)
    {'recurrent_kernel': Dropout(rate=0.3, noise_shape=None)}
    """
    if isinstance(make_model, keras.Model) or not callable(make_model):
        raise ValueError(
            f"make_model must be a function that returns a new compiled model; got {make_model!r}. "
            "Put the code that makes the model into a function"
        )
    if not dropout and not noise:
        raise ValueError(
            "dropout and noise are both empty: give rates to try, such as "
            'dropout={"recurrent_kernel": Float(0, 0.7)}'
        )
    for name, kind, given in (("dropout", P.Dropout, dropout), ("noise", P.GaussianNoise, noise)):
        for pattern, spec in (given or {}).items():
            for value in _ends(name, pattern, spec):
                kind(value).check(f"{name}[{pattern!r}] has the value {value!r} ({spec})")
    return Rates(make_model, dropout or {}, noise or {})


class Rates(keras_tuner.HyperModel):
    """keras-tuner hypermodel that `rates` returns."""

    def __init__(
        self,
        make_model: Callable[..., keras.Model],
        dropout: Mapping[str, Spec | float],
        noise: Mapping[str, Spec | float],
    ):
        super().__init__()
        self.make_model, self.dropout, self.noise = make_model, dict(dropout), dict(noise)
        self._takes_hp = bool(inspect.signature(make_model).parameters)

    def declare_hyperparameters(self, hp: keras_tuner.HyperParameters) -> None:
        self.parametrizations(hp)

    def parametrizations(
        self, hp: keras_tuner.HyperParameters
    ) -> tuple[dict[str, P.Parametrization], dict[str, P.Parametrization]]:
        """Returns the noise and the dropout of a trial, each by pattern."""
        noise: dict[str, P.Parametrization] = {
            pattern: P.GaussianNoise(_value(hp, f"noise/{pattern}", spec))
            for pattern, spec in self.noise.items()
        }
        dropout: dict[str, P.Parametrization] = {
            pattern: P.Dropout(_value(hp, f"dropout/{pattern}", spec))
            for pattern, spec in self.dropout.items()
        }
        return noise, dropout

    def build(self, hp: keras_tuner.HyperParameters) -> keras.Model:
        model = self.make_model(hp) if self._takes_hp else self.make_model()
        if not _keras.training.is_compiled(model):
            raise ValueError(f"make_model must make a compiled Keras model; it made {model!r}")
        wrapped = model
        # One after the other: a weight that a noise pattern and a dropout pattern match gets both.
        for chosen in self.parametrizations(hp):
            wrapped = parametrize(wrapped, chosen) if chosen else wrapped
        if not _keras.training.is_compiled(wrapped):  # the wrapper of a subclassed model
            wrapped.compile_from_config(model.get_compile_config())
        return wrapped


def _ends(name: str, pattern: str, spec: Any) -> Sequence[Any]:
    if isinstance(spec, (Float, Int, Choice)):
        return spec.ends
    if isinstance(spec, (int, float)) and not isinstance(spec, bool):
        return (spec,)
    raise ValueError(f"{name}[{pattern!r}] is {spec!r}: give a number, Float(0, 0.7) or Choice")


def _value(hp: keras_tuner.HyperParameters, name: str, spec: Spec | float) -> float:
    return float(spec) if isinstance(spec, (int, float)) else spec.declare(hp, name)
