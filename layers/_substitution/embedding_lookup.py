"""Perturbs only the rows of an embedding table that a call looks up.

A lookup takes a few rows of a table that may be larger than the rest of the model. A
parametrization that treats each entry separately can be applied to the raw rows alone. Each row
gets the same draw as in the whole table. The effective table is never computed, and the gradient of
the table stays sparse as in a plain embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, training_flag
from tfwd.layers._substitution.substituted_call import SubstitutedCall
from tfwd.layers._substitution.weight_selection import TargetedWeights
from tfwd.parametrizations import chain


def is_possible(
    layer: keras.Layer, targeted: TargetedWeights, args: tuple, kwargs: Mapping[str, Any]
) -> bool:
    """Returns True if a lookup can avoid computing the effective table.

    Args:
        layer: Layer that does a plain lookup.
        targeted: Parametrized weights.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    given = (*args, *kwargs.values())
    return (
        len(given) == 1
        and not isinstance(given[0], (tf.RaggedTensor, tf.SparseTensor))
        and [target.variable for target, _ in targeted] == layer.weights
        and all(element.by_rows for _, p in targeted for element in p.elements())
    )


def looked_up_rows(call: SubstitutedCall, layer: keras.layers.Embedding, ids: Any) -> tf.Tensor:
    """Returns the looked-up rows of the effective table.

    Args:
        call: Call with the table as its only parametrized weight.
        layer: Embedding layer.
        ids: Integers of any shape `[...]`. Negative ids count from the end, as in Keras.

    Returns:
        `[..., output_dim]` in the layer's compute dtype.
    """
    ids = tf.convert_to_tensor(ids)
    ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
    variable = call.targeted[0][0].variable
    raw = call.raw(variable)
    rows = _keras.ops.take(raw, ids, axis=0)
    positions = tf.where(ids < 0, ids + layer.input_dim, ids)

    def perturbed(training: bool) -> tf.Tensor:
        (bound,) = call.chains(training, call.seeds)
        if not all(e.by_rows for b in bound for e in b.parametrization.elements()):
            return _keras.ops.take(chain.apply(raw, bound), ids, axis=0)
        return chain.apply(rows, bound, positions, raw)

    found = _keras.variables.cast_as_read(
        variable, training_flag.call_with_bool(call.training, perturbed)
    )
    result = tf.cast(found, layer.compute_dtype)
    _keras.layer_wrappers.mark(layer, ids, result)
    return result
