"""Samples that plain Keras models compute, with weights that are set by hand for each draw."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfwd
from tfwd import parametrizations as P

PERTURBED = {"kernel": P.Dropout(0.5), "all": P.GaussianNoise(0.3)}


def predicted(model: keras.Layer, x, n: int, *args, **options) -> tfwd.monte_carlo.PredictedSamples:
    return tfwd.predict_samples(model, x, n, *args, **{"verbose": 0, **options})


def wrappers(model: keras.Layer) -> list:
    inside = model._flatten_layers()
    return [x for x in inside if hasattr(x, "effective_weights")]


def by_hand(model: keras.Layer, plain: keras.Model, x, n: int) -> list[np.ndarray]:
    """Returns the outputs of the plain model on the weights of the next training calls.

    Args:
        model: model that draws. No layer may have two calls.
        plain: model on the same variables as `model`, without tfwd.
        x: inputs.
        n: number of samples.
    """
    raw = plain.get_weights()
    found = []
    for sample in range(n):
        values = [wrapper.effective_weights(wrapper.calls + sample) for wrapper in wrappers(model)]
        for wrapper, effective in zip(wrappers(model), values, strict=True):
            if isinstance(wrapper, keras.Model):  # the layer inside it has the same weights
                continue
            inner = getattr(wrapper, "layer", wrapper)
            # Names are unique ends of paths, in the order of the weights.
            left = list(effective.items())
            for variable in inner.weights:
                if left and variable.shape == left[0][1].shape and _fits(variable, left[0][0]):
                    variable.assign(left.pop(0)[1])
            assert not left
        found.append([np.asarray(y) for y in tf.nest.flatten(plain(x, training=False))])
        for variable, value in zip(plain.weights, raw, strict=True):
            variable.assign(value)
    return [np.stack(each) for each in zip(*found, strict=True)]


def _fits(variable, name: str) -> bool:
    return variable.name.partition(":")[0].rpartition("/")[2] == name.rpartition("/")[2]


def check_moments(result, samples: list[np.ndarray], rtol: float = 1e-5) -> None:
    """Checks mean, deviation and samples against samples that were computed by hand."""
    means, deviations = tf.nest.flatten(result.mean), tf.nest.flatten(result.stddev)
    for mean, deviation, found, expected in zip(
        means, deviations, tf.nest.flatten(result.samples), samples, strict=True
    ):
        assert found.shape == expected.shape and np.ptp(found, axis=0).max() > 0.01
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
        np.testing.assert_allclose(mean, expected.mean(0), rtol=rtol, atol=rtol)
        np.testing.assert_allclose(deviation, expected.std(0), rtol=10 * rtol, atol=rtol)
