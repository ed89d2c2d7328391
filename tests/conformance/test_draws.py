"""Training draws: new in every call, equal from one seed, at the right rate, and as announced."""

import itertools
import math

import keras
import numpy as np
import tensorflow as tf
from stack_marks import quick_rows

from conformance import harness
from conformance.table import CASES, IN_PLACE, NATURES, NOT_NOISE, STDDEV, Case

UNSEEDED = [case for case in CASES if case.row.name in ("Dense", "Bidirectional", "Embedding")]


@quick_rows(
    "Dense, dropout",
    "LSTM, dropout",
    "user's layer, *",
    "Bert, *",
    "Dense, patterns",
    "WeightDropLSTM",
    "DropoutEmbedding",
    "parametrize",
)
@harness.each_or_half([*NOT_NOISE, *IN_PLACE])
def test_the_same_seed_draws_the_same_whatever_was_built_between(case: Case) -> None:
    first = harness.built(case)
    for _ in range(3):
        case.row.make()
    keras.layers.Dense(2, name="other")(tf.ones([1, 1]))
    second = harness.built(case)
    # Training uses the announced weights, as the test after the next one shows.
    for _ in range(2 if case in NATURES else 0):
        outputs = [harness.run(layer, case, training=True) for layer in (first, second)]
        harness.assert_same(*outputs)
    third = harness.built(case, seed=harness.SEED + 1)
    first, second, third = (
        [list(harness.effective(layer, call).values()) for call in range(3)]
        for layer in (first, second, third)
    )
    harness.assert_same(second, first)
    assert harness.differ(first, third)


@harness.each(UNSEEDED)
def test_no_seed_differs_between_layers_and_follows_the_global_one(case: Case) -> None:
    def draw() -> list[dict]:
        keras.utils.set_random_seed(3)
        return [harness.effective(harness.built(case, seed=None), 0) for _ in range(2)]

    (one, two), again = draw(), draw()
    harness.assert_same([list(d.values()) for d in again], [list(one.values()), list(two.values())])
    assert harness.differ(list(one.values()), list(two.values()))


@harness.each_or_half([*CASES, *IN_PLACE])
def test_every_training_call_draws_the_weights_that_effective_weights_announces(case: Case) -> None:
    wrapped = harness.built(case)
    raw = harness.plain(case).get_weights()
    first, second = (harness.all_effective(wrapped, call) for call in range(2))
    for position in harness.effective(wrapped, 0):
        if raw[position].size < 8:  # two draws may be equal here
            continue
        draws = [raw[position], first[position], second[position]]
        assert all(harness.differ(*pair) for pair in itertools.combinations(draws, 2))
    for call in range(2):
        assert {inner.calls for inner in harness.perturbing(wrapped)} == {call}
        weights = harness.all_effective(wrapped, call)
        plain = harness.plain(case, weights)
        harness.copy_states(wrapped, plain)
        outputs = harness.run(wrapped, case, training=True)
        harness.assert_close(outputs, harness.run(plain, case, training=True), 1e-6)
        harness.assert_close(wrapped.losses, plain.losses, 1e-6)
        # Other variables that the call updates: statistics, seeds, recurrent states.
        harness.assert_close(harness.states(wrapped), harness.states(plain), 1e-6)
        given = set(harness.effective(wrapped, call))
        pairs = enumerate(zip(wrapped.weights, plain.weights, strict=True))
        moving = [pair for i, pair in pairs if not pair[0].trainable and i not in given]
        harness.assert_close([a for a, _ in moving], [b for _, b in moving], 1e-6)


@harness.each_or_half([*CASES, *IN_PLACE])
def test_the_rate_and_the_moments_are_right_within_five_sigma(case: Case) -> None:
    wrapped = harness.built(case)
    raw = [np.asarray(w) for w in wrapped.weights]
    draws: dict[int, list[np.ndarray]] = {}
    for call in range(12):
        for position, tensor in harness.effective(wrapped, call).items():
            draws.setdefault(position, []).append(tensor.numpy())
    assert set(draws) == set(harness.rates(case, wrapped))
    for position, rate in harness.rates(case, wrapped).items():
        values = np.stack(draws[position])
        if rate is None:
            _check_normal((values - raw[position]) / STDDEV)
        else:
            size = math.prod(case.mask_shape(raw[position].shape)) * len(values)
            dropped = np.mean(values == 0.0)
            assert abs(dropped - rate) < 5 * math.sqrt(rate * (1 - rate) / size)
            if case.name not in ("Dense, patterns", "WeightDropout of VariationalNoise"):
                kept = values != 0.0
                expected = np.broadcast_to(raw[position] / (1 - rate), values.shape)
                np.testing.assert_allclose(values[kept], expected[kept], rtol=1e-6)


def _check_normal(noise: np.ndarray) -> None:
    assert abs(noise.mean()) < 5 / math.sqrt(noise.size)
    assert abs(noise.var() - 1) < 5 * math.sqrt(2 / noise.size)
    assert len(np.unique(noise)) > 0.9 * noise.size
