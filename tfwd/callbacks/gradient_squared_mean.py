"""`GradientSquaredMean`: a callback that measures moments of the gradient in `fit`."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras
from tfwd._graph import stateless_call
from tfwd._keras import losses as _keras_losses
from tfwd._keras import training as _keras_training
from tfwd.gradients import argument_checks, statistics
from tfwd.gradients import moments as compute_moments
from tfwd.gradients.moments_plot import write_plot
from tfwd.optional_packages import require

# The statistics that are written to TensorBoard and to the logs of epochs.
KEYS = ("squared_mean", "square_of_mean", "noise_scale", "signal_to_noise")


class GradientSquaredMean(keras.callbacks.Callback):
    """Callback that measures how large and how noisy the gradient is, every n batches of `fit`.

    For a training batch, it computes the two moments, the gradient noise scale and the
    signal-to-noise ratio. The moments are the mean of the squared per-example gradients, and the
    square of their mean. It computes these numbers over all weights and for each weight. It adds
    them to `records` and to TensorBoard. It adds their averages over an epoch to the epoch's logs,
    as `gradient_squared_mean`, `gradient_square_of_mean`, `gradient_noise_scale` and
    `gradient_signal_to_noise`. For a batch of size `B`, with the moments `m` and `s` and sums over
    the entries `i`,

        variance V = B/(B-1) sum_i (s_i - m_i^2)        signal G = sum_i m_i^2 - V/B

    The noise scale is `V/G`. The signal-to-noise ratio is `G/V`. Over an epoch they are
    `mean(V)/mean(G)` and its inverse. `tfwd.gradients.statistics` explains why, and the effect of
    regularizers. The estimate `G` can be negative. It is then replaced by zero: the noise scale is
    **infinity, which means "too noisy to tell"**, and the ratio is 0. More examples help: larger
    batches, a smaller `every_n_steps`, or more records averaged with
    `statistics.average(callback.records)`.

    Training is unchanged: the draws and updates of the measurement are discarded.

    It measures a batch by itself, also if `FiniteCheck` skips the step. So a batch with a NaN makes
    the averages of its epoch NaN.

    A second `fit` of the same model continues the step numbers (here and in TensorBoard), the
    records and the plot. A `fit` of another model resets them.

    Args:
        every_n_steps: int. Measure one batch in every N, starting with the first. With
            `steps_per_execution=k`, the callback measures only the first batch of a group of k. It
            does so if the number of one batch of the group is a multiple of `every_n_steps`. With
            `k=4` and `every_n_steps=3`, it measures the batches 0, 4, 8. Default 100.
        log_dir: path of a folder for TensorBoard's events, or None.
        plot: path of a file (`.png`, `.svg`, ..) for a plot at the end of training, or None.
        loss: as in `tfwd.gradients.moments`. Default None, for the loss that the model was compiled
            with.
        training: bool. Training flag of the model's call. If True, dropout draws as in training,
            and BatchNormalization is an error. Default False.
        chunk_size: as in `tfwd.gradients.moments`.

    Attributes:
        records: list of dicts. Each has `step` (number of batches trained before, in all fits),
            `batch_size`, the four statistics, `variance` and `signal` (V and G). `variables` has
            these six numbers for each weight, by its path.

    Raises:
        ValueError: If `every_n_steps` is not an int of at least 1. When training starts, if the
            model has no loss.

    Example:
    >>> import keras, tensorflow as tf
    >>> from tfwd import callbacks
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> moments = callbacks.GradientSquaredMean(every_n_steps=2)
    >>> x, y = tf.random.normal([12, 2]), tf.random.normal([12, 1])
    >>> history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[moments])
    >>> [record["step"] for record in moments.records]
    [0, 2, 4]
    >>> sorted(key for key in history.history if key.startswith("gradient"))
    ['gradient_noise_scale', 'gradient_signal_to_noise', 'gradient_square_of_mean',
     'gradient_squared_mean']
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        log_dir: str | os.PathLike[str] | None = None,
        plot: str | os.PathLike[str] | None = None,
        loss: Any = None,
        training: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        is_int = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if not is_int or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be an int of at least 1, got {every_n_steps!r}")
        if log_dir is not None:
            require("tensorboard", "GradientSquaredMean(log_dir=...)", "tensorboard")
        if plot is not None:
            require("matplotlib", "GradientSquaredMean(plot=...)", "plots")
        self.every_n_steps, self.log_dir, self.plot = every_n_steps, log_dir, plot
        self.loss, self.training_flag, self.chunk_size = loss, training, chunk_size
        self.records: list[statistics.Record] = []
        self._step = 0
        self._fitted: Any = None
        self._epoch: list[statistics.Record] = []
        self._writer: Any = None
        self._trains: Any = None
        self._measure: Any = None
        self._begun: int | None = None  # the next batch of a `fit` with this callback

    def on_train_begin(self, logs: Any = None) -> None:
        """Replaces the model's training function with one that measures first."""
        self._restore()  # an interrupted `fit` did not restore it
        weights = None
        if self.loss is None:
            self._loss, weights = _keras_losses.compiled_loss(self.model)
        else:
            self._loss = self.loss
        if self._loss is None:
            raise ValueError(
                f"model '{self.model.name}' was compiled without a loss: pass a loss to "
                "GradientSquaredMean(loss=...)"
            )
        if self.log_dir is not None:
            self._writer = tf.summary.create_file_writer(_keras.own_path(self.log_dir, self.model))
        if self._fitted is not self.model:
            self.records, self._step, self._fitted = [], 0, self.model
        self._epoch = []
        self._measure = self._function(weights)
        self._trains = self.model.train_function
        self.model.train_function = self._train

    def on_train_end(self, logs: Any = None) -> None:
        """Restores the model's training function, and writes the plot."""
        self._restore()
        if self._writer is not None:
            self._writer.close()
        if self.plot is not None and self.records:
            write_plot(self.records, _keras.own_path(self.plot, self.model))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Records that `fit` with this callback makes the next call of the training function."""
        self._begun = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the averages over the epoch's measurements to its logs."""
        if self._epoch and logs is not None:
            found = statistics.average(self._epoch)
            logs.update({f"gradient_{key}": found[key] for key in KEYS})
        self._epoch = []

    def _train(self, iterator: Any) -> Any:
        """Calls the model's training function, after a measurement if one is due."""
        trains, begun, self._begun = self._trains, self._begun, None
        if begun is None:  # a `fit` without this callback, after an interrupted one
            self._restore()
            return trains(iterator)
        steps = _keras_training.steps_per_execution(self.model)
        if self.params.get("steps"):  # the last execution of an epoch may be shorter
            steps = min(steps, self.params["steps"] - begun)
        if -self._step % self.every_n_steps < steps:  # a step to measure is among these steps
            data = next(iterator)
            self._record(self._measure(data))
            iterator = _keras_training.iterator_from(self.model, data, iterator, steps)
        outputs = trains(iterator)
        self._step += steps
        return outputs

    def _restore(self) -> None:
        """Restores the model's training function. Several callbacks may do so in any order."""
        self._measure = self._begun = None
        function = self.model.train_function
        while isinstance(owner := getattr(function, "__self__", None), GradientSquaredMean):
            if owner._measure is not None:
                break
            function = self.model.train_function = owner._trains

    def _function(self, loss_weights: Any) -> Any:
        model, strategy = self.model, self.model.distribute_strategy

        def on_replica(data: Any) -> Any:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
            argument_checks.build(model, x)  # no variable can be created inside `compute`

            def compute() -> Any:
                moments = compute_moments(
                    model,
                    x,
                    y,
                    self._loss,
                    sample_weight,
                    training=self.training_flag,
                    chunk_size=self.chunk_size,
                    loss_weights=loss_weights,
                )
                size = tf.cast(moments.batch_size, tf.int64)
                return statistics.compress(moments), size

            return stateless_call.call(compute, [], capture=True).outputs

        @tf.autograph.experimental.do_not_convert
        def on_all(data: Any) -> Any:
            found = strategy.run(on_replica, args=(data,))
            return [strategy.experimental_local_results(part)[0] for part in found]

        return on_all if model.run_eagerly else tf.function(on_all, reduce_retracing=True)

    def _record(self, found: Any) -> None:
        sums, size = found
        variables = self.model.trainable_variables
        record = statistics.describe(
            sums.numpy(),
            [_keras.variables.path(v) for v in variables],
            [math.prod(v.shape) for v in variables],
            int(size.numpy()),
        )
        record = {"step": self._step, "batch_size": int(size.numpy()), **record}
        self.records.append(record)
        self._epoch.append(record)
        if self._writer is not None:
            with self._writer.as_default(step=self._step):
                for name, value in scalars(record):
                    tf.summary.scalar(f"gradient/{name}", value)


def scalars(record: statistics.Record) -> Iterator[tuple[str, float]]:
    """Yields each statistic of a record with its name: for the model, then for each weight."""
    for key in KEYS:
        yield key, record[key]
        for path, values in record["variables"].items():
            yield f"{key}/{path}", values[key]
