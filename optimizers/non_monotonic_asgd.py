"""Non-monotonically triggered averaged SGD (NT-ASGD).

Averaging the weights over many steps of SGD takes out the noise of the steps, but an average that
begins too early remembers weights that were not good yet. Here it begins when the validation loss
has stopped to fall. For other kinds of averages, Keras's optimizers have `use_ema`.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, dtypes
from tfwd._keras import updates as _keras_updates
from tfwd.optimizers._updates.repeated_rows import SumsRows
from tfwd.optimizers._updates.replicas import on_every_replica


@keras.saving.register_keras_serializable("tfwd")
class NonMonotonicASGD(SumsRows):
    """Any Keras optimizer, with an average of the weights that begins when training stalls.

    `observe(loss)` is told the validation loss v_t after each evaluation. With n the interval, the
    average is triggered by the first for which more than n losses came before it and

        v_t > min(v_1, ..., v_{t-n-1}),

    the best of all earlier ones but the last n. From then on, after each of the K updates that the
    wrapped optimizer makes, the average is

        a = (w_1 + ... + w_K) / K.

    Training goes on from the raw weights w, and `averaged()` puts a in their place for evaluation.
    Before the trigger, and until the first update after it, that is w itself.

    All of it (average, trigger, losses) is state of the optimizer, saved and restored with it. The
    average of a variable in half precision is kept in single precision.

    Args:
        optimizer: a Keras optimizer or the name of one; in the paper plain SGD.
        non_monotone_interval: n, at least 1.
        name: the optimizer's name.
        sum_repeated_rows: as in `DecoupledWeightDecay`.

    Warns:
        UserWarning: once, when a `fit` ends before the optimizer was told of any loss. (Keras 2
            does not tell legacy optimizers that it ends.)

    Raises:
        TypeError: the optimizer is not a Keras optimizer.
        ValueError: n is not a whole number of at least 1.

    Example:

    >>> import keras
    >>> optimizer = NonMonotonicASGD(keras.optimizers.SGD(1.0), non_monotone_interval=1)
    >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    >>> layer.build((None, 1))
    >>> (weight,) = layer.weights
    >>> optimizer.build([weight])
    >>> [optimizer.observe(loss) for loss in (3.0, 2.0, 4.0)]
    [False, False, True]
    >>> for _ in range(3):
    ...     optimizer.apply([tf.constant([[-1.0]])], [weight])
    >>> float(weight[0, 0])
    3.0
    >>> with optimizer.averaged():
    ...     float(weight[0, 0])
    2.0

    References:
        Merity, Keskar and Socher, "Regularizing and Optimizing LSTM Language Models",
        arXiv:1708.02182, Algorithm 1. Polyak and Juditsky, "Acceleration of Stochastic
        Approximation by Averaging" (1992). PyTorch's ASGD, which the authors' program uses, gives
        the first weight after the trigger no part in the average; here all K count alike.
    """

    def __init__(
        self,
        optimizer: Any,
        non_monotone_interval: int = 5,
        name: str | None = None,
        sum_repeated_rows: bool = True,
    ) -> None:
        n = non_monotone_interval
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise ValueError(
                f"{type(self).__name__}: non_monotone_interval={n!r}: give a whole number, at "
                "least 1"
            )
        super().__init__(optimizer, sum_repeated_rows, name)
        self.non_monotone_interval = n
        self._in_callback = False  # of a fit that is running
        self._silence_known = False
        self._averages: list[keras.Variable | None] = []
        self._kept: list[keras.Variable | None] = []

    def _build(self, variables: list[keras.Variable]) -> None:
        own, n = self._add_variable, self.non_monotone_interval
        self._averaged_updates = own("averaged_updates", "int64", -1)  # -1: not triggered
        self._evaluations = own("evaluations", "int64", 0)
        self._best = own("best", "float64", math.inf)  # of all but the last n
        # The last n, the newest last.
        self._recent = own("recent", "float64", math.inf, shape=(n,))
        self._is_exchanged = own("is_exchanged", "bool", 0)
        self._averages = [
            None if _keras_updates.is_overwritten(variable) else self._slot(variable, "average")
            for variable in variables
        ]
        # A variable in half precision cannot hold its average exactly, and the average's place is
        # not free for the raw weight while it is in the model: that has one of its own.
        self._kept = [
            None
            if average is None or average.dtype == variable.dtype
            else self._slot(variable, "kept")
            for variable, average in zip(variables, self._averages, strict=True)
        ]

    def _slot(self, variable: keras.Variable, name: str) -> keras.Variable:
        """A place for values of a variable, in single precision at least."""
        dtype = dtypes.wide(tf.as_dtype(_keras.variables.dtype_name(variable)))
        name = f"{_keras.variables.path(variable)}_{name}".replace("/", "_")
        return self._add_variable(name, dtype.name, 0, like=variable)

    @property
    def triggered(self) -> bool:
        """Whether the average has begun."""
        return self.built and int(self._averaged_updates.numpy()) >= 0

    @property
    def exchanged(self) -> bool:
        """Whether the averaged weights are in the model now, and the raw ones kept here."""
        return self.built and bool(self._is_exchanged.numpy())

    def observe(self, loss: float) -> bool:
        """Is told the loss of an evaluation; begins the average if training has stalled.

        Args:
            loss: the lower the better. NaN is as bad as infinity.

        Returns:
            Whether this loss was the one that triggered it.

        Raises:
            ValueError: the optimizer is not built, so that there is nothing to average yet.
        """
        if not self.built:
            raise ValueError(f"{type(self).__name__}: call build(variables), or train, before")
        loss = math.inf if math.isnan(loss) else float(loss)
        triggers = not self.triggered and loss > float(self._best.numpy())
        recent = self._recent.numpy()
        self._best.assign(min(float(self._best.numpy()), float(recent[0])))
        self._recent.assign([*recent[1:], loss])
        self._evaluations.assign_add(1)
        if triggers:
            self._averaged_updates.assign(0)
        return triggers

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within it the model has the averaged weights, and after it the raw ones again."""
        begins = not self.exchanged
        if begins:
            self.exchange()
        try:
            yield
        finally:
            if begins and self.exchanged:
                self.exchange()

    def exchange(self) -> None:
        """Puts the averages into the model and keeps the raw weights, or the other way round.

        Nothing is lost if the state is saved in between. Without an average it does nothing.
        """
        if not self.built or int(self._averaged_updates.numpy()) < 1:
            return
        back = self.exchanged
        for variable, average, kept in zip(
            self._trainable_variables, self._averages, self._kept, strict=True
        ):
            if average is None:
                continue
            raw = tf.identity(_keras.variables.value(variable))
            if kept is None:
                variable.assign(_keras.variables.value(average))
                average.assign(raw)
            elif back:
                variable.assign(tf.cast(_keras.variables.value(kept), variable.dtype))
            else:
                kept.assign(tf.cast(raw, kept.dtype))
                variable.assign(tf.cast(_keras.variables.value(average), variable.dtype))
        self._is_exchanged.assign(not back)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Called when `fit` ends; see Keras. Says so if the validation loss was never told."""
        if not self.exchanged:  # else a moving average of Keras's would overwrite this one
            super().finalize_variable_values(var_list)
        if self._in_callback or self._silence_known or not self.built:
            return
        if int(self._evaluations.numpy()) == 0:
            self._silence_known = True
            warnings.warn(
                f"{type(self).__name__} '{self.name}' was told of no validation loss yet, so it "
                f"averages nothing and is {type(self.optimizer).__name__} alone: give fit "
                "validation_data and callbacks=[NonMonotonicASGDCallback()], or call "
                "observe(loss) after each evaluation",
                stacklevel=2,
            )

    def _pairs(self) -> list[tuple[keras.Variable, keras.Variable]]:
        pairs = zip(self._trainable_variables, self._averages, strict=True)
        return [(variable, average) for variable, average in pairs if average is not None]

    def _apply(self, grads: list[Any], variables: list[Any], make: Callable[[], Any]) -> Any:
        tf.debugging.Assert(
            tf.logical_not(_keras.variables.value(self._is_exchanged)),
            [
                "the averaged weights are in the model: fit with NonMonotonicASGDCallback(), or "
                "call the optimizer's exchange() before training goes on"
            ],
        )
        with _keras_updates.noticed(self) as was_made:
            result = super()._apply(grads, variables, make)
            made = was_made()
        begun = _keras.variables.value(self._averaged_updates) >= 0
        self._averaged_updates.assign_add(tf.cast(made & begun, tf.int64))
        count = _keras.variables.value(self._averaged_updates)
        pairs = self._pairs()
        on_every_replica(
            [average for _, average in pairs],
            lambda average, weight: _include(average, weight, count, made & begun),
            [_keras.variables.tf_variable(variable) for variable, _ in pairs],
        )
        return result

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "non_monotone_interval": self.non_monotone_interval}


def _include(average: tf.Variable, weight: tf.Variable, count: tf.Tensor, when: tf.Tensor) -> None:
    """Makes the mean of count - 1 values that of count, if `when`."""

    def include() -> None:
        share = tf.cast(1 / count, average.dtype)
        wide = tf.cast(weight, average.dtype)
        value = average + (wide - average) * share
        # What is there before the first is no part of it, not even by a rounding.
        average.assign(tf.where(count == 1, wide, value))

    tf.cond(when, include, lambda: None)
