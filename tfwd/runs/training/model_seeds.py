"""Seeds for the parts of a model."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np


def seeds(seed: int | None) -> Iterator[int]:
    """An endless row of seeds of 31 bits; `None` begins it from Keras's global seed.

    None of them is 0, which Keras's initializers take for no seed.

    Example:

    >>> first, second = seeds(1), seeds(1)
    >>> next(first) == next(second) > 0
    True
    """
    # keras.utils.set_random_seed sets Python's generator too; Keras takes its own seeds from it.
    generator = np.random.default_rng(random.randrange(2**31) if seed is None else seed)
    while True:
        yield int(generator.integers(1, 2**31 - 1))
