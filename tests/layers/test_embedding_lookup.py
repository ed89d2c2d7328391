"""Wrapped embeddings: rows of the effective table, without the whole table."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, quick_rows

from tfwd import _keras, layers
from tfwd import parametrizations as P

pytestmark = pytest.mark.usefixtures("all_large")

# Only Keras 3 counts negative ids from the end.
IDS = tf.constant([[3, 0, 7], [3, 7 if IS_KERAS_2 else -1, 2]])

WRAPPERS = {
    "dropout": lambda e: layers.WeightDropout(e, 0.5, seed=1),
    "noise": lambda e: layers.VariationalNoise(e, 0.3, seed=1),
    "rows": lambda e: layers.WeightDropout(e, 0.5, noise_shape=(None, 1), seed=1),
    "columns": lambda e: layers.WeightDropout(e, 0.5, noise_shape=(1, None), seed=1),
    "chain": lambda e: layers.Parametrized(
        e, {"embeddings": P.Chain([P.GaussianNoise(0.3), P.Dropout(0.5)])}, seed=1
    ),
    "nested": lambda e: layers.WeightDropout(layers.VariationalNoise(e, 0.3, seed=2), 0.5, seed=1),
    "around rows": lambda e: layers.VariationalNoise(
        layers.DropoutEmbedding(8, 4, 0.5, seed=2), 0.3, seed=1
    ),
    "a norm": lambda e: layers.Parametrized(
        e, {"embeddings": P.Chain([P.Dropout(0.5), P.WeightNorm(0)])}, seed=1
    ),
}


class Halved(P.Dropout):
    """A subclass with another formula, which its base class's lookup does not know."""

    def __call__(self, weight, seed):
        return 0.5 * super().__call__(weight, seed)


def test_a_subclass_with_another_formula_has_no_rows_by_its_base_class() -> None:
    layer = layers.Parametrized(keras.layers.Embedding(8, 4), Halved(0.5), seed=1)
    layer(IDS)
    (table,) = layer.get_weights()
    found = layer(IDS, training=True)
    kept = found.numpy() != 0.0
    assert 0.2 < kept.mean() < 0.8
    np.testing.assert_allclose(found, np.where(kept, table[IDS.numpy() % 8], 0.0), rtol=1e-6)


# Each wrapper in two of the four ways, in turn.
WAYS = [
    (kind, traced, recomputed)
    for number, kind in enumerate(WRAPPERS)
    for traced, recomputed in ((True, number % 2 == 0), (False, number % 2 == 1))
]


@quick_rows(
    "dropout-*",
    "noise-False-*",
    "rows-*",
    "columns-False-*",
    "chain-False-*",
    "nested-True-*",
    "a norm-False-*",
)
@pytest.mark.parametrize(("kind", "traced", "recomputed"), WAYS)
def test_rows_and_gradients_equal_the_effective_tables(
    kind: str, traced: bool, recomputed: bool
) -> None:
    layer = WRAPPERS[kind](keras.layers.Embedding(8, 4))
    layer.recompute = recomputed
    layer(IDS)
    (table,) = (_keras.variables.tf_variable(w) for w in layer.weights)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            rows = layer(IDS, training=True)
            loss = tf.reduce_sum(tf.sin(rows))
        return rows, tf.convert_to_tensor(tape.gradient(loss, table))

    (effective,) = layer.effective_weights(0).values()
    rows, gradient = tf.function(step)() if traced else step()
    expected = tf.gather(effective, IDS % 8)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-6)
    assert layer.calls == 1
    if kind in ("dropout", "rows", "columns"):
        scale = tf.cast(effective != 0.0, tf.float32) * 2.0
        summed = tf.math.unsorted_segment_sum(
            tf.reshape(tf.cos(expected), [-1, 4]), tf.reshape(IDS % 8, [-1]), 8
        )
        np.testing.assert_allclose(gradient, scale * summed, rtol=1e-5)


