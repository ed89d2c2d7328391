"""Optimizers inside optimizers, as Keras's optimizers need it beyond their public API."""

from __future__ import annotations

from tfwd._keras2.held import (
    accumulates,
    chain,
    has_learning_rate,
    initial_rate,
    is_built_for,
    key,
    leaf_of,
    learning_rate,
    leaves,
    name,
    own_decay,
    revived,
)
from tfwd._keras2.wrapper import Wrapper

__all__ = [
    "Wrapper",
    "accumulates",
    "chain",
    "has_learning_rate",
    "initial_rate",
    "is_built_for",
    "key",
    "leaf_of",
    "learning_rate",
    "leaves",
    "name",
    "own_decay",
    "revived",
]
