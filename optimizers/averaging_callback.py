"""`NonMonotonicASGDCallback`: `NonMonotonicASGD` in `fit`, evaluated with averaged weights."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfwd._keras import wrapped_optimizers
from tfwd.optimizers.non_monotonic_asgd import NonMonotonicASGD


class NonMonotonicASGDCallback(keras.callbacks.Callback):
    """Lets `fit` use the `NonMonotonicASGD` that a model is compiled with.

    Once the average has begun, the averaged weights are in the model from each evaluation until
    the next epoch begins, and from the end of training on; in between it trains on the raw ones.
    So validation, and every callback that looks at the model at the end of an epoch, as
    ModelCheckpoint and EarlyStopping, sees the averages. A model saved then has the averages
    for its weights and the raw weights in its optimizer, and `fit` goes on from these.

    Args:
        monitor: the entry of the epoch's logs that is the loss to watch.

    Raises:
        ValueError: at the start of training, if the model's optimizer is no `NonMonotonicASGD`.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile(NonMonotonicASGD("sgd", non_monotone_interval=1), "mse")
    >>> x, y = np.zeros((4, 2)), np.ones((4, 1))
    >>> history = model.fit(
    ...     x, y, validation_data=(x, -y), epochs=4, verbose=0,
    ...     callbacks=[NonMonotonicASGDCallback()],
    ... )
    >>> model.optimizer.triggered
    True
    """

    def __init__(self, monitor: str = "val_loss") -> None:
        super().__init__()
        self.monitor = monitor
        self._optimizer: NonMonotonicASGD | None = None
        self._fitting = False
        self._warned = False
        self._observed = False  # in this epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        found = [
            held
            for held in wrapped_optimizers.chain(self.model.optimizer)
            if isinstance(held, NonMonotonicASGD)
        ]
        if len(found) != 1:
            raise ValueError(
                f"{type(self).__name__} needs a model that is compiled with one NonMonotonicASGD; "
                f"its optimizer is {type(self.model.optimizer).__name__}, with {len(found)}"
            )
        self._optimizer, self._fitting = found[0], True
        self._optimizer._in_callback = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._observed = False
        # Here and not when training begins, so that another callback may first restore a state.
        if self._optimizer is not None and self._optimizer.exchanged:
            self._optimizer.exchange()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._fitting:
            self._average()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # Not only when the epoch ends: a callback before this one may save the state there.
        if self._fitting and self.monitor.startswith("val_"):
            self._observe((logs or {}).get(self.monitor.removeprefix("val_")))

    def _observe(self, loss: Any) -> bool:
        if loss is not None and self._optimizer is not None and not self._observed:
            self._optimizer.observe(float(loss))
            self._observed = True
        return self._observed

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not self._observe((logs or {}).get(self.monitor)) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{type(self).__name__}: an epoch's logs have no {self.monitor!r}, only "
                f"{', '.join(logs or {})}; without it nothing is triggered",
                stacklevel=2,
            )
        self._average()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self._average()
        self._fitting = False
        if self._optimizer is not None:
            self._optimizer._in_callback = False

    def _average(self) -> None:
        if self._optimizer is not None and not self._optimizer.exchanged:
            self._optimizer.exchange()
