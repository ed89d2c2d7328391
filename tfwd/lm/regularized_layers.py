"""Layers of the language model, with their regularization.

If its options are off, a function returns a plain Keras layer, or no layer. Each function takes the
same number of seeds, whether its options are on or off. An option therefore does not change the
initial weights or the draws of other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfwd import layers
from tfwd import parametrizations as P


def uniform(limit: float, seeds: Iterator[int]) -> keras.initializers.Initializer:
    """Returns a uniform initializer on (-limit, limit), with its own seed.

    Keras's initializers are functions of (seed, shape). With the same seed, two weights of the same
    shape would start with equal values.
    """
    return keras.initializers.RandomUniform(-limit, limit, seed=next(seeds))


def embedding(
    words: int, width: int, seeds: Iterator[int], options: Mapping[str, Any], **kwargs: Any
) -> keras.layers.Layer:
    """Returns an embedding that drops whole rows; without dropout if `embedding_dropout` is 0."""
    initializer = uniform(options["init_scale"], seeds)
    kwargs |= {"embeddings_initializer": initializer, "name": "embedding"}
    rate, seed = options["embedding_dropout"], next(seeds)
    if rate:
        return layers.DropoutEmbedding(words, width, rate, seed=seed, **kwargs)
    return keras.layers.Embedding(words, width, **kwargs)


def locked(rate: float, seeds: Iterator[int], **kwargs: Any) -> keras.layers.Layer | None:
    """Returns a dropout layer with one mask for all time steps, or `None` if the rate is 0."""
    seed = next(seeds)
    return layers.LockedDropout(rate, seed=seed, **kwargs) if rate else None


def lstm(
    units: int,
    seeds: Iterator[int],
    options: Mapping[str, Any],
    *,
    name: str,
    dtype: Any,
) -> keras.layers.Layer:
    """Returns an LSTM whose recurrent kernel is perturbed in training.

    The LSTM returns sequences and states. With both `variational_noise` and `weight_dropout` the
    noise is applied first, so that dropped weights are exactly zero. If both are 0, the LSTM is a
    plain `keras.layers.LSTM`.
    """
    limit = units**-0.5
    arguments: dict[str, Any] = {
        "kernel_initializer": uniform(limit, seeds),
        "recurrent_initializer": uniform(limit, seeds),
        "bias_initializer": uniform(limit, seeds),
        "unit_forget_bias": False,
        "return_sequences": True,
        "return_state": True,
        "dtype": dtype,
        "name": name,
    }
    draws: dict[str, Any] = {"seed": next(seeds), "recompute": options["recompute"]}
    noise, weight_dropout = options["variational_noise"], options["weight_dropout"]
    if not noise:
        if not weight_dropout:
            return keras.layers.LSTM(units, **arguments)
        return layers.WeightDropLSTM(units, weight_dropout=weight_dropout, **draws, **arguments)
    perturbation: P.Parametrization = P.GaussianNoise(noise, start_call=options["noise_start_step"])
    if weight_dropout:
        perturbation = P.Chain([perturbation, P.Dropout(weight_dropout)])
    return layers.Parametrized(
        keras.layers.LSTM(units, **arguments),
        {"recurrent_kernel": perturbation},
        name=f"perturbed_{name}",
        dtype=dtype,
        **draws,
    )
