"""`moment_matching`: mean and standard deviation of a layer's outputs under weight dropout."""

from __future__ import annotations

from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfwd import _keras, dtypes
from tfwd._random import masks_and_normals, seeds
from tfwd.layers._substitution import keras_own_layers, method_hooks
from tfwd.layers._substitution.seed_stream import checked_seed
from tfwd.layers.parametrized import Parametrized
from tfwd.parametrizations import Dropout

_BLOCK = 1 << 20  # number of entries drawn at once (4 MB of float32)
_DRAWS = 16  # number of draws per block if the size of the batch is unknown
_KINDS = (keras.layers.Dense, keras.layers.EinsumDense)


class ActivationMoments(NamedTuple):
    """Moments of a layer's outputs over the masks of its kernel.

    Attributes:
        mean: Mean of each output.
        stddev: Standard deviation of each output.
    """

    mean: tf.Tensor
    stddev: tf.Tensor


def moment_matching(
    layer: keras.Layer, x: tf.Tensor, n: int = 1000, seed: int = 0
) -> ActivationMoments:
    """Returns mean and standard deviation of a layer's outputs over the masks of its kernel.

    Formula: the sum over many dropped weights is nearly normal. So a pre-activation
    `u = x w' + b`, with `w' = m w / keep` and `m_i ~ Bernoulli(keep)`, is replaced by draws of

        N(x w + b,  (1 - keep) / keep * x^2 w^2)

    with the same mean and variance. `n` draws of each unit go through the activation. The function
    returns the mean and the standard deviation of the `n` results. Without an activation the
    moments are exact, and nothing is drawn. The function never draws a mask. Masks per example and
    one mask per batch give the same result, because each output has the same distribution.

    Args:
        layer: Built `WeightDropout` or `Parametrized` layer around a `Dense` or an `EinsumDense`
            layer. The kernel must be its only parametrized weight. The last parametrization must be
            `Dropout` without a noise shape. Earlier parametrizations must act in evaluation, as
            `WeightNorm` does. The rate is the rate of the next training call.
        x: Floating tensor, the layer's inputs.
        n: int. Number of draws, at least 2. The standard error of the mean is `stddev / sqrt(n)`.
            Default 1000, as in the paper.
        seed: int. From 0 to 2^63 - 1. Equal calls with equal seeds return equal results. Default 0.

    Returns:
        `ActivationMoments` of the layer's output shape, in float32, or in float64 if the layer
        computes in it. The mean replaces the outputs of a hidden layer at test time.

    Raises:
        ValueError: If the layer is not such a layer, or has no weights yet; if `n` is not an
            integer of at least 2; if the seed is out of range.

    Example:
        >>> import keras, tensorflow as tf, tfwd
        >>> from tfwd import layers
        >>> inner = keras.layers.Dense(2, "relu", kernel_initializer="ones")
        >>> dropped = layers.WeightDropout(inner, 0.5)
        >>> x = tf.ones([1, 100])
        >>> plain = dropped(x)
        >>> moments = tfwd.moment_matching(dropped, x)
        >>> [round(float(value)) for value in (moments.mean[0, 0], moments.stddev[0, 0])]
        [100, 10]

    References: Wan et al., "Regularization of Neural Networks using DropConnect" (2013), section
    3.2 and algorithm 2. Departures: the paper never divides by `keep`; here kept weights are
    divided by `keep` in training, so the mean kernel is the raw kernel. The paper applies the
    method to one layer before the softmax, and returns only the mean.
    """
    dropout, kernel = _dropped_kernel(layer)
    if isinstance(n, bool) or not isinstance(n, int) or n < 2:
        raise ValueError(f"n must be an integer of at least 2, the number of draws; got {n!r}")
    root = checked_seed(seed)
    if root is None:
        raise ValueError("seed must be an integer from 0 to 2^63 - 1, got None")
    plain: Any = layer.layer
    wide = dtypes.wide(tf.as_dtype(plain.compute_dtype))
    x, kernel = tf.cast(x, wide), tf.cast(kernel, wide)
    rate = dropout.at(tf.cast(layer.calls, tf.int64)).rate
    keep = tf.cast(masks_and_normals.keep_probability(rate), wide)
    mean, squares = _product(plain, x, kernel), _product(plain, x**2, kernel**2)
    if plain.bias is not None:
        mean += tf.cast(_keras.variables.value(plain.bias), wide)
    stddev = tf.sqrt((1.0 - keep) / keep * squares)
    if plain.activation in (None, keras.activations.linear):
        return ActivationMoments(mean, stddev)
    return _estimate(plain.activation, mean, stddev, n, root)


