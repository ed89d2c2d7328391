"""Everything that depends on which Keras is running: Keras 3, or 2.15 with tensorflow-addons.

Keras offers no public way to run a layer on other values of its variables, to read the flags of the
call that is under way, or to follow the updates of an optimizer. What there is, is private or
nearly so; it is used in `tfwd._keras3` and `tfwd._keras2` and nowhere else, under the same names,
which this module gives out: those of layers and variables by themselves, and those of layers'
calls, of layers around layers, of convolutions, of optimizers that others hold, of `fit` and its
backups, of updates and of the steps of a training loop as the modules `calls`, `wrapping`,
`convolutions`, `held`, `training`, `backup`, `updates` and `steps`. What is alike on both is in
`tfwd._keras_shared`. No other file asks which Keras it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from tfwd._keras_shared.patching import patched
from tfwd._keras_shared.scopes import present_graph

GENERATION = int(keras.__version__.partition(".")[0])
IS_KERAS_2 = GENERATION == 2

if not IS_KERAS_2 and keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"tfwd needs Keras on TensorFlow, but Keras runs on {keras.backend.backend()!r}: set "
        "KERAS_BACKEND=tensorflow before the first import of keras"
    )

if IS_KERAS_2 and not TYPE_CHECKING:
    from tfwd._keras2 import (
        backup,
        calls,
        convolutions,
        held,
        ops,
        steps,
        training,
        updates,
        wrapping,
    )
    from tfwd._keras2.configs import deserialize, is_absent, keeps_sharing, serialize
    from tfwd._keras2.copies import clone, is_layer_graph, share, tie
    from tfwd._keras2.layers import (
        CallState,
        Datasets,
        KerasTensor,
        Perturbs,
        accepts_training,
        add_loss,
        all_layers,
        awaits_call,
        build,
        build_by_call,
        build_from_config,
        builds_by_shape,
        embedding_matrix,
        floating_policy,
        get_mask,
        has_default_build,
        has_weights,
        is_altered,
        is_quantized,
        own_weights,
        set_mask,
        sublayers,
    )
    from tfwd._keras2.recurrent import Loop, call_with_loop, has_plain_loop, reset_states
    from tfwd._keras2.substitution import Substitution
    from tfwd._keras2.variables import (
        SeedState,
        assign,
        cast_as_read,
        checkpoint,
        constant,
        dtype_name,
        is_variable,
        name,
        original,
        path,
        paths,
        read,
        tf_variable,
        tf_variables,
        value,
    )
    from tfwd._keras2.wrapper import OptimizerWrapper
else:
    from keras import ops

    from tfwd._keras3 import backup, calls, convolutions, held, steps, training, updates, wrapping
    from tfwd._keras3.configs import deserialize, is_absent, keeps_sharing, serialize
    from tfwd._keras3.copies import clone, is_layer_graph, share, tie
    from tfwd._keras3.layers import (
        CallState,
        Datasets,
        KerasTensor,
        Perturbs,
        accepts_training,
        add_loss,
        all_layers,
        awaits_call,
        build,
        build_by_call,
        build_from_config,
        builds_by_shape,
        embedding_matrix,
        floating_policy,
        get_mask,
        has_default_build,
        has_weights,
        is_altered,
        is_quantized,
        own_weights,
        set_mask,
        sublayers,
    )
    from tfwd._keras3.recurrent import Loop, call_with_loop, has_plain_loop, reset_states
    from tfwd._keras3.substitution import Substitution
    from tfwd._keras3.variables import (
        SeedState,
        assign,
        cast_as_read,
        checkpoint,
        constant,
        dtype_name,
        is_variable,
        name,
        original,
        path,
        paths,
        read,
        tf_variable,
        tf_variables,
        value,
    )
    from tfwd._keras3.wrapper import OptimizerWrapper

__all__ = [
    "GENERATION",
    "IS_KERAS_2",
    "CallState",
    "Datasets",
    "KerasTensor",
    "Loop",
    "OptimizerWrapper",
    "Perturbs",
    "SeedState",
    "Substitution",
    "accepts_training",
    "add_loss",
    "all_layers",
    "assign",
    "awaits_call",
    "backup",
    "build",
    "build_by_call",
    "build_from_config",
    "builds_by_shape",
    "call_with_loop",
    "calls",
    "cast_as_read",
    "checkpoint",
    "clone",
    "constant",
    "convolutions",
    "deserialize",
    "dtype_name",
    "embedding_matrix",
    "floating_policy",
    "get_mask",
    "has_default_build",
    "has_plain_loop",
    "has_weights",
    "held",
    "is_absent",
    "is_altered",
    "is_layer_graph",
    "is_quantized",
    "is_variable",
    "keeps_sharing",
    "name",
    "ops",
    "original",
    "own_weights",
    "patched",
    "path",
    "paths",
    "present_graph",
    "read",
    "reset_states",
    "serialize",
    "set_mask",
    "share",
    "steps",
    "sublayers",
    "tf_variable",
    "tf_variables",
    "tie",
    "training",
    "updates",
    "value",
    "wrapping",
]
