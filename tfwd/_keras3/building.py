"""Builds layers by a call whose result is discarded."""

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
    """Builds the layers in `layer` in the body as if there were no inner scopes.

    `compute_output_spec` calls a layer in a scratch graph and in a `StatelessScope`. There Keras
    refuses to create a variable from a value, which stateful recurrent layers do for their states.
    A layer is built from shapes alone, so it needs neither the graph nor the scope.
    """
    around = _global_state.get_global_attribute(_SCOPE)
    builds = {}
    for inner in layer._flatten_layers():
        build = vars(inner).get("build")  # Keras wraps it on the instance
        is_default = keras.src.utils.python_utils.is_default
        if build is not None and not inner.built and not is_default(build):
            builds[inner] = build, _outside(build, around)
    for inner, (_, outside) in builds.items():
        # `object.__setattr__` avoids Keras's tracking of attributes.
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
            # In a scope that already existed, variables are created at the end of that scope.
            with tf.init_scope() if around is None else contextlib.nullcontext():
                build(*args, **kwargs)
        finally:
            _global_state.set_global_attribute(_SCOPE, within)

    return outside