def _product(layer: Any, x: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
    if isinstance(layer, keras.layers.EinsumDense):
        return tf.einsum(layer.equation, x, kernel)
    return tf.einsum("...x,xy->...y", x, kernel)


def _dropped_kernel(layer: Any) -> tuple[Dropout, tf.Tensor]:
    """Returns the dropout of a layer's kernel, and the kernel that is dropped."""
    found = f"'{getattr(layer, 'name', layer)}' of type {type(layer).__name__}"
    expected = "moment_matching expects WeightDropout around a Dense or EinsumDense layer"
    if not isinstance(layer, Parametrized):
        hint = ""
        if isinstance(layer, keras.layers.Layer) and method_hooks.hook_of(layer) is not None:
            hint = (
                ". A layer that was parametrized in place is not supported: call tfwd.parametrize "
                "without in_place=True, or wrap the layer"
            )
        raise ValueError(f"{expected}; got {found}{hint}")
    plain: Any = layer.layer
    if not any(keras_own_layers.is_plain(plain, kind) for kind in _KINDS):
        raise ValueError(
            f"{expected} of Keras, without LoRA, quantization or an activity regularizer; the "
            f"layer inside {found} is '{plain.name}' of type {type(plain).__name__}"
        )
    if not _keras.layer_building.has_weights(plain):
        raise ValueError(f"layer {found} has no weights yet: build it or call it first")
    targeted = layer._targeted()
    kernel = _keras.variables.original(plain.kernel)
    if [target.variable for target, _ in targeted] != [kernel]:
        names = ", ".join(target.name for target, _ in targeted)
        raise ValueError(f"{expected} that drops only the kernel; layer {found} changes {names}")
    last: Any
    *before, last = targeted[0][1].elements()
    fits = type(last) is Dropout and last.noise_shape is None
    if not fits or any(element.stochastic for element in before):
        raise ValueError(
            f"{expected}, whose last parametrization is Dropout without a noise shape and whose "
            "earlier parametrizations act in evaluation; "
            f"layer {found} applies {targeted[0][1]!r}"
        )
    return last, layer._evaluation_weights()[0][1]


def _estimate(
    activation: Any, mean: tf.Tensor, stddev: tf.Tensor, n: int, root: int
) -> ActivationMoments:
    """Returns the moments of `activation(N(mean, stddev^2))`, from draws in blocks."""
    size = mean.shape.num_elements()
    each = min(n, max(1, _BLOCK // size) if size else _DRAWS)
    shape = tf.shape(mean)

    def block(index: tf.Tensor, count: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the mean of `count` results, and the sum of their squared deviations from it."""
        seed = seeds.seed(root, 0, index)
        normal = tf.random.stateless_normal(tf.concat([[count], shape], 0), seed, dtype=mean.dtype)
        # The draws are additional examples, so that the activation gets the layer's axes.
        drawn = tf.reshape(mean + stddev * normal, tf.concat([[-1], shape[1:]], 0))
        results = tf.reshape(tf.cast(activation(drawn), mean.dtype), tf.shape(normal))
        centre = tf.reduce_mean(results, 0)
        return centre, tf.reduce_sum(tf.square(results - centre), 0)

    def combined(count: Any, moments: Any, added_count: Any, added: Any) -> tuple:
        """Combines the moments of two sets of results (Chan et al., 1979)."""
        count, added_count = tf.cast(count, mean.dtype), tf.cast(added_count, mean.dtype)
        share, distance = added_count / (count + added_count), added[0] - moments[0]
        return (
            moments[0] + share * distance,
            moments[1] + added[1] + count * share * tf.square(distance),
        )

    def step(index: tf.Tensor, centre: tf.Tensor, squares: tf.Tensor) -> tuple:
        total = combined(index * each, (centre, squares), each, block(index, each))
        return index + 1, *(tf.ensure_shape(tensor, mean.shape) for tensor in total)

    first = (tf.ensure_shape(tensor, mean.shape) for tensor in block(tf.constant(0), each))
    index, centre, squares = tf.while_loop(
        lambda index, *_: index < n // each, step, (tf.constant(1), *first)
    )
    if rest := n % each:
        centre, squares = combined(n - rest, (centre, squares), rest, block(index, rest))
    return ActivationMoments(centre, tf.sqrt(squares / n))
