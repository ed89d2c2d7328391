"""Losses, weights, chunks, precision and modes."""

import threading
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, per_example, randomized
from replicas import two_replicas
from stack_marks import SOAK_ON_KERAS_2, needs_keras3

from tfwd import _keras, gradients, layers
from tfwd.gradients import argument_checks

pytestmark = SOAK_ON_KERAS_2

L = keras.layers


def mlp() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), L.Dense(5, "tanh"), L.Dense(3)])
    return randomized(model)


def data(batch: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    return random.normal(size=(batch, 4)).astype("f"), random.normal(size=(batch, 3)).astype("f")


def assert_equal(one: gradients.Moments, two: gradients.Moments, tolerance: float = 1e-5) -> None:
    for a, b in zip([*one.mean, *one.mean_square], [*two.mean, *two.mean_square], strict=True):
        scale = np.abs(np.asarray(b)).max()
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale)


def test_linear_model_in_closed_form() -> None:
    model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    x, y = data()
    d = 2 / 3 * (model(x).numpy() - y)
    moments = gradients.moments(model, x, y, "mse")
    each = x[:, :, None] * d[:, None]
    np.testing.assert_allclose(moments.mean[0], each.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moments.mean_square[0], (each**2).mean(0), rtol=1e-4)
    np.testing.assert_allclose(moments.mean_square[1], (d**2).mean(0), rtol=1e-4)
    assert moments.batch_size == 6


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 6, 100])
def test_chunks_change_nothing(chunk_size: int) -> None:
    model, (x, y) = mlp(), data()
    chunked = gradients.moments(model, x, y, "mse", chunk_size=chunk_size)
    assert_equal(chunked, gradients.moments(model, x, y, "mse"))


REDUCTIONS = ["sum", "none", "sum_over_batch_size"]
OTHERS = needs_keras3("reduction of this name")


@pytest.mark.parametrize(
    "reduction",
    [*REDUCTIONS, *(pytest.param(n, marks=OTHERS) for n in ("mean", "mean_with_sample_weight"))],
)
def test_reductions_change_nothing(reduction: str) -> None:
    model, (x, y) = mlp(), data()
    weight = np.arange(6.0)
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    other = keras.losses.MeanSquaredError()
    found = gradients.moments(model, x, y, loss, weight)
    assert_equal(found, gradients.moments(model, x, y, other, weight))


@pytest.mark.parametrize("loss", ["mse", "mean_absolute_error", keras.losses.Huber(),
                                  lambda y, p: (y - p) ** 2])  # fmt: skip
def test_kinds_of_losses(loss: Any) -> None:
    model, (x, y) = mlp(), data()
    moments = gradients.moments(model, x, y, loss)
    with tf.GradientTape() as tape:
        called = loss(y, model(x)) if callable(loss) else keras.losses.get(loss)(y, model(x))
        value = tf.reduce_mean(called)
    wanted = tape.gradient(
        value, [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    )
    for a, b in zip(moments.mean, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_sample_weights_of_examples_and_of_positions() -> None:
    model = randomized(keras.Sequential([keras.Input((5, 4)), L.Dense(3)]))
    random = np.random.default_rng(1)
    x, y = random.normal(size=(3, 5, 4)), random.normal(size=(3, 5, 3))
    for shape in [(3,), (3, 1), (3, 5)]:
        weight = random.uniform(size=shape)
        moments = gradients.moments(model, x, y, "mse", sample_weight=weight)
        rows = []
        for b in range(3):
            with tf.GradientTape() as tape:
                values = tf.reduce_mean((model(x[b : b + 1]) - y[b : b + 1]) ** 2, -1)
                value = tf.reduce_mean(values * np.reshape(weight[b], (1, -1)))
            found = tape.gradient(
                value, [_keras.variables.tf_variable(v) for v in model.trainable_variables]
            )
            rows.append(found)
        assert_moments(moments, [np.stack(parts) for parts in zip(*rows, strict=True)], 1e-5)


def test_mask_of_the_predictions_counts_each_examples_positions() -> None:
    ids = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4]])
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), L.Embedding(5, 3, mask_zero=True), L.Dense(2)]
    )
    y = np.random.default_rng(1).normal(size=(3, 4, 2))
    moments = gradients.moments(model, ids, y, "mse")
    loss = keras.losses.MeanSquaredError()
    assert_moments(moments, per_example(model, ids, y, loss), 1e-5)


