"""The generator: it equals XXH32, and passes the tests of a generator."""

import math
import struct

import numpy as np
import pytest
import tensorflow as tf

from tfwd._random import seeds, xxh32

N = 1 << 16


def words(first: int = 0, seed: tuple[int, int] = (1, 2), n: int = N) -> np.ndarray:
    numbers = np.arange(first, first + n, dtype=np.uint64).astype(np.uint32)
    return xxh32.words([tf.constant(numbers)], tf.constant(seed, tf.int32)).numpy()


def bits(values: np.ndarray) -> np.ndarray:
    return np.unpackbits(values.view(np.uint8).reshape(-1, 4), axis=1)


def test_it_is_xxh32() -> None:
    """Checks random values and extreme values against the reference implementation."""
    xxhash = pytest.importorskip("xxhash")
    triples = np.random.default_rng(0).integers(0, 1 << 32, [300, 3])
    ends = [0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
    triples = np.concatenate([triples, [[a, b, c] for a in ends for b in ends for c in ends]])
    for counter, key, tail in triples.tolist():
        seed = np.array([key, tail], np.uint32).view(np.int32)
        (found,) = xxh32.words([tf.constant([counter], tf.uint32)], tf.constant(seed)).numpy()
        assert found == xxhash.xxh32_intdigest(struct.pack("<II", counter, tail), seed=key)


@pytest.mark.parametrize("shape", [(5,), (3, 4), (2, 3, 5), (), (1,), (7, 1), (0, 3)])
def test_counters_number_the_entries(shape: tuple[int, ...]) -> None:
    for given in (shape, tf.constant(shape, tf.int32)):
        total = sum(np.asarray(part, np.uint32) for part in xxh32.counters(given))
        expected = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
        np.testing.assert_array_equal(np.broadcast_to(total, shape), expected)


def test_few_counters_are_stored() -> None:
    assert sum(part.shape.num_elements() for part in xxh32.counters((3000, 2000))) == 5000


def test_rows_are_numbered_as_in_the_table() -> None:
    ids = tf.constant([[4, 0], [2, 4]])
    total = sum(np.asarray(part, np.uint32) for part in xxh32.counters((None, 3), ids))
    np.testing.assert_array_equal(total, np.arange(15).reshape(5, 3)[ids.numpy()])


def test_each_bit_is_set_half_of_the_time() -> None:
    rates = bits(words()).mean(axis=0)
    assert abs(rates - 0.5).max() < 5 * 0.5 / math.sqrt(N)


def run(counters: np.ndarray, *seed: np.uint32) -> np.ndarray:
    words = np.array(seed, np.uint32).view(np.int32)
    return xxh32.words([tf.constant(counters)], tf.constant(words)).numpy()


@pytest.mark.parametrize("what", ["counter", "key", "tail"])
def test_avalanche(what: str) -> None:
    """Checks that a flip of any input bit flips each output bit half of the time."""
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 1 << 32, 4096, dtype=np.uint32)
    for bit in range(32):
        flip = np.uint32(1 << bit)
        key, tail = rng.integers(0, 1 << 32, 2, dtype=np.uint32)

        before = run(counters, key, tail)
        if what == "counter":
            after = run(counters ^ flip, key, tail)
        elif what == "key":
            after = run(counters, key ^ flip, tail)
        else:
            after = run(counters, key, tail ^ flip)
        flipped = bits(before ^ after).mean(axis=0)
        assert abs(flipped - 0.5).max() < 6 * 0.5 / math.sqrt(4096)


def test_bytes_of_consecutive_counters_are_uniform() -> None:
    counts = np.bincount(words().view(np.uint8), minlength=256)
    expected = 4 * N / 256
    assert abs(np.sum((counts - expected) ** 2 / expected) - 255) < 5 * math.sqrt(2 * 255)


def test_pairs_of_neighbours_are_uniform() -> None:
    top = words() >> 28
    counts = np.bincount(top[:-1] * 16 + top[1:], minlength=256)
    expected = (N - 1) / 256
    assert abs(np.sum((counts - expected) ** 2 / expected) - 255) < 5 * math.sqrt(2 * 255)


def test_words_repeat_as_often_as_by_chance() -> None:
    """Checks the birthday count: of 2^16 words of 32 bits, N^2 / 2^33 = half a pair is equal."""
    repeated = sum(N - len(np.unique(words(seed=(i, 7)))) for i in range(40))
    assert abs(repeated - 20) < 5 * math.sqrt(20)


def test_one_sequence_is_not_another_one_shifted() -> None:
    """Checks that the seed's other half enters after mixing; an additive key alone would shift."""
    known = set(words(seed=(1, 2)).tolist())
    for call in range(20):
        a, b = seeds.seed(3, 0, call).numpy().tolist()
        common = known & set(words(seed=(a, b)).tolist())
        assert len(common) < 10  # by chance N^2 / 2^32 = 1
