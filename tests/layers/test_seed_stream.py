"""The state of the draws: it counts training calls, is saved, and is no weight."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

from tfwd.layers._substitution.seed_stream import SeedStream


def test_only_training_calls_are_counted() -> None:
    draws = SeedStream(7)
    found = [int(draws.next(training)[1]) for training in (True, False, True, True)]
    assert found == [0, 1, 1, 2]
    assert draws.calls == 3
    assert int(draws.next()[0]) == 7


def test_a_tensor_flag_is_counted_in_the_graph() -> None:
    draws = SeedStream(7)
    count = tf.function(lambda t: draws.next(t)[1], input_signature=[tf.TensorSpec([], tf.bool)])
    found = [int(count(tf.constant(t))) for t in (True, False, True)]
    assert found == [0, 1, 1]


def test_it_is_a_variable_and_no_weight() -> None:
    draws = SeedStream(7)
    assert draws.weights == []
    # Keras 2 knows no variables but weights.
    assert [id(v) for v in draws.variables] == ([] if IS_KERAS_2 else [id(draws.state)])


def test_large_numbers() -> None:
    draws = SeedStream((1 << 63) - 1)
    draws.state.assign(np.array([(1 << 63) - 1, 1 << 40]))
    assert draws.calls == 1 << 40
    assert int(draws.next()[0]) == (1 << 63) - 1


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, "x", True])
def test_a_wrong_seed_is_an_error(seed) -> None:
    with pytest.raises(ValueError, match="seed must be None or an integer from 0 to 2\\^63 - 1"):
        SeedStream(seed)


def test_no_seed_follows_keras() -> None:
    def roots() -> list[int]:
        keras.utils.set_random_seed(3)
        return [int(SeedStream(None).next()[0]) for _ in range(3)]

    assert roots() == roots()
    assert len(set(roots())) == 3


def test_store_round_trip_and_a_store_of_a_plain_layer() -> None:
    draws, other = SeedStream(7), SeedStream(8)
    draws.next()
    store: dict = {}
    draws.save_own_variables(store)
    other.load_own_variables(store)
    np.testing.assert_array_equal(other.state, [7, 1])
    other.load_own_variables({})
    np.testing.assert_array_equal(other.state, [7, 1])


def test_threads_take_numbers_of_their_own() -> None:
    draws = SeedStream(seed=1)

    def take(_: int) -> int:
        return int(draws.next()[1])

    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(take, range(400)))
    assert sorted(numbers) == list(range(400))
