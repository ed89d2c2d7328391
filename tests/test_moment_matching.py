"""`moment_matching` against many samples with masks, and its errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import quick_rows

import tfwd
from tfwd import dropout_moment_matching, layers
from tfwd import parametrizations as P

K = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 300)).astype("float32")
RATE = 0.4
KEEP = round(0.6 * 65536) / 65536


def dropped(activation: str | None = "relu", **options) -> keras.Layer:
    """Returns a built layer with weights of its own."""
    inner = K.Dense(5, activation, bias_initializer=keras.initializers.Constant(0.3))
    options = {"per_example": True, **options}
    layer = layers.WeightDropout(inner, RATE, seed=1, **options)
    layer.build((None, 300))
    inner.kernel.assign(np.random.default_rng(1).normal(size=(300, 5)) / 15)
    return layer


def moments(*args, **options) -> dropout_moment_matching.ActivationMoments:
    found = tfwd.moment_matching(*args, **options)
    return dropout_moment_matching.ActivationMoments(found.mean.numpy(), found.stddev.numpy())


def samples(kernel: np.ndarray, n: int) -> np.ndarray:
    """Returns pre-activations `[n, examples, units]`, each with a mask of its own."""
    rng, found = np.random.default_rng(2), []
    for _ in range(n):
        masks = (rng.random((len(X), *kernel.shape)) < KEEP) / KEEP
        found.append(np.einsum("bi,bio->bo", X, kernel * masks) + 0.3)
    return np.stack(found)


SAMPLES = 3000
FUNCTIONS = {
    "relu": lambda z: np.maximum(z, 0),
    "tanh": np.tanh,
    "softmax": lambda z: np.exp(z) / np.exp(z).sum(-1, keepdims=True),
}


@pytest.fixture(scope="module")
def sampled() -> np.ndarray:
    return samples(np.random.default_rng(1).normal(size=(300, 5)) / 15, SAMPLES)


@quick_rows("relu-50", "softmax-1048576", "tanh-50")
@pytest.mark.parametrize("block", [1 << 20, 50])
@pytest.mark.parametrize("activation", FUNCTIONS)
def test_moments_equal_the_moments_of_samples(activation, block, sampled, monkeypatch) -> None:
    monkeypatch.setattr(dropout_moment_matching, "_BLOCK", block)
    n = 5001 if block == 50 else 20_000  # two draws in a block, and one in the last
    layer = dropped(activation)
    found = tf.function(lambda: tfwd.moment_matching(layer, X, n))()
    found = dropout_moment_matching.ActivationMoments(found.mean.numpy(), found.stddev.numpy())
    true = FUNCTIONS[activation](sampled)
    assert found.mean.shape == found.stddev.shape == (4, 5)
    error = true.std(0) * np.sqrt(1 / SAMPLES + 1 / n)
    # The normal distribution is an approximation; this allows 0.02 deviations for it.
    assert (abs(found.mean - true.mean(0)) < 5 * error + 0.02 * true.std(0)).all()
    spread = np.sqrt(1 / SAMPLES + 1 / n)  # of a deviation, relative, up to the kurtosis
    assert (abs(found.stddev / true.std(0) - 1) < 6 * spread + 0.02).all()
    plain = FUNCTIONS[activation](X @ np.asarray(dropped().layer.kernel) + 0.3)
    assert abs(plain - true.mean(0)).max() > 10 * error.min()  # so that the test can tell


def test_without_an_activation_the_moments_are_exact() -> None:
    layer = dropped(None)
    found = moments(layer, X, 2)
    x, w = X.astype("float64"), np.asarray(layer.layer.kernel, "float64")
    np.testing.assert_allclose(found.mean, x @ w + 0.3, rtol=1e-4, atol=1e-5)
    variance = (1 - KEEP) / KEEP * (x**2 @ w**2)
    np.testing.assert_allclose(found.stddev, np.sqrt(variance), rtol=1e-5)


def test_masks_of_the_batch_and_of_examples_have_the_same_moments() -> None:
    one, other = (tfwd.moment_matching(dropped(per_example=p), X, 50) for p in (True, False))
    np.testing.assert_array_equal(one.mean, other.mean)
    again = tfwd.moment_matching(dropped(), X, 50, seed=1)
    assert not np.array_equal(one.mean, again.mean)


def test_the_outputs_of_training_calls_have_these_moments() -> None:
    layer, calls = dropped("softplus"), 400
    run = tf.function(lambda x: layer(x, training=True))
    x = tf.repeat(tf.constant(X), 10, axis=0)  # ten masks in each call
    outputs = np.stack([run(x).numpy() for _ in range(calls)]).reshape(calls, 4, 10, 5)
    found = moments(layer, X, 20_000)
    spread = outputs.std((0, 2))
    assert (abs(outputs.mean((0, 2)) - found.mean) < 5 * spread / np.sqrt(10 * calls)).all()
    assert (abs(spread / found.stddev - 1) < 6 / np.sqrt(2 * 10 * calls) + 0.02).all()


def test_other_forms_of_layers(size: str) -> None:
    equation = K.EinsumDense("abc,cde->abde", output_shape=(None, 2, 3), bias_axes="de")
    layer = layers.WeightDropout(equation, RATE, seed=1)
    x = tf.constant(X[:, :12].reshape(2, 2, 12))
    layer(x)
    found = moments(layer, x)
    np.testing.assert_allclose(found.mean, equation(x), rtol=1e-4, atol=1e-5)
    w = np.asarray(equation.kernel, "float64")
    variance = (1 - KEEP) / KEEP * np.einsum("abc,cde->abde", x.numpy() ** 2.0, w**2)
    np.testing.assert_allclose(found.stddev, np.sqrt(variance), rtol=1e-4)

    chain = P.Chain([P.WeightNorm(gain=True), P.Dropout(lambda call: tf.constant(RATE))])
    layer = layers.Parametrized(K.Dense(3, dtype="mixed_float16"), {"kernel": chain})
    layer(X)
    layer.weights[2].assign([2.0, 1.0, 0.5])
    found = moments(layer, X)
    w = np.asarray(layer.weights[0], "float64")
    w = w / np.sqrt((w**2).sum(0)) * [2.0, 1.0, 0.5]
    assert found.mean.dtype == "float32"
    np.testing.assert_allclose(found.mean, X @ w, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(found.stddev, np.sqrt((1 - KEEP) / KEEP * (X**2 @ w**2)), rtol=1e-3)


def test_in_a_function_of_any_batch() -> None:
    layer = dropped()
    spec = tf.TensorSpec([None, 300], tf.float32)
    run = tf.function(lambda x: tfwd.moment_matching(layer, x, 2000), input_signature=[spec])
    found, eager = map(np.stack, (run(X), moments(layer, X, 2000)))
    assert (abs(found[0] - eager[0]) < 5 * np.sqrt(2 / 2000) * eager[1]).all()
    assert (abs(found[1] - eager[1]) < 0.1 * eager[1].max()).all()


WRONG = {
    "plain": (lambda: K.Dense(3), "expects WeightDropout around .* got 'dense' of type Dense"),
    "kind": (
        lambda: layers.WeightDropout(K.LSTM(3), RATE),
        "the layer inside 'weight_dropout' .* is 'lstm' of type LSTM",
    ),
    "nested": (
        lambda: layers.WeightDropout(layers.VariationalNoise(K.Dense(3), 0.1), RATE),
        "of type VariationalNoise",
    ),
    "noise": (lambda: layers.VariationalNoise(K.Dense(3), 0.1), "GaussianNoise"),
    "shape": (
        lambda: layers.WeightDropout(K.Dense(3), RATE, noise_shape=(None, 1)),
        "Dropout without a noise shape",
    ),
    "mixout": (lambda: layers.Mixout(K.Dense(3), RATE), "applies Mixout"),
    "bias": (
        lambda: layers.WeightDropout(K.Dense(3), RATE, weights=".*"),
        "that drops only the kernel; .* changes kernel, bias",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_layers_are_errors(name: str) -> None:
    make, message = WRONG[name]
    layer = make()
    layer.build((2, 6, 300) if name == "kind" else (2, 300))
    with pytest.raises(ValueError, match=message):
        tfwd.moment_matching(layer, X)


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="has no weights yet"):
        tfwd.moment_matching(layers.WeightDropout(K.Dense(3), RATE), X)
    layer = dropped()
    for n in (1, 0, 2.5, True, None):
        with pytest.raises(ValueError, match="n must be an integer of at least 2"):
            tfwd.moment_matching(layer, X, n)
    for seed in (-1, 1.5, None):
        with pytest.raises(ValueError, match="seed must be"):
            tfwd.moment_matching(layer, X, 10, seed)