@pytest.mark.parametrize("structure", ["list", "dict"])
def test_several_outputs(structure: str) -> None:
    inputs = keras.Input((4,))
    hidden = L.Dense(5, "tanh")(inputs)
    one, two = L.Dense(3, name="one")(hidden), L.Dense(1, name="two")(hidden)
    lists = structure == "list"
    model = keras.Model(inputs, [one, two] if lists else {"one": one, "two": two})
    x, first = data()
    second = first[:, :1]
    y = [first, second] if lists else {"one": first, "two": second}
    loss = ["mse", "mae"] if lists else {"two": "mae", "one": "mse"}
    weights = [1.0, 0.5] if lists else {"one": 1.0, "two": 0.5}
    moments = gradients.moments(model, x, y, loss, loss_weights=weights)

    def both(target: Any, output: Any) -> tf.Tensor:
        a, b = output if lists else (output["one"], output["two"])
        s, t = target if lists else (target["one"], target["two"])
        return tf.reduce_mean((a - s) ** 2) + 0.5 * tf.reduce_mean(tf.abs(b - t))

    assert_moments(moments, per_example(model, x, y, both), 1e-5)
    with pytest.raises(ValueError, match="y must be a list or dict|y has"):
        gradients.moments(model, x, first, loss)


def test_dicts_by_names_and_outputs_without_a_loss() -> None:
    inputs = keras.Input((4,))
    one, two = L.Dense(3, name="one")(inputs), L.Dense(1, name="two")(inputs)
    listed, named = keras.Model(inputs, [one, two]), keras.Model(inputs, {"one": one, "two": two})
    x, y = data()
    both = {"one": y, "two": y[:, :1]}
    loss, weights = {"two": "mae", "one": "mse"}, {"two": 0.5}
    wanted = gradients.moments(named, x, both, loss, loss_weights=weights)
    assert_equal(gradients.moments(listed, x, both, loss, loss_weights=weights), wanted)
    alone = gradients.moments(named, x, both, {"one": "mse"})
    assert alone.methods == ["dense", "dense", "unused", "unused"]
    for model in (named, listed):
        found = gradients.moments(model, x, {"one": y}, {"one": "mse", "two": None})
        assert_equal(found, alone)
    with pytest.raises(ValueError, match="y has the keys"):
        gradients.moments(named, x, {"one": y}, loss)


