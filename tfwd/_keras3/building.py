"""Builds layers by a call whose result is thrown away."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state as _global_state

_SCOPE = "stateless_scope"


@contextlib.contextmanager
def building_outside(layer: keras.Layer) -> Iterator[None]:
    """Within it the layers in `layer` are built as they would be without the scopes inside it.

    `compute_output_spec` calls a layer in a graph that is thrown away, and in a `StatelessScope`,
    in which Keras refuses to make a variable of a value: a stateful recurrent layer makes its
    states so. A layer is built of shapes alone, so it needs neither the graph nor the scope.
    """
    around = _global_state.get_global_attribute(_SCOPE)
    builds = {}
    for inner in layer._flatten_layers():
        build = vars(inner).get("build")  # Keras wraps it on the instance
        is_default = keras.src.utils.python_utils.is_default
        if build is not None and not inner.built and not is_default(build):
            builds[inner] = build, _outside(build, around)
    for inner, (_, outside) in builds.items():
        # Past Keras's tracking of attributes, which has no business with functions.
        object.__setattr__(inner, "build", outside)
    try:
        yield
    finally:
        for inner, (build, outside) in builds.items():
            if vars(inner).get("build") is outside:
                object.__setattr__(inner, "build", build)


def _outside(build: Callable[..., None], around: Any) -> Callable[..., None]:
    @functools.wraps(build)
    def outside(*args: Any, **kwargs: Any) -> None:
        within = _global_state.get_global_attribute(_SCOPE)
        _global_state.set_global_attribute(_SCOPE, around)
        try:
            # What is built in a scope that was there before waits for the end of that scope.
            with tf.init_scope() if around is None else contextlib.nullcontext():
                build(*args, **kwargs)
        finally:
            _global_state.set_global_attribute(_SCOPE, within)

    return outside
