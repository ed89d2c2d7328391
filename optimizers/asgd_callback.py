"""`NonMonotonicASGDCallback`: lets `fit` use `NonMonotonicASGD`."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfwd._keras import wrapped_optimizers
from tfwd.optimizers.non_monotonic_asgd import NonMonotonicASGD


class NonMonotonicASGDCallback(keras.callbacks.Callback):
    """A callback that triggers `NonMonotonicASGD` in `fit` and evaluates the averaged weights.

    During an epoch the model trains on the raw weights. After the average has begun, the model has
    the averaged weights from each evaluation until the next epoch begins. It also has them after
    training. Validation therefore uses the averages. Callbacks at the end of an epoch, such as
    ModelCheckpoint and EarlyStopping, use them too. A model that is saved at this time has the
    averages as its weights. Its optimizer has the raw weights, and `fit` resumes from them.

    Args:
        monitor: str. Entry of the epoch's logs with the loss to monitor. Default "val_loss".

    Raises:
        ValueError: At the start of training, if the model's optimizer is not `NonMonotonicASGD`.

    Example:
        >>> import keras, numpy as np
        >>> from tfwd.optimizers import NonMonotonicASGD, NonMonotonicASGDCallback
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
        self._observed = False  # the loss of this epoch was observed

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        found = [
            held
            for held in wrapped_optimizers.chain(self.model.optimizer)
            if isinstance(held, NonMonotonicASGD)
        ]
        if len(found) != 1:
            raise ValueError(
                f"{type(self).__name__} needs a model that is compiled with one NonMonotonicASGD, "
                f"but its optimizer {type(self.model.optimizer).__name__} contains {len(found)}: "
                "compile the model with NonMonotonicASGD(optimizer)"
            )
        self._optimizer, self._fitting = found[0], True
        self._optimizer._in_callback = True

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._observed = False
        # Not in `on_train_begin`, because another callback may restore a state there.
        if self._optimizer is not None and self._optimizer.exchanged:
            self._optimizer.exchange()

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        if self._fitting:
            self._average()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        # Not only at the end of the epoch: an earlier callback may save the state there.
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
                f"{type(self).__name__}: the logs of the epoch have no {self.monitor!r}, only "
                f"{', '.join(logs or {})}, so the average never begins: pass validation_data to "
                "fit, or set monitor to one of these names",
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
