"""`predict_samples`: predictions with many draws of a model's weights."""

from __future__ import annotations

import contextlib
import inspect
import math
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras
from tfwd._keras import calls as _keras_calls
from tfwd.gradients.data import Data
from tfwd.layers._substitution import references, sampled_calls
from tfwd.layers._substitution.seed_stream import SeedStream
from tfwd.parametrizations.parametrized_layers import ParametrizedLayer, parametrized_layers

# The counters of a model belong to the whole process.
_one_at_a_time = threading.RLock()


class PredictedSamples(NamedTuple):
    """Monte Carlo predictions, in the structure of the model's outputs.

    Attributes:
        mean: Mean over the samples, `[examples, ...]`.
        stddev: Standard deviation over the samples, `[examples, ...]`.
        samples: All samples, `[n, examples, ...]`, or None if they were not asked for.
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
    """Predicts with n draws of the parametrized weights, and returns their mean and deviation.

    Formula: with the effective weights `w_s` of the training calls that come next,

        y_s = model(x; w_s)     mean = (1/n) sum_s y_s     stddev = sqrt((1/n) sum_s (y_s - mean)^2)

    A sample uses the same weights for all examples. So the result does not depend on the batch
    size. Sample `s` uses `effective_weights(layer.calls + s)` of each wrapped layer. A layer that
    the model calls twice draws twice for each sample.

    The model is not changed. Another thread must not train it meanwhile. Predictions of several
    threads run one after the other.

    After the prediction, the training-call counters have their former values, so training continues
    with the same draws as without it. A second call returns the same samples. It needs a larger `n`
    to see more draws. The samples change after more training calls, or with another `seed` of the
    layers.

    Args:
        model: Model or layer with parametrized weights: a result of `tfwd.parametrize`, or a model
            that contains layers of `tfwd.layers`. It needs its weights.
        x: Inputs of the model: an array or a tensor, or a list, tuple or dict of arrays, with the
            examples on the first axis. Or a `tf.data.Dataset`, or Keras's `PyDataset`, that yields
            batches as for `predict`. The model is called on `x` itself. Its own `predict_step`
            and its preprocessing in `predict` are not used.
        n: int. Number of samples, at least 1.
        batch_size: int. Number of examples in a batch. Default None, for 32. A dataset yields
            batches, so it must be None there.
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
            weights yet; if an argument is out of range; if `x` is empty or is not usable; if the
            outputs are not dense numbers, or if their shapes differ between batches.
        RuntimeError: Inside a `tf.function`.

    The model is traced at most once for each shape of a batch. Later calls use the same function,
    unless layers were added, removed, frozen or unfrozen, or `training` is another one. As in
    Keras's `predict`, other attributes that are changed after tracing, such as the rate of a
    `Dropout`, have no effect.

    Not supported:

    - Replicas of `tf.distribute`. The prediction runs on one device.
    - On Keras 2, restoring the generators of `keras.layers.Dropout` with `training=True`. Later
      dropout masks differ there.

    Example:
        >>> import keras, tfwd
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
            "predict_samples was called inside a tf.function; it loops over batches and draws in "
            "Python: call it outside"
        )
    n = _positive("n", n, "number of samples")
    drawing = _drawing(model)
    batches, count = _batches(x, batch_size)
    goal = None if count is None else count * n
    bar = keras.utils.Progbar(goal, verbose=_verbosity(verbose), unit_name="sample")
    means, deviations, samples = [], [], []  # of each batch
    structure: Any = None
    with _one_at_a_time:
        sampled = _Sampled(model, drawing, bool(training))
        with sampled.restored():
            for batch in batches:
                sums = _Sums(return_samples)
                sampled.begin()
                for _ in range(n):
                    structure = sampled.predict(batch)
                    sums.add([_dense(leaf) for leaf in tf.nest.flatten(structure)])
                    bar.add(1)
                means.append(sums.means())
                deviations.append(sums.deviations())
                samples.append(sums.samples())
    if not means:
        raise ValueError("x has no batches: a dataset must yield at least one batch")
    if goal is None:
        bar.update(len(means) * n, finalize=True)

    def joined(parts: list[list[np.ndarray]], axis: int) -> Any:
        whole = [_concatenated(leaves, axis) for leaves in zip(*parts, strict=True)]
        return tf.nest.pack_sequence_as(structure, whole)

    kept = joined(samples, 1) if return_samples else None
    return PredictedSamples(joined(means, 0), joined(deviations, 0), kept)


