"""BERT of given sizes with random weights, and its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

VOCABULARY, LONGEST = 30522, 512


class Sizes(NamedTuple):
    """Sizes of a BERT."""

    layers: int
    width: int
    heads: int
    wide: int


MINI_LM = Sizes(6, 384, 12, 1536)
BASE = Sizes(12, 768, 12, 3072)


def data(texts: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids and a mask, which is 1 at positions without padding.

    Args:
        texts: Number of texts, and number of positions in each text.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(1, VOCABULARY, texts).astype("int32")
    lengths = rng.integers(texts[1] * 3 // 5, texts[1] + 1, texts[0])
    mask = np.arange(texts[1]) < lengths[:, None]
    return ids * mask, mask.astype("int32")


def ours(
    sizes: Sizes, texts: tuple[int, int], dropout: float = 0.0
) -> tuple[Any, Callable[..., Any]]:
    """Returns tfwd's model, and a function that computes its outputs on the texts.

    Args:
        sizes: Sizes of the model.
        texts: Number of texts, and number of positions in each text.
        dropout: Rate of hidden dropout and of attention dropout.

    Returns:
        The built model, and a function `call(training, model=model)`. Its `model` may be a wrapper
        of the built model.
    """
    import tensorflow as tf

    from tfwd.layers import transformer

    ids, mask = map(tf.constant, data(texts))
    bert = transformer.Bert(
        VOCABULARY,
        sizes.width,
        sizes.layers,
        sizes.heads,
        sizes.wide,
        max_length=LONGEST,
        dropout=dropout,
        attention_dropout=dropout,
    )
    bert(ids)
    return bert, lambda training, model=bert: model(ids, mask=mask, training=training)
