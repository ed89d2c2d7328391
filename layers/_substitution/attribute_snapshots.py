"""Snapshots of layers' attributes. A trace or a second run restores them."""

from __future__ import annotations

import contextlib
import operator
import random
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from tfwd import _keras
from tfwd._graph import private_graph_apis

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class AttributeSnapshot:
    """The current attributes of a layer and of all layers in it.

    Lists and dicts are stored by reference: their contents may change.

    Args:
        owner: Layer.
    """

    def __init__(self, owner: keras.Layer) -> None:
        self._noted = [(layer, dict(vars(layer))) for layer in _keras.layers.all_layers(owner)]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the stored attributes in the body, and the present attributes after it."""
        changed = []
        for layer, noted in self._noted:
            now = vars(layer)
            same = len(now) == len(noted) and all(map(operator.is_, now.values(), noted.values()))
            if not same or now.keys() != noted.keys():
                changed.append((now, dict(now)))
                now.clear()
                now.update(noted)
        try:
            yield
        finally:
            for now, before in changed:
                now.clear()
                now.update(before)

    @contextlib.contextmanager
    def undoing_changes(self) -> Iterator[None]:
        """Undoes changes that the body makes to the layers' attributes.

        It restores symbolic tensors, plain values such as call counts, and the states of NumPy's
        and Python's random generators. It keeps other objects that a layer creates in its first
        call.
        """
        generators = [
            value.bit_generator
            for _, noted in self._noted
            for value in noted.values()
            if isinstance(value, np.random.Generator)
        ]
        states = [generator.state for generator in generators]
        of_numpy, of_python = np.random.get_state(), random.getstate()
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)
            for generator, state in zip(generators, states, strict=True):
                generator.state = state
            for layer, noted in self._noted:
                _undo(vars(layer), noted)


def _undo(now: dict[str, Any], noted: dict[str, Any]) -> None:
    for name, value in list(now.items()):
        before = noted.get(name, now)
        counted = isinstance(value, _PLAIN) and isinstance(before, _PLAIN)
        if value is before or not (counted or private_graph_apis.is_of_scratch(value)):
            continue
        if name in noted:
            now[name] = before
        else:
            del now[name]
