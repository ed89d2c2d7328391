"""From which tensors another tensor is computed: compared with tensors whose numbers change."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tfwd._graph.tensor_origins import TensorOrigins

NAMES = "abc"
GIVEN = {name: np.arange(1.0, 4.0) + i for i, name in enumerate(NAMES)}


@tf.custom_gradient
def apart(x, y):
    """Returns two tensors. A graph then has an IdentityN of both."""
    return (x * 2.0, y + 1.0), lambda dx, dy: (dx * 2.0, dy)


def computed(a, b, c):
    """Returns tensors by the way in which they are computed."""
    shaped = tf.reshape(a + 1.0, tf.shape(b)) + tf.zeros_like(c)
    parts = tf.split(tf.concat([a * b, b], 0), 2)
    first, second = apart(a, b)
    return {
        "chain": tf.sqrt(tf.exp(a) + 1.0),
        "sum": a + c,
        "shape": shaped,
        "gathered": tf.gather(c, tf.argsort(a * b)),
        "parts": parts[0],
        "first": first,
        "second": second,
        "function": tf.function(lambda x: x * b)(c),
        "loop": tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * a), [0, b])[1],
        "branch": tf.cond(tf.reduce_sum(a) > 0.0, lambda: b * 2.0, lambda: b),
        "constant": tf.ones([3]) * 2.0,
        "again": tf.concat([shaped, c], 0)[:3],
    }


def changed_by(name):
    """Returns the tensors whose numbers change with one of the given tensors."""
    others = GIVEN | {name: -(GIVEN[name] ** 2)}
    before, after = (computed(*(tf.constant(one[n]) for n in NAMES)) for one in (GIVEN, others))
    return {key for key in before if not np.array_equal(before[key], after[key])}


def found_origins(given):
    origins = TensorOrigins()
    for name, tensor in given.items():
        origins.add(name, tensor)
    with origins.recorded():
        results = computed(*given.values())
    return {key: set(origins.of(tensor)) for key, tensor in results.items()}


@pytest.mark.parametrize("graph", [True, False])
def test_origins_are_the_tensors_that_change_a_result(graph):
    with tf.Graph().as_default() if graph else contextlib.nullcontext():
        found = found_origins({name: tf.constant(GIVEN[name]) for name in NAMES})
    # The numbers of 'c' are in the other half of this concatenation.
    assert found.pop("again") == {"a", "c"}
    if not graph:  # a condition in eager mode is code
        assert found.pop("branch") == {"b"}
    expected = {key: {name for name in NAMES if key in changed_by(name)} for key in found}
    assert expected["chain"] == {"a"}  # the inputs do change the results
    assert found == expected


def test_parts_of_sparse_and_ragged_tensors():
    sparse = tf.sparse.from_dense(tf.constant([[1.0, 0.0]]))
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    origins = TensorOrigins()
    origins.add("sparse", sparse)
    origins.add("ragged", ragged)
    with origins.recorded():
        both = tf.sparse.to_dense(sparse) + tf.reduce_sum(ragged)
        lengths = ragged.row_lengths() * 2
    assert origins.of(both) == ("ragged", "sparse")
    assert origins.of(lengths) == ("ragged",)


def test_a_tensor_with_two_names():
    origins = TensorOrigins()
    tensor = tf.constant(1.0)
    origins.add("x", tensor)
    origins.add("y", tensor)
    with origins.recorded():
        assert origins.of(tensor + 1.0) == ("x", "y")