class _Sampled:
    """A model that predicts on the effective weights of its next training calls.

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
        """Restores seeds, counters and references after the body."""
        before = [_held(state) for state in self._states]
        try:
            with references.borrowed(self._model):
                yield
        finally:
            for state, value in zip(self._states, before, strict=True):
                state.assign(value)

    def begin(self) -> None:
        """Begins again with the first sample."""
        for draws, value in zip(self._draws, self._first, strict=True):
            draws.state.assign(value)


def _states(model: Any, draws: list[SeedStream]) -> list[Any]:
    """Returns the seeds and counters of a model, each once.

    Keras counts the states of its generators among `variables`, but not among `weights`.
    """
    weights = {id(v) for v in model.weights}
    states = [x.state for x in _keras.layers.all_layers(model) if isinstance(x, SeedStream)]
    states += [one.state for one in draws]  # those in place are not layers of the model
    states += [v for v in model.variables if id(v) not in weights]
    return list({id(state): state for state in states}.values())


class _Traced(NamedTuple):
    """A model's function, and all that it was traced with."""

    function: Callable[[Any], Any]
    flags: list[bool]
    objects: list[weakref.ref[Any]]

    def fits(self, flags: list[bool], objects: list[Any]) -> bool:
        """Returns True if a new function would be the same."""
        same = flags == self.flags and len(objects) == len(self.objects)
        return same and all(held() is one for held, one in zip(self.objects, objects, strict=True))


# The function of each model's last call. It holds neither the model nor its layers.
_traced: weakref.WeakKeyDictionary[Any, _Traced] = weakref.WeakKeyDictionary()


def _function(
    model: Any, training: bool, states: list[Any], found: list[Any]
) -> Callable[[Any], Any]:
    """Returns the function from a batch to the outputs in the next sample.

    It is the function of an earlier call, if the model still has the same layers.

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
    _traced[model] = _Traced(function, flags, [weakref.ref(one) for one in objects])
    return function


def _forward(model: Any, training: bool, states: list[Any]) -> Callable[[Any], Any]:
    held = weakref.ref(model)
    layers = _keras.layers.all_layers(model)
    normalizations = [type(x) for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    flag = {"training": training} if _keras.layers.accepts_training(model) else {}

    def forward(batch: Any) -> Any:
        frozen: Any = contextlib.nullcontext()
        if training and normalizations:
            kinds = map(_keras_calls.calls_of, normalizations)
            frozen = _keras_calls.intercepted(kinds, _in_evaluation)
        run: Any = held()  # a strong reference would keep the model in its own function
        with (
            _keras_calls.Discarded(states),
            _keras_calls.users_code(),
            sampled_calls.sampling(),
            frozen,
        ):
            return run(batch, **flag)

    return forward


def _in_evaluation(
    cls: type, layer: Any, own: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Calls a layer as in evaluation, whichever training flag it gets."""
    signature = inspect.signature(own)
    if "training" not in signature.parameters:
        return own(*args, **kwargs)
    given = signature.bind(*args, **kwargs)
    given.arguments["training"] = False
    return own(*given.args, **given.kwargs)


