"""Seeds for the layers and draws of a model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np


def layer_seeds(seed: int | None) -> Iterator[int]:
    """Yields an endless sequence of 31-bit seeds. `None` starts from Keras's global seed.

    No seed is 0, because Keras's initializers treat 0 as no seed.

    Example:
    >>> first, second = layer_seeds(1), layer_seeds(1)
    >>> next(first) == next(second) > 0
    True
    """
    # keras.utils.set_random_seed also sets Python's generator, from which Keras takes its own
    # seeds.
    generator = np.random.default_rng(random.randrange(2**31) if seed is None else seed)
    while True:
        yield int(generator.integers(1, 2**31 - 1))
