"""Draws under tf.distribute: replicas differ unless they share, and weights stay mirrored."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas

from tfwd import _keras, layers


@pytest.fixture(scope="module")
def strategy() -> tf.distribute.MirroredStrategy:
    return two_replicas()


X = tf.eye(30)
WRAPPERS: dict[str, Callable[..., keras.Layer]] = {
    "WeightDropout": lambda **options: layers.WeightDropout(
        keras.layers.Dense(30, use_bias=False, kernel_initializer="ones"), 0.5, **options
    ),
    "VariationalNoise": lambda **options: layers.VariationalNoise(
        keras.layers.Dense(30, use_bias=False, kernel_initializer="ones"), 0.5, **options
    ),
}


def replicas(strategy: tf.distribute.Strategy, layer: keras.Layer) -> list[np.ndarray]:
    outputs = strategy.run(tf.function(lambda: layer(X, training=True)))
    return [x.numpy() for x in strategy.experimental_local_results(outputs)]


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_replicas_differ(strategy, kind: str, recompute: bool) -> None:
    with strategy.scope():
        layer = WRAPPERS[kind](seed=1, recompute=recompute)
        layer.build(X.shape)
    first, second = replicas(strategy, layer)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 5 / 30
    # Replica 0 draws what a single device would.
    np.testing.assert_allclose(first, layer.effective_weights(0)["kernel"], rtol=1e-6, atol=1e-6)
    assert layer.calls == 1


@pytest.mark.parametrize("kind", WRAPPERS)
def test_replicas_share_when_asked(strategy, kind: str) -> None:
    with strategy.scope():
        layer = WRAPPERS[kind](seed=1, share_across_replicas=True)
        layer.build(X.shape)
    for call in range(2):
        first, second = replicas(strategy, layer)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_allclose(
            first, layer.effective_weights(call)["kernel"], rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.DropoutEmbedding(30, 4, 0.5, seed=1, embeddings_initializer="ones"),
        lambda: layers.LockedDropout(0.5, seed=1),
        lambda: layers.WeightDropLSTM(8, weight_dropout=0.5, seed=1, return_sequences=True),
    ],
    ids=["DropoutEmbedding", "LockedDropout", "WeightDropLSTM"],
)
def test_replicas_of_the_other_layers_differ(strategy, make) -> None:
    with strategy.scope():
        layer = make()
        x = tf.ones([4, 5, 6])
        if isinstance(layer, keras.layers.Embedding):
            x = tf.range(30)[None]
        layer(x)
    outputs = strategy.run(tf.function(lambda: layer(x, training=True)))
    first, second = strategy.experimental_local_results(outputs)
    assert not np.array_equal(first, second)
    assert layer.calls == 1


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("jit", [False, True])
def test_a_custom_training_step(strategy, recompute: bool, jit: bool) -> None:
    """Checks that gradients of replicas with different masks are summed; the weight stays one."""
    with strategy.scope():
        layer = WRAPPERS["WeightDropout"](seed=1, recompute=recompute)
        layer.build(X.shape)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(layer.trainable_variables)

    def replica() -> tf.Tensor:
        def compute() -> tuple:
            with tf.GradientTape() as tape:
                y = layer(X, training=True)
                loss = tf.reduce_sum(y)
            return y, tape.gradient(
                loss, _keras.variables.tf_variable(layer.trainable_variables[0])
            )

        # Under XLA the whole gradient; the update needs the strategy.
        y, gradient = tf.function(compute, jit_compile=True)() if jit else compute()
        optimizer.apply([gradient], layer.trainable_variables)
        return y

    outputs = strategy.run(tf.function(replica))
    first, second = (np.asarray(y) for y in strategy.experimental_local_results(outputs))
    expected = 1.0 - 2.0 * ((first != 0).astype(float) + (second != 0))
    np.testing.assert_allclose(layer.weights[0].numpy(), expected)
    copies = strategy.experimental_local_results(_keras.variables.tf_variable(layer.weights[0]))
    np.testing.assert_array_equal(copies[0], copies[1])


@pytest.mark.parametrize("recompute", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fit(strategy, recompute: bool) -> None:
    with strategy.scope():
        lstm = keras.layers.LSTM(4)
        model = keras.Sequential(
            [
                layers.WeightDropout(lstm, 0.5, seed=1, recompute=recompute),
                layers.VariationalNoise(keras.layers.Dense(1), 0.1, seed=2, recompute=recompute),
            ]
        )
        model.build((None, 5, 3))
        model.compile("adam", "mse")
    x, y = np.random.default_rng(0).normal(size=(16, 5, 3)), np.ones((16, 1))
    before = model.get_weights()
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert [layer.calls for layer in model.layers] == [4, 4]
    changed = [not np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True)]
    assert all(changed)
    np.testing.assert_array_equal(model.predict(x, verbose=0), model.predict(x, verbose=0))