class _Sums:
    """Means and sums of squares of one batch, by Welford's method.

    Args:
        keeps: bool. Also keeps all samples.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps, self._count = keeps, 0
        self._kept: list[list[np.ndarray]] = []
        self._dtypes: list[Any] = []
        self._means: list[np.ndarray] = []
        self._squares: list[np.ndarray] = []

    def add(self, outputs: list[np.ndarray]) -> None:
        """Adds the outputs of one sample."""
        if not self._count:
            self._dtypes = [np.float64 if y.dtype == np.float64 else np.float32 for y in outputs]
            self._means = [np.zeros(y.shape) for y in outputs]
            self._squares = [np.zeros(y.shape) for y in outputs]
        self._count += 1
        if self._keeps:
            self._kept.append(outputs)
        for y, mean, squares in zip(outputs, self._means, self._squares, strict=True):
            before = y - mean  # in float64
            mean += before / self._count
            squares += before * (y - mean)

    def means(self) -> list[np.ndarray]:
        """Returns the mean of each output."""
        return [m.astype(dtype) for m, dtype in zip(self._means, self._dtypes, strict=True)]

    def deviations(self) -> list[np.ndarray]:
        """Returns the standard deviation of each output."""
        return [
            np.sqrt(squares / self._count).astype(dtype)
            for squares, dtype in zip(self._squares, self._dtypes, strict=True)
        ]

    def samples(self) -> list[np.ndarray]:
        """Returns all samples of each output, `[n, batch, ...]`."""
        return [np.stack(each) for each in zip(*self._kept, strict=True)]


def _held(variable: Any) -> np.ndarray:
    return _keras.variables.value(variable).numpy()


def _positive(name: str, value: Any, what: str) -> int:
    """Returns an argument as an int.

    Raises:
        ValueError: If it is not an integer of at least 1.
    """
    try:
        number = 0 if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}={value!r}: expected an integer of at least 1, the {what}")
    return number


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
            f"'{model.name}' has {what}, so all its samples would be equal: apply one that draws, "
            "as in tfwd.parametrize(model, {'kernel': Dropout(0.5)})"
        )
    return found


def _batches(x: Any, batch_size: Any) -> tuple[Iterator[Any], int | None]:
    """Returns an iterator over batches of inputs, and their number if it is known."""
    if isinstance(x, (tf.data.Dataset, _keras.layers.Datasets)):
        if batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size!r}: expected None, because a {type(x).__name__} yields "
                "batches itself. Use dataset.batch(size) to make them"
            )
        return (_inputs(batch) for batch in _each(x)), _length(x)
    if isinstance(x, Iterator):
        raise ValueError(
            f"x is a {type(x).__name__}: expected arrays or a dataset. Make one with "
            "tf.data.Dataset.from_generator"
        )
    size = 32 if batch_size is None else _positive("batch_size", batch_size, "examples of a batch")
    if any(t is not None and 0 in np.shape(t)[:1] for t in tf.nest.flatten(x)):
        raise ValueError("x has no examples: its first axis is empty")
    data = Data.of(x, None, None)
    if any(isinstance(t, tf.SparseTensor) for t in tf.nest.flatten(data.x)):
        raise ValueError(
            "x has a SparseTensor, which cannot be divided into batches: pass a dataset, as "
            "tf.data.Dataset.from_tensor_slices(x).batch(size)"
        )
    count = int(data.size)
    starts = range(0, count, size)
    parts = (data.part(start, min(size, count - start)).x for start in starts)
    return parts, math.ceil(count / size)


def _each(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, tf.data.Dataset):
        return iter(dataset)
    return (dataset[i] for i in range(len(dataset)))


def _length(dataset: Any) -> int | None:
    """Returns the number of batches, or None if it is not known.

    Raises:
        ValueError: If it is infinite.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return len(dataset)
    length = int(dataset.cardinality())
    if length == tf.data.INFINITE_CARDINALITY:
        raise ValueError("x is an infinite dataset: take a part of it, as dataset.take(100)")
    return None if length < 0 else length


def _inputs(batch: Any) -> Any:
    """Returns the inputs of a batch of a dataset, as tensors. Targets and weights are dropped."""
    x = keras.utils.unpack_x_y_sample_weight(batch)[0]
    return Data.of(x, None, None).x


def _dense(output: Any) -> np.ndarray:
    """Returns an output as an array.

    Raises:
        ValueError: If it is not a dense tensor of real numbers with examples.
    """
    kind = type(output).__name__
    if isinstance(output, tf.Tensor):
        real = output.dtype.is_floating or output.dtype.is_integer or output.dtype.is_bool
        if real and output.shape.rank:
            return output.numpy()
        kind = f"tensor of dtype {output.dtype.name} and shape {tuple(output.shape)}"
    raise ValueError(
        f"the model returns a {kind}; samples need dense tensors of real numbers with the examples "
        "on the first axis: predict with a model that returns such outputs"
    )


def _concatenated(parts: tuple[np.ndarray, ...], axis: int) -> np.ndarray:
    """Returns the whole of several batches.

    Raises:
        ValueError: If the batches have other shapes than one another.
    """
    shapes = {part.shape[axis + 1 :] for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"the outputs of the batches differ in shape: {' and '.join(map(str, sorted(shapes)))} "
            "for each example. Pad all batches of x to one length, or predict them one by one"
        )
    return np.concatenate(parts, axis)
