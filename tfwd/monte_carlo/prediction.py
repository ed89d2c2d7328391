"""`predict_samples`: predictions with many draws of a model's weights."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd.monte_carlo.input_batches import batches_of, positive
from tfwd.monte_carlo.mean_and_deviation import SampleStatistics
from tfwd.monte_carlo.model_function import Sampled
from tfwd.monte_carlo.output_batches import concatenated, dense
from tfwd.parametrizations.parametrized_layers import ParametrizedLayer, parametrized_layers

# All threads share the counters of a model. Predictions therefore run one at a time.
_one_at_a_time = threading.RLock()


class PredictedSamples(NamedTuple):
    """Monte Carlo predictions, in the structure of the model's outputs.

    Attributes:
        mean: Mean over the samples, `[examples, ...]`.
        stddev: Standard deviation over the samples, `[examples, ...]`.
        samples: All samples, `[n, examples, ...]`, or None without `return_samples`.
    """

    mean: Any
    stddev: Any
    samples: Any = None


def predict_samples(
    model: keras.Layer,
    x: Any,
    n: int,
    batch_size: int | None = None,
    *,
    training: bool = False,
    return_samples: bool = False,
    verbose: int | str = "auto",
) -> PredictedSamples:
    """Predicts with n draws of the parametrized weights. Returns the mean and the deviation.

    Formula: with the effective weights `w_s` of the next training calls,

        y_s = model(x; w_s)     mean = (1/n) sum_s y_s     stddev = sqrt((1/n) sum_s (y_s - mean)^2)

    A sample uses the same weights for all examples. So the result does not depend on the batch
    size. Sample `s` uses `effective_weights(layer.calls + s)` of each wrapped layer. A layer that
    the model calls twice draws twice for each sample.

    The model is not changed. Do not train it in another thread during the prediction. Predictions
    from several threads run one after the other.

    After the prediction, the training-call counters are restored. Training therefore continues with
    the same draws as without the prediction. A second call returns the same samples. Use a larger
    `n` to see more draws. The samples change after more training calls, or with another `seed` of
    the layers.

    Args:
        model: Model or layer with parametrized weights: a result of `tfwd.parametrize`, or a model
            that contains layers of `tfwd.layers`. It must be built.
        x: Inputs of the model: an array or a tensor, or a list, tuple or dict of arrays, with the
            examples on the first axis. Or a `tf.data.Dataset`, or Keras's `PyDataset`, that yields
            batches as for `predict`. The model is called on `x` itself. Its own `predict_step`
            and its preprocessing in `predict` are not used.
        n: int. Number of samples, at least 1.
        batch_size: int. Number of examples in a batch. Default None, for 32. Must be None for a
            dataset, because a dataset yields batches.
        training: bool. Runs all other layers as in training too: `Dropout` and `LockedDropout`
            drop, which is the Monte Carlo dropout of Gal and Ghahramani. Exceptions:
            `BatchNormalization` uses its moving statistics, and no statistic or state changes. The
            dropout masks differ between batches. Default False, where only weights are random.
        return_samples: bool. Also returns all samples. Default False, which stores only sums.
        verbose: 0 shows nothing, 1 a progress bar, 2 one line. Default "auto", which is 1.

    Returns:
        `PredictedSamples` of NumPy arrays. Mean and deviation are float64 for float64 outputs, else
        float32. They are summed in float64, by Welford's method. Samples have the outputs' dtype.

    Raises:
        ValueError: If no weight of the model has a stochastic parametrization; if the model has no
            weights yet; if an argument is out of range; if `x` is empty or of a wrong type; if the
            outputs are not dense numbers, or if their shapes differ between batches.
        RuntimeError: Inside a `tf.function`.

    The model is traced at most once for each batch shape. Later calls use the same function. They
    trace again only if layers were added, removed, frozen or unfrozen, or if `training` differs. As
    in Keras's `predict`, changes of other attributes after tracing have no effect. An example is
    the rate of a `Dropout`.

    Not supported:

    - Replicas of `tf.distribute`. The prediction runs on one device.
    - On Keras 2, restoring the generators of `keras.layers.Dropout` with `training=True`. Later
      dropout masks differ there.

    Example:
        >>> import keras, numpy as np, tfwd
        >>> from tfwd import parametrizations as P
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        >>> noisy = tfwd.parametrize(model, {"kernel": P.GaussianNoise(0.5)}, seed=1)
        >>> x = np.ones((20, 8), "float32")
        >>> mean, stddev, _ = tfwd.predict_samples(noisy, x, n=100, verbose=0)
        >>> mean.shape, bool((abs(stddev - 0.5 * 8**0.5) < 0.3).all())
        ((20, 3), True)

    References: Gal and Ghahramani, "Dropout as a Bayesian Approximation" (2016); Wan et al.,
    "Regularization of Neural Networks using DropConnect" (2013), who average over masks. Welford,
    "Note on a Method for Calculating Corrected Sums of Squares and Products" (1962).
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "predict_samples was called inside a tf.function, but it loops over batches and draws "
            "in Python: call it outside of the tf.function"
        )
    n = positive("n", n, "number of samples")
    drawing = _drawing(model)
    batches, count = batches_of(x, batch_size)
    goal = None if count is None else count * n
    bar = keras.utils.Progbar(goal, verbose=_verbosity(verbose), unit_name="sample")
    means, deviations, samples = [], [], []  # of each batch
    structure: Any = None
    with _one_at_a_time:
        sampled = Sampled(model, drawing, bool(training))
        with sampled.restored():
            for batch in batches:
                statistics = SampleStatistics(return_samples)
                sampled.begin()
                for _ in range(n):
                    structure = sampled.predict(batch)
                    statistics.add([dense(leaf) for leaf in tf.nest.flatten(structure)])
                    bar.add(1)
                means.append(statistics.means())
                deviations.append(statistics.deviations())
                samples.append(statistics.samples())
    if not means:
        raise ValueError("x has no batches: pass a dataset that yields at least one batch")
    if goal is None:
        bar.update(len(means) * n, finalize=True)

    def joined(parts: list[list[np.ndarray]], axis: int) -> Any:
        outputs = [concatenated(leaves, axis) for leaves in zip(*parts, strict=True)]
        return tf.nest.pack_sequence_as(structure, outputs)

    stacked = joined(samples, 1) if return_samples else None
    return PredictedSamples(joined(means, 0), joined(deviations, 0), stacked)


def _verbosity(verbose: Any) -> int:
    if verbose == "auto":
        return 1
    if verbose not in (0, 1, 2):
        raise ValueError(f"verbose={verbose!r}: expected 0, 1, 2 or 'auto'")
    return int(verbose)


def _drawing(model: Any) -> list[ParametrizedLayer]:
    """Returns the layers of a model with parametrized weights.

    Raises:
        ValueError: If no parametrization is stochastic.
    """
    if not isinstance(model, keras.layers.Layer):
        raise ValueError(f"expected a Keras model, got {model!r} of type {type(model).__name__}")
    found = list(parametrized_layers(model))
    elements = [
        element
        for layer in found
        for weight in layer.weights
        for element in weight.parametrization.elements()
    ]
    if not any(element.stochastic for element in elements):
        what = "only parametrizations that draw nothing" if elements else "no parametrized weights"
        raise ValueError(
            f"model '{model.name}' has {what}, so all samples would be equal: apply a stochastic "
            "parametrization, as in tfwd.parametrize(model, {'kernel': Dropout(0.5)})"
        )
    return found
