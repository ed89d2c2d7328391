"""Attention's scores, with the mask inside the product, against plain TensorFlow operations."""

import numpy as np
import pytest
import tensorflow as tf

from tfwd.layers import transformer as T
from tfwd.layers.transformer.masked_attention_scores import masked_scores

RNG = np.random.default_rng(0)
SHAPE = (2, 3, 7, 7)  # of the scores
MASKS = {
    "padding": np.arange(7) < [[7], [4]],
    "a row without any key": np.arange(7) < [[3], [0]],
    "one mask for the batch": np.arange(7)[None] < 5,
    "by query": np.tril(np.ones((2, 7, 7), bool)),
}
QUERIES, KEYS, VALUES, UPSTREAM = (RNG.normal(size=(2, 3, 7, 4)).astype("float32") for _ in "qkvu")
BIAS = RNG.normal(size=(1, 3, 7, 7)).astype("float32")


def plain_scores(queries, keys, mask):
    where = mask[:, None, None] if mask.ndim == 2 else mask[:, None]
    scores = tf.einsum("bhqs,bhks->bhqk", queries, keys)
    return scores + tf.where(tf.constant(where), tf.zeros([], scores.dtype), scores.dtype.min)


def attended(scores_of, mask, queries, keys):
    bias, values = (tf.cast(x, queries.dtype) for x in (BIAS, VALUES))
    return tf.nn.softmax(scores_of(queries, keys, mask) + bias) @ values


def ours(queries, keys, mask):
    return masked_scores(queries, keys, tf.constant(mask))


def first_and_second(scores_of, mask, dtype):
    """Returns the results, their gradients, and the gradients of the gradients' squares."""
    inputs = [tf.cast(QUERIES, dtype), tf.cast(KEYS, dtype)]
    with tf.GradientTape() as outer:
        outer.watch(inputs)
        with tf.GradientTape() as inner:
            inner.watch(inputs)
            result = attended(scores_of, mask, *inputs)
        gradients = inner.gradient(result, inputs, tf.cast(UPSTREAM, dtype))
        squares = tf.add_n([tf.reduce_sum(g**2) for g in gradients])
    return [result, *gradients, *outer.gradient(squares, inputs)]


@pytest.mark.parametrize("run", [lambda f: f, tf.function])
@pytest.mark.parametrize("name", MASKS)
def test_results_and_gradients_are_those_of_an_added_mask(name, run):
    mask = MASKS[name]
    exact = first_and_second(plain_scores, mask, "float64")
    found = run(lambda: first_and_second(ours, mask, "float64"))()
    for one, other in zip(found, exact, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-12)
    # In float32, processors differ in the last bits. A result may be no further from the exact one
    # than a few times the error of plain operations.
    found = run(lambda: first_and_second(ours, mask, "float32"))()
    plain = first_and_second(plain_scores, mask, "float32")
    for three in zip(found, plain, exact, strict=True):
        one, other, truth = (x.numpy() for x in three)
        error = np.abs(other - truth).max() + 1e-6 * np.abs(truth).max()
        assert np.abs(one - truth).max() < 4 * error


def test_a_row_without_any_key_weighs_all_the_same():
    large = tf.constant(QUERIES) * 1e14  # the scores vanish beside the bias
    scores = masked_scores(large, large, tf.zeros((2, 7), tf.bool))
    np.testing.assert_array_equal(scores, tf.fill(SHAPE, scores[0, 0, 0, 0]))
    np.testing.assert_allclose(tf.nn.softmax(scores), np.full(SHAPE, 1 / 7), rtol=1e-6)


def test_tangents_and_vectorized_maps():
    mask, direction = MASKS["padding"], tf.constant(UPSTREAM)

    def results(scores_of):
        queries = tf.constant(QUERIES)
        with tf.autodiff.ForwardAccumulator(queries, direction) as tangent:
            result = attended(scores_of, mask, queries, tf.constant(KEYS))
        with tf.GradientTape() as tape:
            tape.watch(queries)
            sums = tf.reduce_sum(attended(scores_of, mask, queries, tf.constant(KEYS)), [0, 2, 3])
        return tangent.jvp(result), tape.jacobian(sums, queries)

    for one, other in zip(results(ours), results(plain_scores), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


# Operations that do not compute a tensor: they pass it on, or make a constant that is not used.
FREE = ("Identity", "IdentityN", "Fill", "Placeholder", "Const", "StridedSlice", "SelectV2")


def passes(layer, mask, backward):
    """Returns the operations that write a tensor of the scores' shape."""
    x = tf.constant(RNG.normal(size=(2, 7, 12)).astype("float32"))

    @tf.function
    def step(x, mask):
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = layer(x, mask=mask)
        return tape.gradient(result, x) if backward else result

    layer(x)
    operations = step.get_concrete_function(x, mask).graph.get_operations()
    large = [op for op in operations if any(t.shape == SHAPE for t in op.outputs)]
    return [op.type for op in large if op.type not in FREE]


def test_the_mask_takes_no_pass_over_the_scores():
    layer = T.SelfAttention(3, 4, 12)
    mask = tf.constant(MASKS["padding"])
    product = "BatchMatMulV2"
    assert passes(layer, mask, False) == [product, "Softmax"]
    assert sorted(passes(layer, mask, True)) == sorted(
        [product, "Softmax", product, "Mul", "Sub", "Mul"]
    )
