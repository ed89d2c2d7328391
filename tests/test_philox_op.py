"""Philox against the published test vectors, by an independent implementation."""

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

from tfwd._random import philox_op, seeds

MASK = 0xFFFFFFFF


def block(counter: list[int], key: list[int]) -> list[int]:
    """Returns a block of Philox 4x32 with ten rounds (Salmon et al., 2011), by plain integers."""
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = right >> 32 ^ b ^ low, right & MASK, left >> 32 ^ d ^ high, left & MASK
        low, high = low + 0x9E3779B9 & MASK, high + 0xBB67AE85 & MASK
    return [a, b, c, d]


def stream(count: int, key: list[int], counter: int) -> np.ndarray:
    """Returns the first 32-bit words of the blocks from a counter of 128 bits on."""
    words: list[int] = []
    while len(words) < count:
        words += block([counter >> 32 * i & MASK for i in range(4)], [k & MASK for k in key])
        counter += 1
    return np.array(words[:count], np.uint32).view(np.int32)


def test_the_reference_has_the_published_vectors() -> None:
    """Checks the vectors of the Random123 library, file kat_vectors."""
    assert block([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert block([MASK] * 4, [MASK] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert block(pi, [0xA4093822, 0x299F31D0]) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@quick_rows("*-eager", "*-graph", "key1-*-XLA")
@pytest.mark.parametrize("way", ["eager", "graph", "XLA"])
@pytest.mark.parametrize(
    ("key", "counter"),
    [
        ([1, 2], 0),
        ([-5, 7], 3 + (9 << 64)),
        ([-5, -7], (1 << 64) - 1 + (9 << 64)),
        ([(1 << 31) - 1, -(1 << 31)], (1 << 63) + (((1 << 64) - 1) << 64)),
    ],
)
def test_words_equal_the_reference(way: str, key: list[int], counter: int) -> None:
    halves = tf.constant([counter & (1 << 64) - 1, counter >> 64], tf.uint64)
    for shape, dtype in (([11], tf.int32), ([3, 5], tf.int32), ([4, 3], tf.int64)):

        def draw(key: tf.Tensor, shape: list = shape, dtype: tf.DType = dtype) -> tf.Tensor:
            return philox_op.random_words(shape, philox_op.key_of(key), halves, dtype)

        if way != "eager":
            draw = tf.function(draw, jit_compile=way == "XLA")
        found = draw(tf.constant(key, tf.int32))
        assert found.dtype == dtype and found.shape == shape
        expected = stream(int(np.prod(shape)) * dtype.size // 4, key, counter)
        np.testing.assert_array_equal(found.numpy().ravel().view(np.int32), expected)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("root", [0, 7, -1, (1 << 63) - 1])
def test_seeds_are_words_of_the_roots_stream(root: int, compiled: bool) -> None:
    key = [root & MASK, root >> 32 & MASK]
    draw = tf.function(seeds.seed, jit_compile=True) if compiled else seeds.seed
    for position, call, replica in ((0, 0, 0), (3, 1, 2), (1, (1 << 45) + 5, 7)):
        start = call + (replica << 48) << 64
        expected = stream(2 * position + 2, key, start)[2 * position :]
        np.testing.assert_array_equal(draw(root, position, call, replica), expected)


@pytest.mark.parametrize("compiled", [False, True])
def test_folds_are_blocks_from_the_far_end(compiled: bool) -> None:
    fold = tf.function(seeds.fold_in, jit_compile=True) if compiled else seeds.fold_in
    for seed, high, low in (([1, 2], 0, 1), ([-5, 7], 3, -1), ([-1, -1], (1 << 63) - 1, 1 << 40)):
        counter = (low & (1 << 64) - 1) + ((-1 - high & (1 << 64) - 1) << 64)
        found = fold(tf.constant(seed, tf.int32), tf.constant(high, tf.int64), low)
        np.testing.assert_array_equal(found, stream(2, seed, counter))
