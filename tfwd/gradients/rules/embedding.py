"""Rules for layers that use an embedding matrix: Embedding and TiedDense."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfwd import _keras, layers
from tfwd.gradients.embedding_gradients import Rows
from tfwd.gradients.gradient_forms import OuterProduct, size
from tfwd.gradients.recorded_pass import Call
from tfwd.gradients.rules.dense import bias, count, plain, positions
from tfwd.gradients.rules.registry import rule


@rule(keras.layers.Embedding)
def embedding(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes `z = E[i]`: row `i` gets the sum of the `d` of its positions."""
    if not plain(layer.embeddings) or not isinstance(inputs, tf.Tensor):
        return NotImplemented
    ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
    rows = _keras.ops.take(call.value(layer.embeddings), ids, axis=0)
    z = call.probe(tf.cast(rows, layer.compute_dtype))
    flat = tf.reshape(ids, [size(ids, 0), count(ids, 0)])
    call.use(layer.embeddings, z, lambda d: Rows(flat, positions(d), layer.input_dim))
    return z


@rule(layers.TiedDense)
def tied_dense(layer: Any, call: Call, inputs: tf.Tensor) -> Any:
    """Computes `z = x E^T + b`: E gets `sum_p d_p x_p^T`."""
    matrix = layer.embedding.embeddings
    if not plain(matrix):
        return NotImplemented
    table = tf.cast(call.value(matrix), layer.compute_dtype)
    flat = tf.reshape(inputs, [-1, layer.embedding.output_dim])
    logits = tf.matmul(flat, table, transpose_b=True)
    if layer.bias is not None:
        logits = tf.nn.bias_add(logits, call.value(layer.bias))
    leading = [size(inputs, axis) for axis in range(inputs.shape.rank - 1)]
    z = call.probe(tf.reshape(logits, [*leading, layer.embedding.input_dim]))
    call.use(matrix, z, lambda d: OuterProduct(positions(d), positions(inputs)))
    call.use(layer.bias, z, bias)
    return z
