"""Non-monotonically triggered averaged SGD (NT-ASGD).

The average of the weights over many steps of SGD removes the noise of the steps. An average that
begins too early contains weights that were not good yet. Here the average begins when the
validation loss stops falling. For other kinds of averages, Keras's optimizers have `use_ema`.
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
from tfwd._keras import update_interception
from tfwd.optimizers._updates.repeated_rows import SumsRows
from tfwd.optimizers._updates.replica_updates import on_every_replica


@keras.saving.register_keras_serializable("tfwd")
class NonMonotonicASGD(SumsRows):
    """An optimizer wrapper that averages the weights after training stalls (NT-ASGD).

    `observe(loss)` receives the validation loss v_t after each evaluation. n is the interval. The
    average begins after the first loss that has more than n earlier losses and satisfies

        v_t > min(v_1, ..., v_{t-n-1}).

    The minimum leaves out the n losses before v_t. After K more updates of the wrapped optimizer,
    the average is

        a = (w_1 + ... + w_K) / K.

    Training continues from the raw weights w. `averaged()` puts the average into the model for
    evaluation. Until the first update after the trigger, the average equals w.

    Average, trigger and losses are saved and restored with the optimizer. The average of a variable
    in half precision is stored in single precision.

    Args:
        optimizer: Keras optimizer, or its name. The paper uses plain SGD.
        non_monotone_interval: int. The interval n, at least 1. Default 5.
        name: str. Name of the optimizer. Default None.
        sum_repeated_rows: As in `DecoupledWeightDecay`.

    Warns:
        UserWarning: Once, if a `fit` ends before the optimizer has observed any loss. There is no
            warning for legacy optimizers of Keras 2, because Keras does not notify them of the end.

    Raises:
        TypeError: If the optimizer is not a Keras optimizer.
        ValueError: If n is not an integer of at least 1.

    Example:
        >>> import keras, tensorflow as tf
        >>> from tfwd.optimizers import NonMonotonicASGD
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
        Approximation by Averaging" (1992). Departure: PyTorch's ASGD, which the authors' program
        uses, leaves the first weight after the trigger out of the average. Here all K weights count
        equally.
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
                f"{type(self).__name__}: non_monotone_interval={n!r}: expected an integer of at "
                "least 1"
            )
        super().__init__(optimizer, sum_repeated_rows, name)
        self.non_monotone_interval = n
        self._in_callback = False  # a fit with the callback is running
        self._has_warned = False
        self._averages: list[keras.Variable | None] = []
        self._kept: list[keras.Variable | None] = []

    def _build(self, variables: list[keras.Variable]) -> None:
        add, n = self._add_variable, self.non_monotone_interval
        self._averaged_updates = add("averaged_updates", "int64", -1)  # -1 means not triggered
        self._evaluations = add("evaluations", "int64", 0)
        self._best = add("best", "float64", math.inf)  # best loss except the last n losses
        # The last n losses. The newest loss is last.
        self._recent = add("recent", "float64", math.inf, shape=(n,))
        self._is_exchanged = add("is_exchanged", "bool", 0)
        self._averages = [
            None
            if update_interception.is_overwritten(variable)
            else self._slot(variable, "average")
            for variable in variables
        ]
        # A variable in half precision cannot store its average exactly. While the model has the
        # average, the average's variable cannot store the raw weight. Another variable stores it.
        self._kept = [
            None
            if average is None or average.dtype == variable.dtype
            else self._slot(variable, "kept")
            for variable, average in zip(variables, self._averages, strict=True)
        ]

    def _slot(self, variable: keras.Variable, name: str) -> keras.Variable:
        """Creates a variable for values of a weight, in single precision at least."""
        dtype = dtypes.wide(tf.as_dtype(_keras.variables.dtype_name(variable)))
        name = f"{_keras.variables.path(variable)}_{name}".replace("/", "_")
        return self._add_variable(name, dtype.name, 0, like=variable)

    @property
    def triggered(self) -> bool:
        """True if the average has begun."""
        return self.built and int(self._averaged_updates.numpy()) >= 0

    @property
    def exchanged(self) -> bool:
        """True if the model now has the averaged weights, and the optimizer has the raw weights."""
        return self.built and bool(self._is_exchanged.numpy())

    def observe(self, loss: float) -> bool:
        """Records the loss of an evaluation. Begins the average if training has stalled.

        Args:
            loss: float. Lower is better. NaN counts as infinity.

        Returns:
            True if this loss triggered the average.

        Raises:
            ValueError: If the optimizer is not built, because there are no weights to average yet.
        """
        if not self.built:
            raise ValueError(
                f"{type(self).__name__} is not built: call build(variables), or train, before "
                "observe()"
            )
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
        """Puts the averaged weights into the model in the body, and the raw weights after it."""
        begins = not self.exchanged
        if begins:
            self.exchange()
        try:
            yield
        finally:
            if begins and self.exchanged:
                self.exchange()

    def exchange(self) -> None:
        """Puts the averages into the model and stores the raw weights, or the reverse.

        A state that is saved after either exchange is complete. The call does nothing if there is
        no average.
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
        """Runs when `fit` ends; see Keras. Warns if no validation loss was observed."""
        if not self.exchanged:  # else Keras's moving average would overwrite this average
            super().finalize_variable_values(var_list)
        if self._in_callback or self._has_warned or not self.built:
            return
        if int(self._evaluations.numpy()) == 0:
            self._has_warned = True
            warnings.warn(
                f"{type(self).__name__} '{self.name}' has not observed any validation loss, so it "
                f"averages nothing and acts as {type(self.optimizer).__name__}: give fit "
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
                "the averaged weights are in the model, but training needs the raw weights: use "
                "fit with NonMonotonicASGDCallback(), or call the optimizer's exchange() first"
            ],
        )
        with update_interception.detect_update(self) as was_made:
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
    """Updates the mean of count - 1 values to the mean of count values, if `when` is True."""

    def include() -> None:
        share = tf.cast(1 / count, average.dtype)
        wide = tf.cast(weight, average.dtype)
        value = average + (wide - average) * share
        # The earlier content must not affect the first mean, not even by rounding.
        average.assign(tf.where(count == 1, wide, value))

    tf.cond(when, include, lambda: None)
