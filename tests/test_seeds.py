"""Seeds are pure functions of all arguments of a draw, and of nothing else."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas

from tfwd._random import philox_op, seeds


def as_tuple(seed: tf.Tensor) -> tuple[int, int]:
    return tuple(int(x) for x in seed)


def test_a_seed_is_two_int32() -> None:
    seed = seeds.seed(1, position=2, call=3, replica=4)
    assert seed.dtype == tf.int32
    assert seed.shape == [2]


def test_all_combinations_have_seeds_of_their_own() -> None:
    every = itertools.product((0, 1, 2, 1 << 40), (0, 1, 2), (0, 1, 2, 1 << 33), (0, 1, 2))
    found = {as_tuple(seeds.seed(*arguments)) for arguments in every}
    assert len(found) == 4 * 3 * 4 * 3


@pytest.mark.parametrize("which", range(4))
def test_arguments_do_not_stand_for_one_another(which: int) -> None:
    """Checks that `(a, b)`, `(b, a)` and arguments with equal sums give different draws."""
    arguments = [3, 3, 3, 3]
    more, less = list(arguments), list(arguments)
    more[which] += 1
    less[(which + 1) % 4] += 1
    assert as_tuple(seeds.seed(*more)) != as_tuple(seeds.seed(*less))


@pytest.mark.parametrize("root", [0, 7, -1, 1 << 31, (1 << 63) - 1])
@pytest.mark.parametrize("call", [0, 5, (1 << 31) + 3, 1 << 45])
def test_integers_tensors_and_graphs_give_the_same(root: int, call: int) -> None:
    expected = as_tuple(seeds.seed(root, 2, call, 1))
    tensors = (tf.constant(root, tf.int64), 2, tf.constant(call, tf.int64), tf.constant(1))
    assert as_tuple(seeds.seed(*tensors)) == expected
    signature = [tf.TensorSpec([], tf.int64)] * 2
    traced = tf.function(lambda r, c: seeds.seed(r, 2, c, 1), input_signature=signature)
    assert as_tuple(traced(tensors[0], tensors[2])) == expected


@pytest.mark.parametrize("positions", [range(5), [3], [100], [90, 2, 90]])
def test_seeds_of_several_positions_equal_the_single_seeds(positions: Sequence[int]) -> None:
    several = seeds.seeds(tf.constant([7, 3], tf.int64), 1, positions)
    for position, found in zip(positions, several, strict=True):
        assert as_tuple(found) == as_tuple(seeds.seed(7, position, 3, 1))


def test_folds_are_distinct_and_none_of_the_seeds_own_words() -> None:
    seed = tf.constant([3, 4])
    found = {as_tuple(seeds.fold_in(seed, a, b)) for a in range(4) for b in range(4)}
    words = tf.reshape(
        philox_op.random_words([8, 2], philox_op.key_of(seed), tf.zeros([2], tf.uint64)), [-1, 2]
    )
    assert len(found | {as_tuple(pair) for pair in words}) == 16 + 8


def test_retracing_changes_nothing() -> None:
    count = 0

    @tf.function(reduce_retracing=False)
    def draw(x: tf.Tensor, call: tf.Tensor) -> tf.Tensor:
        nonlocal count
        count += 1
        tf.random.uniform([])  # what a global counter of operations would notice
        return seeds.seed(5, 0, call) + tf.cast(0.0 * tf.reduce_sum(x), tf.int32)

    found = {as_tuple(draw(tf.ones([n]), tf.constant(9))) for n in (1, 2, 3)}
    assert count == 3
    assert found == {as_tuple(seeds.seed(5, 0, 9))}


def test_the_global_seed_plays_no_part() -> None:
    found = set()
    for seed in (1, 2):
        tf.random.set_seed(seed)
        found.add(as_tuple(seeds.seed(5, 0, 9)))
    assert len(found) == 1


def test_the_values_do_not_change_between_releases() -> None:
    """Checks fixed values: a checkpoint must continue with the same draws in later versions."""
    assert as_tuple(seeds.seed(7, position=1, call=0)) == PINNED


PINNED = (490388034, 367897730)


def test_bits_of_the_seeds_of_successive_calls_are_fair_and_independent() -> None:
    """Checks that each bit is set half of the time, and flips half of the time between calls."""
    draw = tf.function(lambda calls: tf.map_fn(lambda c: seeds.seed(3, 1, c), calls))
    words = draw(tf.range(2000)).numpy().view(np.uint32)
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1).astype(float)
    sigma = 0.5 / np.sqrt(len(bits))
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * sigma
    assert np.abs(np.abs(np.diff(bits, axis=0)).mean(axis=0) - 0.5).max() < 5 * sigma


@pytest.mark.parametrize("argument", range(4))
def test_a_flipped_bit_of_any_argument_flips_half_of_the_seed(argument: int) -> None:
    flipped = []
    for bit in range(16):  # as many as a replica's number has
        arguments = [11, 12, 13, 14]
        before = seeds.seed(*arguments).numpy().view(np.uint32)
        arguments[argument] ^= 1 << bit
        after = seeds.seed(*arguments).numpy().view(np.uint32)
        flipped.append(np.unpackbits((before ^ after).view(np.uint8)).sum())
    assert abs(np.mean(flipped) - 32) < 5 * np.sqrt(64 * 0.25 / len(flipped))


def test_outside_of_a_strategy_the_replica_is_zero() -> None:
    assert int(seeds.replica_id()) == 0


def test_replica_ids_under_a_strategy() -> None:
    strategy = two_replicas()
    found = strategy.run(tf.function(lambda: tf.convert_to_tensor(seeds.replica_id())))
    assert [int(x) for x in strategy.experimental_local_results(found)] == [0, 1]