@quick_rows("dropout", "chain")
@pytest.mark.parametrize("kind", ["dropout", "noise", "rows", "chain"])
def test_the_gradient_stays_sparse(kind: str) -> None:
    layer = WRAPPERS[kind](keras.layers.Embedding(8, 4))
    layer.build((None, 3))
    for traced in (False, True):

        def gradient() -> tf.IndexedSlices:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(IDS, training=True))
            return tape.gradient(loss, _keras.variables.tf_variable(layer.weights[0]))

        found = tf.function(gradient)() if traced else gradient()
        assert isinstance(found, tf.IndexedSlices)
        assert found.values.shape == [6, 4]


@quick_rows("dropout", "chain")
@pytest.mark.parametrize("kind", ["dropout", "noise", "chain", "nested"])
def test_nothing_of_the_size_of_the_table_is_computed(kind: str) -> None:
    """Checks that nothing as large as the table is computed, after pruning."""
    layer = WRAPPERS[kind](keras.layers.Embedding(997, 4))
    layer.build((None, 3))

    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            rows = layer(IDS, training=True)
            loss = tf.reduce_sum(rows)
        gradient = tape.gradient(loss, _keras.variables.tf_variable(layer.weights[0]))
        return rows, gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient

    graph = step.get_concrete_function().graph
    seen, todo = set(), [output.op for output in graph.outputs]
    while todo:
        operation = todo.pop()
        if operation not in seen:
            seen.add(operation)
            todo += [t.op for t in operation.inputs]
    large = {op.type for op in seen for t in op.outputs if t.shape == [997, 4]}
    if kind == "nested":  # whose gradient goes through the outer wrapper's
        large -= {"IdentityN", "PartitionedCall", "StatefulPartitionedCall"}
    assert large <= {"ReadVariableOp", "Identity"}


def test_a_tensor_as_training_flag() -> None:
    layer = WRAPPERS["dropout"](keras.layers.Embedding(8, 4))
    layer.build((None, 3))
    raw = tf.gather(_keras.variables.tf_variable(layer.weights[0]), IDS % 8)

    @tf.function
    def call(training: tf.Tensor) -> tf.Tensor:
        return layer(IDS, training=training)

    np.testing.assert_array_equal(call(tf.constant(False)), raw)
    dropped = call(tf.constant(True))
    assert 0 < np.mean(dropped == 0.0) < 1


def test_masks_floats_and_policies_are_as_in_the_plain_layer() -> None:
    plain = keras.layers.Embedding(8, 4, mask_zero=True, dtype="mixed_bfloat16")
    layer = WRAPPERS["dropout"](plain)
    ids = tf.constant([[1.0, 0.0, 3.0]])
    outputs = layer(ids, training=True)
    assert outputs.dtype == tf.bfloat16
    np.testing.assert_array_equal(outputs._keras_mask, [[True, False, True]])


def test_a_subclass_with_a_call_of_its_own_is_called() -> None:
    class Scaled(keras.layers.Embedding):
        def call(self, inputs):
            return 3.0 * super().call(inputs)

    layer = layers.WeightDropout(Scaled(8, 4, embeddings_initializer="ones"), 0.5, seed=1)
    assert set(np.unique(layer(IDS, training=True))) == {0.0, 6.0}


def test_ragged_and_sparse_ids() -> None:
    layer = layers.WeightDropout(keras.layers.Embedding(10, 4), 0.4, seed=1)
    layer.build((None, None))
    ragged = tf.ragged.constant([[1, 2], [3]])
    (effective,) = layer.effective_weights(0).values()
    rows = layer(ragged, training=True)
    np.testing.assert_allclose(rows.to_tensor()[0], tf.gather(effective, [1, 2]), rtol=1e-6)
    assert layer(tf.sparse.from_dense([[1, 0, 2]]), training=True).shape == (1, 3, 4)
