"""Compatibility layer: exports the modules of `tfwd._keras3` or of `tfwd._keras2`.

Keras has no public way to run a layer on other values of its variables, to read the flags of the
current call, or to follow the updates of an optimizer. Only these two packages use private
functions of Keras. Their modules and functions have the same names: `_keras.variables.value(v)` is
the value of a variable on both versions of Keras. `tfwd._keras_shared` has the code that both
packages share. No other file checks which version of Keras runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import tensorflow as tf

from tfwd._keras_shared.checkpoint_tracking import track, untrack
from tfwd._keras_shared.held_objects import held_by
from tfwd._keras_shared.keras_own_code import is_of_keras, is_own_step
from tfwd._keras_shared.layer_paths import path_below
from tfwd._keras_shared.method_replacement import Patch, calls_of, computed_loss, patched
from tfwd._keras_shared.names_in_code import names_in_code
from tfwd._keras_shared.strategy_workers import (
    gather_bytes,
    has_workers,
    is_chief,
    own_path,
    worker_count,
    worker_index,
)
from tfwd._keras_shared.substitution_scopes import present_graph
from tfwd._keras_shared.worker_lockstep import Lockstep

GENERATION = int(keras.__version__.partition(".")[0])
IS_KERAS_2 = GENERATION == 2
VERSIONS = {"TensorFlow": tf.__version__, "Keras": keras.__version__}

if not IS_KERAS_2 and keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"tfwd needs Keras on TensorFlow, but Keras runs on {keras.backend.backend()!r}: set "
        "KERAS_BACKEND=tensorflow before the first import of keras"
    )

if IS_KERAS_2 and not TYPE_CHECKING:
    from tfwd._keras2 import (
        call_interception,
        checkpointed_state,
        convolutions,
        copies,
        layer_building,
        layer_calls,
        layer_wrappers,
        layers,
        losses,
        multi_worker_fit,
        ops,
        recurrent_layers,
        substitution,
        training,
        update_interception,
        variables,
        wrapped_optimizers,
    )
else:
    from keras import ops

    from tfwd._keras3 import (
        call_interception,
        checkpointed_state,
        convolutions,
        copies,
        layer_building,
        layer_calls,
        layer_wrappers,
        layers,
        losses,
        multi_worker_fit,
        recurrent_layers,
        substitution,
        training,
        update_interception,
        variables,
        wrapped_optimizers,
    )

__all__ = [
    "GENERATION",
    "IS_KERAS_2",
    "VERSIONS",
    "Lockstep",
    "Patch",
    "call_interception",
    "calls_of",
    "checkpointed_state",
    "computed_loss",
    "convolutions",
    "copies",
    "gather_bytes",
    "has_workers",
    "held_by",
    "is_chief",
    "is_of_keras",
    "is_own_step",
    "layer_building",
    "layer_calls",
    "layer_wrappers",
    "layers",
    "losses",
    "multi_worker_fit",
    "names_in_code",
    "ops",
    "own_path",
    "patched",
    "path_below",
    "present_graph",
    "recurrent_layers",
    "substitution",
    "track",
    "training",
    "untrack",
    "update_interception",
    "variables",
    "worker_count",
    "worker_index",
    "wrapped_optimizers",
]