def test_losses_that_are_not_per_example_are_in_the_mean_alone() -> None:
    hidden = L.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l2")
    plain = keras.Sequential([keras.Input((4,)), L.Dense(5, "tanh"), L.Dense(3)])
    model = keras.Sequential([keras.Input((4,)), hidden, L.Dense(3, bias_regularizer="l1")])
    randomized(model)
    plain.set_weights(model.get_weights())
    x, y = data()
    model.compile("sgd", "mse")
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, tf.constant(y), model(x))
    wanted = tape.gradient(
        loss, [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    )
    for chunk_size in (None, 4):
        if chunk_size and not argument_checks._activity_losses_are_means():
            with pytest.raises(ValueError, match="which this release of Keras sums"):
                gradients.moments(model, x, y, "mse", chunk_size=chunk_size)
            continue
        moments = gradients.moments(model, x, y, "mse", chunk_size=chunk_size)
        for a, b in zip(moments.mean, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        without = gradients.moments(plain, x, y, "mse")
        for a, b in zip(moments.mean_square, without.mean_square, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


def test_added_losses_of_each_example_are_the_examples_own() -> None:
    class Penalty(L.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_mean(x**2, -1))
            return x

    model = keras.Sequential([keras.Input((4,)), L.Dense(5), Penalty(), L.Dense(3)])
    x, y = data()
    moments = gradients.moments(model, x, y, "mse")

    def loss(target: Any, output: Any) -> tf.Tensor:
        # Keras adds the sum to a loss that is a mean over 6 examples.
        return tf.reduce_mean((output - target) ** 2) + 6 * tf.add_n(
            [tf.reduce_sum(added) for added in model.losses]
        )

    assert_moments(moments, per_example(model, x, y, loss), 1e-4)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_is_summed_in_float32(policy: str) -> None:
    x, y = data(64)
    reference = mlp()
    keras.config.set_dtype_policy(policy)
    model = mlp()
    model.set_weights(reference.get_weights())
    moments = gradients.moments(model, x, y, "mse")
    assert all(m.dtype == tf.float32 for m in [*moments.mean, *moments.mean_square])
    assert_equal(moments, gradients.moments(reference, x, y, "mse"), 3e-2)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_functions(jit_compile: bool) -> None:
    embedding = L.Embedding(6, 3)
    stack = [keras.Input((4,), dtype="int32"), embedding, L.LSTM(3, return_sequences=True),
             layers.TiedDense(embedding)]  # fmt: skip
    model = keras.Sequential(stack)
    x = tf.constant([[1, 1, 4, 0], [5, 2, 5, 5], [3, 3, 3, 3]])
    y = tf.constant(np.random.default_rng(1).normal(size=(3, 4, 6)), tf.float32)

    @tf.function(jit_compile=jit_compile)
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(model, x, y, "mse")
        return moments.mean, moments.mean_square

    mean, squares = run(x, y)
    eager = gradients.moments(model, x, y, "mse")
    assert_equal(eager._replace(mean=mean, mean_square=squares), eager, 1e-4)


def test_function_with_an_unknown_batch_size_and_chunks() -> None:
    model = mlp()
    shapes = [tf.TensorSpec([None, n], tf.float32) for n in (4, 3)]

    @tf.function(input_signature=shapes)
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        moments = gradients.moments(model, x, y, "mse", chunk_size=4)
        return moments.mean, moments.mean_square, moments.batch_size

    for batch in (1, 4, 6, 9):
        x, y = data(batch)
        mean, squares, size = run(x, y)
        eager = gradients.moments(model, x, y, "mse")
        assert_equal(eager._replace(mean=mean, mean_square=squares), eager)
        assert int(size) == batch


def test_replicas_share_the_moments_of_the_global_batch() -> None:
    # Collectives of two strategies in one process would be confused with each other.
    strategy = two_replicas()
    with strategy.scope():
        model = mlp()
    x, y = data()
    parts = [(x[:2], y[:2]), (x[2:], y[2:])]
    given = strategy.experimental_distribute_values_from_function(
        lambda context: tuple(map(tf.constant, parts[context.replica_id_in_sync_group]))
    )

    @tf.function
    def run(given: Any) -> Any:
        def on_replica(part: Any) -> Any:
            moments = gradients.moments(model, part[0], part[1], "mse")
            return moments.mean, moments.mean_square, moments.batch_size

        return strategy.run(on_replica, (given,))

    found = [strategy.experimental_local_results(t) for t in tf.nest.flatten(run(given))]
    single = mlp()
    single.set_weights(model.get_weights())
    wanted = gradients.moments(single, x, y, "mse")
    for replica in (0, 1):
        flat = [values[replica] for values in found]
        count = len(wanted.mean)
        moments = wanted._replace(mean=flat[:count], mean_square=flat[count:-1])
        assert_equal(moments, wanted)
        assert int(flat[-1]) == 6


def test_calls_in_other_threads_are_left_alone() -> None:
    model, other, (x, y) = mlp(), mlp(), data()
    inside, seen = threading.Event(), {}

    class Waits(L.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            thread = threading.Thread(target=self.run)
            thread.start()
            thread.join()
            return x

        def run(self) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(other(x))
            seen["gradient"] = tape.gradient(
                loss, _keras.variables.tf_variable(other.layers[0].kernel)
            )
            inside.set()

    waiting = keras.Sequential([keras.Input((4,)), model.layers[0], Waits(), model.layers[1]])
    original = L.Dense.call
    gradients.moments(waiting, x, y, "mse")
    assert inside.is_set() and seen["gradient"] is not None
    assert L.Dense.call is original


def test_an_error_inside_leaves_keras_as_it_was() -> None:
    class Fails(L.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            if tf.is_tensor(x) and not isinstance(x, _keras.layers.KerasTensor):
                raise RuntimeError("no")
            return x

    original = L.Dense.call
    layer = Fails()
    layer.built = True
    model = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    model.call = lambda x, **kwargs: layer.call(model.layers[0](x))
    x, y = data()
    with pytest.raises(RuntimeError, match="no"):
        gradients.moments(model, x, y, "mse")
    assert L.Dense.call is original
    assert tuple(model.layers[0](x).shape) == (6, 3)
