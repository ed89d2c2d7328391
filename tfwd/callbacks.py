"""`GradientSquaredMean`: moments of the gradient while a model is fitted."""

from __future__ import annotations

import importlib
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras_calls, substitute
from tfwd.gradients import squared_mean, statistics

KEYS = ("squared_mean", "square_of_mean", "noise_scale", "signal_to_noise")


class GradientSquaredMean(keras.callbacks.Callback):
    """In `fit`, every n batches: how large and how noisy the gradient is.

    For the batch that is about to be trained on it computes, over all weights and for each, the
    mean of the squared per-example gradients, the square of their mean, the gradient noise scale
    and the signal-to-noise ratio (`tfwd.gradients.statistics` has the formulas). They go to
    `records`, to TensorBoard, and, averaged over an epoch, to its logs as `gradient_squared_mean`,
    `gradient_square_of_mean`, `gradient_noise_scale` and `gradient_signal_to_noise`.

    Training is the same as without it: what the computation draws and updates is discarded.

    Args:
        every: how many batches from one measurement to the next, beginning with the first.
        log_dir: a folder for TensorBoard's events, or None.
        plot: a file (`.png`, `.svg`, ..) that a plot is written to at the end, or None. It needs
            matplotlib, which is imported then and not before.
        loss: as for `squared_mean`; by default the one that the model was compiled with.
        training: the flag that the model is called with.
        chunk_size: as for `squared_mean`.

    Attributes:
        records: a list of dicts of `step` (batches that were trained on before), `batch_size`, the
            four statistics, and `variables` with the same by path.

    Raises:
        ValueError: if `every` is not an int of at least 1, or, when training begins, if the model
            has no loss.

    Example:

    >>> import keras
    >>> from tfwd import callbacks
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> moments = callbacks.GradientSquaredMean(every=2)
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
        every: int = 100,
        log_dir: str | os.PathLike[str] | None = None,
        plot: str | os.PathLike[str] | None = None,
        loss: Any = None,
        training: bool = True,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every must be an int of at least 1, got {every!r}")
        self.every, self.log_dir, self.plot = every, log_dir, plot
        self.loss, self.training_flag, self.chunk_size = loss, training, chunk_size
        self.records: list[statistics.Record] = []
        self._step = 0
        self._epoch: list[statistics.Record] = []
        self._writer: Any = None
        self._trains: Any = None
        self._measure: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Puts itself before the model's training function."""
        weights = None
        if self.loss is None:
            self._loss, weights = _keras_calls.compiled_loss(self.model)
        else:
            self._loss = self.loss
        if self._loss is None:
            raise ValueError(
                f"model '{self.model.name}' was compiled without a loss: give one to "
                "GradientSquaredMean(loss=...)"
            )
        if self.log_dir is not None:
            self._writer = tf.summary.create_file_writer(os.fspath(self.log_dir))
        self.records, self._epoch, self._step = [], [], 0
        self._measure = self._function(weights)
        self._trains = self.model.train_function
        self.model.train_function = self._train

    def on_train_end(self, logs: Any = None) -> None:
        """Takes itself away again; writes the plot."""
        self._restore()
        if self._writer is not None:
            self._writer.close()
        if self.plot is not None and self.records:
            write_plot(self.records, self.plot)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the means of the epoch's measurements to its logs."""
        for key in KEYS if self._epoch and logs is not None else ():
            values = [record[key] for record in self._epoch]
            logs[f"gradient_{key}"] = sum(values) / len(values)
        self._epoch = []

    def _train(self, iterator: Any) -> Any:
        """The model's training function, after a measurement where one is due."""
        try:
            steps = self.model.steps_per_execution
            if -self._step % self.every < steps:  # a multiple of `every` is among these steps
                data = next(iterator)
                self._record(self._measure(data))
                iterator = itertools.chain([data], iterator)
            outputs = self._trains(iterator)
            self._step += steps
            return outputs
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> None:
        if self._trains is not None:
            self.model.train_function, self._trains = self._trains, None

    def _function(self, loss_weights: Any) -> Any:
        model, strategy = self.model, self.model.distribute_strategy

        def on_replica(data: Any) -> Any:
            x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)

            def compute() -> Any:
                moments = squared_mean(
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

            return substitute.call(compute, [], capture=True).outputs

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
            [v.path for v in variables],
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
    """The numbers of a record under their names: the model's, then each weight's."""
    for key in KEYS:
        yield key, record[key]
        for path, values in record["variables"].items():
            yield f"{key}/{path}", values[key]


def write_plot(records: list[statistics.Record], path: str | os.PathLike[str]) -> None:
    """Draws the statistics over the steps: the model's above, each weight's below.

    Args:
        records: as in `GradientSquaredMean.records`, at least one.
        path: the file; its ending says the format.
    """
    figures = importlib.import_module(
        "matplotlib.figure"
    )  # no display, and not before it is needed
    steps = [record["step"] for record in records]
    figure = figures.Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    shown = {"squared_mean": "mean of squares", "square_of_mean": "square of mean"}
    for key, label in shown.items():
        axes[0, 0].plot(steps, _finite(records, key), label=label)
    axes[0, 0].legend()
    axes[0, 0].set_title("gradient, per entry")
    axes[0, 1].plot(steps, _finite(records, "noise_scale"))
    axes[0, 1].set_title("gradient noise scale (examples)")
    for path_of in records[0]["variables"]:
        own = [record["variables"][path_of] for record in records]
        axes[1, 0].plot(steps, _finite(own, "squared_mean"), label=path_of)
        axes[1, 1].plot(steps, _finite(own, "signal_to_noise"), label=path_of)
    axes[1, 0].set_title("mean of squares of each weight")
    axes[1, 1].set_title("signal-to-noise ratio of each weight")
    if len(records[0]["variables"]) <= 12:
        axes[1, 1].legend(fontsize="x-small")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.set_yscale("log")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _finite(records: list[Any], key: str) -> list[float]:
    """Values for a logarithmic axis; what it cannot show is a gap."""
    values = [record[key] for record in records]
    return [v if math.isfinite(v) and v > 0 else math.nan for v in values]
