"""Wrappers around the running call: nested wrappers apply one chain to a weight.

During its call an outer wrapper lists its parametrizations by weight. An inner wrapper on the same
weight starts from the raw value, and applies the whole chain.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import keras
import tensorflow as tf

from tfwd.parametrizations import chain
from tfwd.parametrizations.chain import BoundParametrization


class OuterWrapper(NamedTuple):
    """The parametrizations of one wrapper around the running call, by the variables' ids.

    Attributes:
        raw: Raw values of the weights.
        bound: Parametrizations of the weights, with their seeds.
        taken: Variables whose raw value an inner wrapper has read.
        references: Values of the references, of this wrapper and of inner wrappers.
        addition_number: Number of the parametrization in place. None for a wrapper.
    """

    raw: dict[int, tf.Tensor]
    bound: dict[int, BoundParametrization]
    taken: dict[int, keras.Variable]
    references: dict[int, tf.Tensor]
    addition_number: int | None

    def references_of(self, key: int) -> list[int]:
        """Returns the ids of the references that the parametrization of a weight uses."""
        ids = {id(tensor): i for i, tensor in self.references.items()}
        return [ids[id(tensor)] for tensor in self.bound[key].references]


_local = threading.local()


def present() -> list[OuterWrapper]:
    """Returns the wrappers around the running call. The outermost wrapper comes first."""
    return getattr(_local, "wrappers", [])


def present_chain(variable: keras.Variable) -> list[BoundParametrization]:
    """Returns the parametrizations of a variable that act in the running call, in order."""
    key = id(variable)
    wrappers = reversed(present())
    return chain.in_order([(w.addition_number, w.bound[key]) for w in wrappers if key in w.bound])


@contextlib.contextmanager
def within(wrappers: list[OuterWrapper]) -> Iterator[None]:
    """Lists the wrappers around the calls in the body."""
    before = present()
    _local.wrappers = wrappers
    try:
        yield
    finally:
        _local.wrappers = before
