"""Builds the layers of the language model, each with its regularisation or, if that is off, plain.

A part takes its seeds from one row of them, and as many whether its options are on or off: so a
switch does not move the initial weights or the draws of the other parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras

from tfwd import layers
from tfwd import parametrizations as P


def uniform(limit: float, row: Iterator[int]) -> keras.initializers.Initializer:
    """Uniform in (-limit, limit), with a seed of its own.

    Keras's initializers are functions of (seed, shape): of one seed, two weights of one shape
    would begin equal.
    """
    return keras.initializers.RandomUniform(-limit, limit, seed=next(row))


def embedding(
    words: int, width: int, row: Iterator[int], options: Mapping[str, Any], **kwargs: Any
) -> keras.layers.Layer:
    """An embedding that drops whole rows; a plain one if `embedding_dropout` is 0."""
    initializer = uniform(options["init_scale"], row)
    kwargs |= {"embeddings_initializer": initializer, "name": "embedding"}
    rate, seed = options["embedding_dropout"], next(row)
    if rate:
        return layers.DropoutEmbedding(words, width, rate, seed=seed, **kwargs)
    return keras.layers.Embedding(words, width, **kwargs)


def locked(rate: float, row: Iterator[int], **kwargs: Any) -> keras.layers.Layer | None:
    """A dropout with one mask for all time steps; `None` if the rate is 0."""
    seed = next(row)
    return layers.LockedDropout(rate, seed=seed, **kwargs) if rate else None


def lstm(
    units: int,
    row: Iterator[int],
    options: Mapping[str, Any],
    *,
    name: str,
    dtype: Any,
) -> keras.layers.Layer:
    """An LSTM that returns sequences and states, its recurrent kernel perturbed in training.

    With both `variational_noise` and `weight_dropout` the noise comes first, so that what is
    dropped is exactly zero. With neither it is a plain `keras.layers.LSTM`.
    """
    limit = units**-0.5
    arguments: dict[str, Any] = {
        "kernel_initializer": uniform(limit, row),
        "recurrent_initializer": uniform(limit, row),
        "bias_initializer": uniform(limit, row),
        "unit_forget_bias": False,
        "return_sequences": True,
        "return_state": True,
        "dtype": dtype,
        "name": name,
    }
    draws: dict[str, Any] = {"seed": next(row), "recompute": options["recompute"]}
    noise, weight_dropout = options["variational_noise"], options["weight_dropout"]
    if not noise:
        if not weight_dropout:
            return keras.layers.LSTM(units, **arguments)
        return layers.WeightDropLSTM(units, weight_dropout=weight_dropout, **draws, **arguments)
    perturbation: P.Parametrization = P.GaussianNoise(noise, start_step=options["noise_start_step"])
    if weight_dropout:
        perturbation = P.Chain([perturbation, P.Dropout(weight_dropout)])
    return layers.Parametrized(
        keras.layers.LSTM(units, **arguments),
        {"recurrent_kernel": perturbation},
        name=f"perturbed_{name}",
        dtype=dtype,
        **draws,
    )
