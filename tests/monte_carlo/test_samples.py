"""`predict_samples` against plain Keras models whose weights are set by hand for each draw."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from monte_carlo_tools import PERTURBED, by_hand, check_moments, predicted, wrappers
from small_models import ALL, X
from stack_marks import extended, quick_rows

import tfwd
from tfwd import layers
from tfwd import parametrizations as P


@quick_rows("small-subclassed", "large-nested")
@pytest.mark.parametrize("kind", ["sequential", "nested", "subclassed"])
def test_samples_equal_a_loop_over_effective_weights(kind: str, size: str) -> None:
    plain = ALL[kind]()
    model = tfwd.parametrize(plain, PERTURBED, seed=3)
    model(X, training=True)  # the first sample is not call 0
    expected = by_hand(model, plain, X, 4)
    for batch_size in (None, 3):
        result = predicted(model, X.numpy(), 4, batch_size, return_samples=True)
        check_moments(result, expected)
    assert {int(wrapper.calls) for wrapper in wrappers(model)} == {1}


def recurrent() -> keras.Sequential:
    return keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            layers.DropoutEmbedding(10, 4, 0.25, mask_zero=True, seed=1),
            layers.WeightDropLSTM(4, return_sequences=True, seed=2),
            keras.layers.Bidirectional(layers.WeightDropLSTM(5, seed=3)),
            layers.WeightDropout(
                layers.VariationalNoise(keras.layers.Dense(3), 0.5, "all", seed=4), 0.5, seed=5
            ),
        ]
    )


def test_tfwds_layers_and_nested_wrappers_draw() -> None:
    ids = np.asarray([[1, 2, 3, 0], [4, 5, 9, 7], [2, 2, 0, 0]], "int32")
    model = recurrent()
    samples = predicted(model, ids, 3, 2, return_samples=True).samples
    embedding, lstm, both, dense = model.layers
    directions = [both.forward_layer, both.backward_layer]
    plain = tfwd.unwrap(model)  # plain Keras layers
    for sample in range(3):
        layers_and_weights = [
            (embedding, "embeddings"),
            (lstm, "recurrent_kernel"),
            *((direction, "recurrent_kernel") for direction in directions),
        ]
        drawn = [layer.effective_weights(sample)[name] for layer, name in layers_and_weights]
        # The inner wrapper's noise comes first, then the outer wrapper's dropout of the kernel.
        drawn += [*dense.layer.effective_weights(sample).values()]
        kernel = dense.effective_weights(sample)["kernel"]
        targets = [embedding.embeddings, lstm.cell.recurrent_kernel]
        targets += [direction.cell.recurrent_kernel for direction in directions]
        targets += [dense.layer.layer.kernel, dense.layer.layer.bias]
        raw = plain.get_weights()
        drawn[-2] = kernel
        for variable, value in zip(targets, drawn, strict=True):
            variable.assign(value)
        expected = np.asarray(plain(ids))
        plain.set_weights(raw)
        np.testing.assert_allclose(samples[sample], expected, rtol=1e-4, atol=1e-5)
    assert not np.allclose(samples[0], samples[1])


def test_a_layer_that_is_called_twice_draws_twice_for_each_sample() -> None:
    inputs = keras.Input((3,))
    shared = keras.layers.Dense(3, use_bias=False)
    model = tfwd.parametrize(
        keras.Model(inputs, shared(shared(inputs))), {"kernel": P.Dropout(0.5)}, seed=1
    )
    x = np.asarray(X[:5, :3])
    samples = predicted(model, x, 3, batch_size=2, return_samples=True).samples
    (wrapper,) = wrappers(model)
    for sample in range(3):
        one, two = (wrapper.effective_weights(2 * sample + k)["kernel"] for k in range(2))
        assert not np.array_equal(one, two)
        np.testing.assert_allclose(samples[sample], x @ one @ two, rtol=1e-5, atol=1e-6)


def test_other_uses_of_a_weight_read_the_raw_weight() -> None:
    embedding = keras.layers.Embedding(7, 4)
    inputs = keras.Input((), dtype="int32")
    hidden = layers.WeightDropout(embedding, 0.5, seed=1, name="dropped")(inputs)
    model = keras.Model(inputs, layers.TiedDense(embedding, use_bias=False)(hidden))
    ids = np.arange(7, dtype="int32")
    samples = predicted(model, ids, 3, return_samples=True).samples
    raw = np.asarray(embedding.embeddings)
    for sample in range(3):
        drawn = model.get_layer("dropped").effective_weights(sample)["embeddings"]
        np.testing.assert_allclose(samples[sample], drawn @ raw.T, rtol=1e-5, atol=1e-6)


def test_mixout_before_and_after_its_references_are_copied() -> None:
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model = tfwd.parametrize(plain, {"kernel": P.Mixout(0.5)}, seed=1)
    (wrapper,) = wrappers(model)
    first = predicted(model, X, 3)
    np.testing.assert_array_equal(first.stddev, np.zeros((8, 2)))  # nothing has moved yet
    np.testing.assert_allclose(first.mean, plain(X), rtol=1e-5, atol=1e-6)
    plain.layers[0].kernel.assign(np.ones((6, 2)))
    model(X, training=True)  # takes its references only now
    plain.layers[0].kernel.assign(np.full((6, 2), 3.0))
    assert set(np.unique(wrapper.effective_weights(1)["kernel"])) == {1.0, 5.0}
    check_moments(predicted(model, X, 3, return_samples=True), by_hand(model, plain, X, 3))


def test_a_rule_that_acts_in_evaluation_is_applied_too() -> None:
    given = {"kernel": P.Chain([P.GaussianNoise(0.5), P.WeightNorm()])}
    plain = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    model = tfwd.parametrize(plain, given, seed=1)
    check_moments(predicted(model, X, 3, return_samples=True), by_hand(model, plain, X, 3))


def test_several_threads_get_the_same_samples() -> None:
    model = tfwd.parametrize(ALL["sequential"](), PERTURBED, seed=3)
    expected = predicted(model, X, 10, 4).mean
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: predicted(model, X, 10, 4).mean, range(8)))
    for mean in found:
        np.testing.assert_allclose(mean, expected, rtol=1e-5, atol=1e-6)


def test_the_draws_depend_on_the_seed() -> None:
    plain = ALL["sequential"]()
    one, two, other = (
        predicted(tfwd.parametrize(plain, PERTURBED, seed=seed), X, 3).mean for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(one, two)
    assert np.abs(one - other).max() > 0.01


def test_a_rate_of_0_has_no_deviation_and_counts_calls() -> None:
    plain = ALL["sequential"]()
    model = tfwd.parametrize(plain, {"kernel": P.Dropout(0.0)}, seed=1)
    found = predicted(model, X, 3)
    np.testing.assert_array_equal(found.stddev, np.zeros((8, 2)))
    np.testing.assert_allclose(found.mean, plain(X), rtol=1e-5, atol=1e-6)


def test_a_wrapped_layer_alone() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(2), 0.5, seed=1)
    layer.build((None, 6))
    found = predicted(layer, X, 3, return_samples=True).samples
    for sample in range(3):
        kernel = layer.effective_weights(sample)["kernel"]
        np.testing.assert_allclose(found[sample], X @ kernel, rtol=1e-5, atol=1e-6)


@extended
def test_a_transformer() -> None:
    encoder = tfwd.layers.transformer.Bert(20, 8, 2, 2, 16, max_length=8, dropout=0.5)
    ids = np.arange(12, dtype="int32").reshape(3, 4)
    encoder(ids)
    wrapped = layers.WeightDropout(encoder, 0.25, "stack/.*/kernel", seed=1)
    check_moments(
        predicted(wrapped, ids, 3, 2, return_samples=True), by_hand(wrapped, encoder, ids, 3)
    )
