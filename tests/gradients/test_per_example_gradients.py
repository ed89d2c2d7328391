"""The forms of per-example gradients against the full gradients in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tfwd.gradients import embedding_gradients, gradient_forms, shared_weights
from tfwd.gradients.gradient_forms import Materialized, OuterProduct, PerExampleGradient

RANDOM = np.random.default_rng(0)


def check(term: PerExampleGradient, each: np.ndarray) -> None:
    assert term.shape == each.shape[1:]
    np.testing.assert_allclose(term.gradients(), each, atol=1e-12)
    np.testing.assert_allclose(term.part(1, 2).gradients(), each[1:3], atol=1e-12)
    total, squares = term.sums(0.5)
    np.testing.assert_allclose(total, each.sum(0) / 2, atol=1e-12)
    np.testing.assert_allclose(squares, (each**2).sum(0) / 2, atol=1e-12)
    np.testing.assert_allclose(term.total(), each.sum(0), atol=1e-12)
    folded = each.reshape(2, 2, *each.shape[1:]).sum(1)
    np.testing.assert_allclose(term.folded(2).gradients(), folded, atol=1e-12)


@pytest.mark.parametrize("positions", [1, 2, 3, 5, 6, 7, 40])
def test_outer(positions: int) -> None:
    x, d = RANDOM.normal(size=(4, positions, 3)), RANDOM.normal(size=(4, positions, 2))
    check(OuterProduct(tf.constant(x), tf.constant(d)), np.einsum("bpi,bpo->bio", x, d))


@pytest.mark.parametrize("positions", [1, 4, 40])
def test_outer_in_groups_and_arranged(positions: int) -> None:
    x, d = RANDOM.normal(size=(4, positions, 2, 3)), RANDOM.normal(size=(4, positions, 2, 5))
    each = np.einsum("bpgi,bpgo->bgio", x, d)
    check(OuterProduct(tf.constant(x), tf.constant(d)), each)
    turned = OuterProduct(tf.constant(x), tf.constant(d), lambda g: tf.transpose(g, [0, 3, 1, 2]))
    check(turned, each.transpose(0, 3, 1, 2))


def test_rows_with_ids_that_repeat_and_count_from_the_end() -> None:
    ids = np.array([[1, 1, 3, 1], [0, -1, 0, 3], [2, 2, 2, 2], [3, 1, 0, 2]])
    d = RANDOM.normal(size=(4, 4, 2))
    each = np.zeros((4, 4, 2))
    for b in range(4):
        np.add.at(each[b], ids[b] % 4, d[b])
    check(embedding_gradients.Rows(tf.constant(ids), tf.constant(d), 4), each)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_forms, "BLOCK_BYTES", 4 * 6 * 2)  # two examples at a time
    x, d = RANDOM.normal(size=(7, 40, 3)), RANDOM.normal(size=(7, 40, 2))
    each = np.einsum("bpi,bpo->bio", x, d)
    term = OuterProduct(tf.constant(x), tf.constant(d))
    for found in (term.sums(), tf.function(lambda: term.sums())()):
        np.testing.assert_allclose(found[0], each.sum(0), atol=1e-12)
        np.testing.assert_allclose(found[1], (each**2).sum(0), atol=1e-12)


def test_uses_are_summed_before_they_are_squared() -> None:
    ids = tf.constant([[1, 1, 3], [0, 2, 0], [3, 3, 1], [2, 0, 2]])
    some = embedding_gradients.Rows(ids, tf.constant(RANDOM.normal(size=(4, 3, 2))), 4)
    outer = OuterProduct(
        tf.constant(RANDOM.normal(size=(4, 9, 4))), tf.constant(RANDOM.normal(size=(4, 9, 2)))
    )
    given = Materialized(tf.constant(RANDOM.normal(size=(4, 4, 2))))
    mask = tf.constant(RANDOM.normal(size=(4, 2)))
    for uses in (
        [(some, None), (outer, None)],
        [(some, mask), (outer, None)],
        [(some, mask), (outer, mask), (given, None)],
        [(some, None), (some, mask), (outer, None), (outer, None), (given, None)],
    ):
        each = sum(t.gradients() * (1 if scale is None else scale) for t, scale in uses)
        total, squares = shared_weights.sums([shared_weights.Scaled(*use) for use in uses], 0.25)
        np.testing.assert_allclose(total, tf.reduce_sum(each, 0) / 4, atol=1e-12)
        np.testing.assert_allclose(squares, tf.reduce_sum(each**2, 0) / 4, atol=1e-12)


def test_embedding_makes_nothing_of_the_size_of_batch_times_table() -> None:
    """Checks that no tensor in the graph of the moments has the table's rows for each example."""

    @tf.function
    def run(ids: tf.Tensor, d: tf.Tensor) -> tuple:
        return embedding_gradients.Rows(ids, d, 50_000).sums()

    graph = run.get_concrete_function(
        tf.TensorSpec([64, 32], tf.int32), tf.TensorSpec([64, 32, 16])
    ).graph
    sizes = [t.shape.num_elements() for op in graph.get_operations() for t in op.outputs]
    assert max(size for size in sizes if size is not None) <= 50_000 * 16
