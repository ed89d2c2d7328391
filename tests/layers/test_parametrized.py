"""The wrapper: one draw a call, nested wrappers, the training flag, errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import layers
from tfwd import parametrizations as P

X = tf.random.stateless_normal([4, 5], [1, 2])
SEQUENCE = tf.random.stateless_normal([2, 6, 3], [1, 2])


def random_operations(function, *arguments) -> list[str]:
    graph = tf.function(function).get_concrete_function(*arguments).graph
    types = {op.type for op in graph.get_operations()}
    for definition in graph.as_graph_def().library.function:
        types |= {node.op for node in definition.node_def}
    return sorted(kind for kind in types if "Random" in kind)


def nonzero(layer: keras.Layer) -> None:
    for weight in layer.weights:
        weight.assign(np.linspace(0.5, 1.5, int(np.prod(weight.shape))).reshape(weight.shape))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.parametrize("unroll", [False, True])
def test_one_mask_for_the_batch_and_all_time_steps(kind: str, unroll: bool) -> None:
    """The first step is equal between calls, as its state is zero; with equal input, so is the
    change from step to step, whatever the batch entry."""
    rnn = getattr(keras.layers, kind)(8, return_sequences=True, unroll=unroll)
    wrapped = layers.WeightDropout(rnn, 0.5, seed=1)
    one, two = (wrapped(SEQUENCE, training=True).numpy() for _ in range(2))
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert all(not np.array_equal(one[:, t], two[:, t]) for t in range(1, 6))
    same = wrapped(tf.repeat(SEQUENCE[:1], 3, axis=0), training=True)
    np.testing.assert_allclose(same[0], same[1], rtol=1e-6)
    # Step by step with the effective kernel, so that a mask drawn anew at each step would show.
    call = wrapped.calls
    plain = type(rnn)(8, return_sequences=True)
    plain.build(SEQUENCE.shape)
    values = wrapped.effective_weights(call)
    weights = [values.get(w.name, w) for w in wrapped.weights]
    plain.set_weights([np.asarray(w) for w in weights])
    np.testing.assert_allclose(wrapped(SEQUENCE, training=True), plain(SEQUENCE), atol=1e-6)


def test_a_layer_called_twice_in_a_step_draws_twice() -> None:
    wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5, seed=1)

    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        return wrapped(X, training=True), wrapped(X, training=True)

    one, two = step()
    assert not np.array_equal(one, two)
    assert wrapped.calls == 2
    for call, found in enumerate((one, two)):
        kernel = wrapped.effective_weights(call)["kernel"]
        np.testing.assert_allclose(found, X @ kernel, rtol=1e-5, atol=1e-6)


def test_evaluation_counts_no_call() -> None:
    wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5, seed=1)
    for training in (False, None, True, False, True):
        wrapped(X, training=training)
    assert wrapped.calls == 2


def test_seeds_go_by_position_and_not_by_name() -> None:
    def kernel(name: str, before: int) -> np.ndarray:
        for _ in range(before):
            keras.layers.Dense(1)
        inner = keras.layers.Dense(50, name=name, use_bias=False)
        wrapped = layers.WeightDropout(inner, 0.5, seed=9)
        wrapped.build((None, 40))
        nonzero(wrapped)
        return wrapped.effective_weights(0)["kernel"].numpy()

    np.testing.assert_array_equal(kernel(None, 0), kernel("another", 3))


def test_two_weights_of_one_shape_are_dropped_independently() -> None:
    model = keras.Sequential([keras.layers.Dense(30, use_bias=False) for _ in range(2)])
    wrapped = layers.WeightDropout(model, 0.5, seed=1)
    wrapped.build((None, 30))
    nonzero(wrapped)
    one, two = (w.numpy() == 0 for w in wrapped.effective_weights(0).values())
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / 30


def test_the_directions_of_a_bidirectional_layer_differ_from_one_seed() -> None:
    inner = keras.layers.Bidirectional(keras.layers.LSTM(8))
    wrapped = layers.WeightDropout(inner, 0.5, seed=1)
    wrapped.build(SEQUENCE.shape)
    nonzero(wrapped)
    forward, backward = (w.numpy() == 0 for w in wrapped.effective_weights(0).values())
    assert abs(forward.mean() - 0.5) < 5 * 0.5 / 16
    assert abs(backward.mean() - 0.5) < 5 * 0.5 / 16
    assert abs(np.corrcoef(forward.ravel(), backward.ravel())[0, 1]) < 5 / 16


ZEROS = [
    lambda: layers.WeightDropout(keras.layers.Dense(3), 0.0),
    lambda: layers.WeightDropout(keras.layers.LSTM(3), 0),
    lambda: layers.VariationalNoise(keras.layers.Dense(3), 0.0),
    lambda: layers.VariationalNoise(keras.layers.Dense(3), 0.0, start_step=2),
    lambda: layers.WeightDropLSTM(3, weight_dropout=0.0),
    lambda: layers.DropoutEmbedding(7, 3, 0.0),
    lambda: layers.LockedDropout(0.0),
]


@pytest.mark.parametrize("make", ZEROS)
@pytest.mark.parametrize("flag", ["bool", "tensor"])
def test_zero_draws_nothing_and_changes_no_bit(make, flag: str) -> None:
    layer = make()
    x = SEQUENCE
    if isinstance(layer, keras.layers.Embedding):
        x = tf.constant([[1, 2]])
    elif getattr(layer, "layer", None) is not None and isinstance(layer.layer, keras.layers.Dense):
        x = X
    evaluated = layer(x)
    if flag == "bool":
        assert random_operations(lambda x: layer(x, training=True), x) == []
        np.testing.assert_array_equal(layer(x, training=True), evaluated)
    else:
        signature = tf.TensorSpec([], tf.bool)
        function = lambda x, training: layer(x, training=training)  # noqa: E731
        assert random_operations(function, x, signature) == []
        found = tf.function(function)(x, tf.constant(True))
        expected = tf.function(lambda x: layer(x, training=False))(x)
        np.testing.assert_array_equal(found, expected)


def test_evaluation_draws_nothing() -> None:
    wrapped = layers.WeightDropout(keras.layers.LSTM(3), 0.5)
    wrapped(SEQUENCE)
    assert random_operations(lambda x: wrapped(x, training=False), SEQUENCE) == []
    assert random_operations(lambda x: wrapped(x, training=True), SEQUENCE) != []


# Nested wrappers.


def test_nested_wrappers_are_one_chain_the_inner_first() -> None:
    noisy = layers.VariationalNoise(keras.layers.Dense(40), 0.3, seed=1)
    wrapped = layers.WeightDropout(noisy, 0.5, seed=2)
    x = tf.eye(50)
    wrapped.build(x.shape)
    nonzero(wrapped)
    wrapped.weights[1].assign(tf.zeros([40]))
    kernel = wrapped.effective_weights(0)["kernel"].numpy()
    assert abs((kernel == 0).mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    noise = (kernel * 0.5 - wrapped.weights[0].numpy())[kernel != 0] / 0.3
    assert abs(noise.var() - 1) < 5 * np.sqrt(2 / 1000)
    with tf.GradientTape() as tape:
        y = wrapped(x, training=True)
    np.testing.assert_allclose(y, kernel, atol=1e-6)
    gradient = tape.gradient(y, wrapped.weights[0].value).numpy()
    np.testing.assert_allclose(gradient, np.where(kernel == 0, 0.0, 2.0))
    assert (wrapped.calls, noisy.calls) == (1, 1)


def test_the_other_order_has_no_zeros() -> None:
    dropped = layers.WeightDropout(keras.layers.Dense(40), 0.5, seed=1)
    wrapped = layers.VariationalNoise(dropped, 0.3, seed=2)
    x = tf.eye(50)
    y = wrapped(x, training=True).numpy()
    np.testing.assert_allclose(y, wrapped.effective_weights(0)["kernel"], atol=1e-6)
    assert (y != 0).all()
    assert len(set(dropped.effective_weights(0)) | {"kernel"}) == 1


def test_alike_nested_wrappers_with_one_seed_are_independent() -> None:
    inner = layers.WeightDropout(keras.layers.Dense(40, use_bias=False), 0.5, seed=1)
    wrapped = layers.WeightDropout(inner, 0.5, seed=1)
    zeros = (wrapped(tf.eye(50), training=True).numpy() == 0).mean()
    assert abs(zeros - 0.75) < 5 * np.sqrt(0.1875 / 2000)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_a_wrapper_inside_a_nested_sequential_that_is_wrapped_again(
    recompute: bool, traced: bool
) -> None:
    options = {"recompute": recompute}
    noisy = layers.VariationalNoise(keras.layers.Dense(40, use_bias=False), 0.3, seed=1, **options)
    inner = keras.Sequential([noisy, keras.layers.Dense(2, use_bias=False)])
    model = keras.Sequential([inner])
    wrapped = layers.WeightDropout(model, 0.5, weights=".*kernel", seed=2, **options)
    x = tf.eye(50)
    wrapped.build(x.shape)
    nonzero(wrapped)
    first, second = wrapped.effective_weights(0).values()

    def step() -> tuple:
        with tf.GradientTape() as tape:
            y = wrapped(x, training=True)
        return y, tape.gradient(y, [w.value for w in wrapped.weights])

    y, (one, two) = tf.function(step)() if traced else step()
    np.testing.assert_allclose(y, first @ second, rtol=1e-4)
    assert abs((first.numpy() == 0).mean() - 0.5) < 5 * 0.5 / np.sqrt(2000)
    ones = tf.ones([50, 2])
    np.testing.assert_allclose(
        one, np.where(first.numpy() == 0, 0, 2 * (ones @ tf.transpose(second))), rtol=1e-4
    )
    np.testing.assert_allclose(
        two, np.where(second.numpy() == 0, 0, 2 * (tf.transpose(first) @ ones)), rtol=1e-4
    )


# The training flag.


class Recorder(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def call(self, x, training=None):
        self.seen.append(training)
        return x


@keras.saving.register_keras_serializable("test_parametrized")
class FrozenNorm(keras.layers.Layer):
    """Holds a normalization that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(3)

    def build(self, shape) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(self.norm(x, training=False))


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_frozen_normalization_inside_does_not_change_later_layers_flag(
    rate: float, recompute: bool
) -> None:
    class Model(keras.Model):
        """Passes no flag on, so that its layers see that of the call that is under way."""

        def __init__(self) -> None:
            super().__init__()
            inner = FrozenNorm()
            self.wrapped = layers.WeightDropout(inner, rate, weights="kernel", recompute=recompute)
            self.recorder = Recorder()

        def call(self, x):
            return self.recorder(self.wrapped(x))

    model = Model()
    model(X)
    model.recorder.seen.clear()
    model(X, training=True)
    tf.function(lambda: model(X, training=True))()
    model(X, training=False)
    assert model.recorder.seen == [True, True, False]
    np.testing.assert_array_equal(model.wrapped.layer.norm.moving_mean, np.zeros(5))
    assert model.wrapped.calls == (2 if rate else 0)


def test_the_flag_of_the_model_reaches_the_wrapper() -> None:
    wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5)
    model = keras.Sequential([keras.layers.Dense(5), wrapped])
    model(X, training=True)
    assert wrapped.calls == 1
    model.predict(X, verbose=0)
    model(X)
    assert wrapped.calls == 1


# What wrapping leaves as it is.


@pytest.mark.parametrize("recompute", [True, False])
def test_batch_statistics_are_those_of_the_plain_layer(recompute: bool) -> None:
    wrapped = layers.WeightDropout(
        keras.Sequential([keras.layers.BatchNormalization(), keras.layers.Dense(2)]),
        0.5,
        recompute=recompute,
    )
    plain = keras.layers.BatchNormalization()
    for _ in range(3):
        with tf.GradientTape() as tape:
            y = wrapped(X, training=True)
        tape.gradient(y, wrapped.trainable_weights[0].value)
        plain(X, training=True)
    norm = wrapped.layer.layers[0]
    np.testing.assert_allclose(norm.moving_mean, plain.moving_mean, rtol=1e-6)
    np.testing.assert_allclose(norm.moving_variance, plain.moving_variance, rtol=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
def test_an_inner_dropout_draws_once_a_call_and_backward_draws_the_same(
    recompute: bool, traced: bool
) -> None:
    wrapped = layers.WeightDropout(
        keras.Sequential(
            [keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1, use_bias=False)]
        ),
        0.5,
        weights="kernel",
        recompute=recompute,
        seed=1,
    )
    plain = keras.layers.Dropout(0.5, seed=3)
    x = tf.ones([8, 100])
    wrapped.build(x.shape)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = wrapped(x, training=True)
        return tape.gradient(y, wrapped.weights[0].value)

    step = tf.function(step) if traced else step
    for call in range(3):
        kept = wrapped.effective_weights(call)["kernel"].numpy() != 0
        expected = tf.reduce_sum(plain(x, training=True), axis=0)[:, None] * np.where(kept, 2, 0)
        np.testing.assert_allclose(step(), expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_stateful_layer_keeps_its_state(recompute: bool) -> None:
    wrapped = layers.WeightDropout(
        keras.layers.LSTM(3, stateful=True), 0.5, recompute=recompute, seed=1
    )
    wrapped(SEQUENCE)
    wrapped.reset_state()
    values = [np.asarray(w) for w in wrapped.weights]
    values[1] = wrapped.effective_weights(0)["recurrent_kernel"].numpy()
    plain = keras.layers.LSTM(3, stateful=True)
    plain(SEQUENCE)
    plain.reset_state()
    plain.set_weights(values)
    np.testing.assert_allclose(wrapped(SEQUENCE, training=True), plain(SEQUENCE), rtol=1e-5)
    for one, other in zip(wrapped.layer.states, plain.states, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


class WithLosses(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel", regularizer="l2")

    def call(self, x):
        y = keras.ops.matmul(x, self.kernel)
        self.add_loss(keras.ops.sum(y))
        self.add_loss(keras.ops.sum(self.kernel))
        return y


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("outer", [False, True])
def test_losses_are_preserved_in_number_and_value(
    recompute: bool, traced: bool, outer: bool
) -> None:
    wrapped = layers.WeightDropout(WithLosses(), 0.5, recompute=recompute, seed=1)
    holder = keras.Sequential([wrapped]) if outer else wrapped
    holder.build((None, 5))
    losses = []

    def step() -> tuple:
        with tf.GradientTape() as tape:
            y = holder(X, training=True)
            losses[:] = holder.losses
            total = tf.add_n(losses[:])
        return y, tuple(losses), tape.gradient(total, wrapped.weights[0].value)

    y, found, gradient = tf.function(step)() if traced else step()
    kernel, raw = wrapped.effective_weights(0)["kernel"].numpy(), wrapped.weights[0].numpy()
    expected = [np.sum(X.numpy() @ kernel), kernel.sum(), 0.01 * np.sum(raw**2)]
    assert len(found) == 3
    np.testing.assert_allclose(sorted(found), sorted(expected), rtol=1e-4)
    np.testing.assert_allclose(y, X.numpy() @ kernel, rtol=1e-4, atol=1e-6)
    # The regularizer's part of the gradient goes to the raw weight without a mask.
    keep = np.where(kernel == 0, 0.0, 2.0)
    data = keep * (X.numpy().sum(0)[:, None] + 1)
    np.testing.assert_allclose(gradient, data + 0.02 * raw, rtol=1e-4)
    holder(X)
    assert len(holder.losses) == 3


def test_activity_regularizers_see_the_output_of_the_effective_weights() -> None:
    inner = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L1(1.0))
    wrapped = layers.WeightDropout(inner, 0.5, seed=1)
    plain = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L1(1.0))
    plain(X)
    y = wrapped(X, training=True)
    plain.set_weights([wrapped.effective_weights(0)["kernel"].numpy(), np.zeros(3)])
    plain(X)
    assert len(wrapped.losses) == 1
    np.testing.assert_allclose(wrapped.losses[0], plain.losses[0], rtol=1e-5)
    assert float(tf.reduce_sum(abs(y))) > 0


@pytest.mark.parametrize("training", [False, True])
def test_masks_pass_in_and_out(training: bool) -> None:
    ids = tf.constant([[1, 2, 0, 0], [3, 4, 5, 6]])
    embedding = layers.WeightDropout(keras.layers.Embedding(7, 3, mask_zero=True), 0.5, seed=1)
    lstm = layers.WeightDropout(keras.layers.LSTM(2), 0.5, seed=2)
    embedded = embedding(ids, training=training)
    np.testing.assert_array_equal(embedded._keras_mask, ids != 0)
    found = lstm(embedded, training=training)
    short = lstm.layer.cell
    del short
    if not training:
        plain = lstm.layer(embedding.layer(ids))
        np.testing.assert_array_equal(found, plain)
    else:
        # The masked steps change nothing.
        other = layers.WeightDropout(keras.layers.LSTM(2), 0.5, seed=2)
        other.build((None, None, 3))
        other.set_weights(lstm.get_weights())
        np.testing.assert_allclose(other(embedded[:1, :2], training=True), found[:1], rtol=1e-5)


def test_masks_pass_through_a_model() -> None:
    model = keras.Sequential(
        [
            layers.DropoutEmbedding(7, 3, 0.5, mask_zero=True),
            layers.WeightDropout(keras.layers.GRU(3, return_sequences=True), 0.5),
            layers.LockedDropout(0.5),
            layers.WeightDropLSTM(2),
        ]
    )
    model(tf.constant([[1, 2, 0, 0]]))
    np.testing.assert_allclose(
        model(tf.constant([[1, 2, 0, 0]])), model(tf.constant([[1, 2]])), rtol=1e-5
    )


def test_the_wrapped_layer_stands_bare_in_an_evaluation_model() -> None:
    dense = keras.layers.Dense(4)
    inputs = keras.Input((5,))
    training = keras.Model(inputs, layers.WeightDropout(dense, 0.5)(inputs))
    evaluation = keras.Model(inputs, dense(inputs))
    np.testing.assert_array_equal(evaluation(X, training=True), training(X))
    training.compile("sgd", "mse")
    training.fit(X, tf.ones([4, 4]), verbose=0)
    np.testing.assert_array_equal(evaluation(X, training=True), training(X))


def test_no_call_assigns_to_a_weight() -> None:
    model = keras.Sequential([layers.WeightDropout(keras.layers.Dense(4), 0.5)])
    before = [w.copy() for w in (model(X), model.get_weights())[1]]
    model.predict(X, verbose=0)
    model(X, training=True)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


# Layers that cannot be run on other weights, or not twice.


class PastKeras(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.aside = [lambda: self.kernel._value]

    def call(self, x):
        return tf.matmul(x, self.aside[0]())


@pytest.mark.parametrize("traced", [False, True])
def test_a_weight_that_is_read_past_keras_is_an_error(traced: bool) -> None:
    wrapped = layers.WeightDropout(PastKeras(), 0.5)

    def call() -> tf.Tensor:
        return wrapped(X, training=True)

    with pytest.raises(ValueError, match="reads its weight 'kernel' past Keras"):
        tf.function(call)() if traced else call()


class Unread(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.other = self.add_weight(shape=(5, 3), name="other")

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


def test_a_weight_that_is_not_read_is_a_warning() -> None:
    wrapped = layers.WeightDropout(Unread(), 0.5)
    with pytest.warns(UserWarning, match="does not read 'other'"):
        wrapped(X, training=True)


class Assigning(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    def call(self, x):
        self.kernel.assign(self.kernel * 0.9)
        return keras.ops.matmul(x, self.kernel)


def test_a_layer_that_assigns_to_the_parametrized_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="assigns to its weight 'kernel'"):
        layers.WeightDropout(Assigning(), 0.5)(X, training=True)


class StatefulDraw(keras.layers.Layer):
    """Draws from TensorFlow's global generator, anew at each run."""

    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")

    def call(self, x, training=None):
        y = keras.ops.matmul(x, self.kernel)
        return y * tf.random.uniform(tf.shape(y)) if training else y


@pytest.mark.parametrize("traced", [False, True])
def test_a_layer_that_draws_statefully_is_not_run_twice(traced: bool) -> None:
    wrapped = layers.WeightDropout(StatefulDraw(), 0.5, seed=1)
    wrapped.build((None, 5))
    nonzero(wrapped)

    def step() -> tuple:
        with tf.GradientTape() as tape:
            y = wrapped(X, training=True)
        return y, tape.gradient(y, wrapped.weights[0].value)

    with pytest.warns(UserWarning, match="cannot be run a second time in backward, because"):
        y, gradient = tf.function(step)() if traced else step()
    # y = (x w') u, so that the sum over w' of gradient * w' is the sum of y, for the very u.
    kernel = wrapped.weights[0].numpy()
    np.testing.assert_allclose(np.sum(gradient * kernel), np.sum(y), rtol=1e-4)


# Errors.


def cases_of_errors():
    dense, lstm = keras.layers.Dense, keras.layers.LSTM
    drop, noise = layers.WeightDropout, layers.VariationalNoise
    yield lambda: drop(dense(3, name="d"), 1.0), "'kernel'.* 'd'.*rate.*1.0"
    yield lambda: drop(dense(3, name="d"), -0.1), "'kernel'.* 'd'.*rate.*-0.1"
    yield lambda: drop(dense(3, name="d"), float("nan")), "'kernel'.* 'd'.*rate.*nan"
    yield lambda: drop(dense(3, name="d"), "x"), "'kernel'.* 'd'.*rate.*'x'"
    yield lambda: noise(dense(3, name="d"), -1.0), "'kernel'.* 'd'.*stddev.*-1.0"
    yield lambda: noise(dense(3, name="d"), float("nan")), "'kernel'.* 'd'.*stddev.*nan"
    yield lambda: drop(lstm(3, name="l"), 2.0), "'recurrent_kernel'.* 'l'.*rate.*2.0"
    yield (
        lambda: drop(dense(3, name="d"), 0.5, weights=["kernle"]),
        "'kernle' matches no weight of layer 'd'.*kernel, bias",
    )
    yield (
        lambda: drop(dense(3, name="d"), 0.5, weights="ernel"),
        "'ernel' matches no weight of layer 'd'.*kernel, bias",
    )
    yield lambda: drop(dense(3, name="d"), 0.5, weights="("), "'\\('.*'d'.*regular expression"
    yield lambda: drop(dense(3, name="d"), 0.5, weights=[]), "'d'.*weights is empty"
    yield (
        lambda: drop(dense(3, name="d"), 0.5, noise_shape=(None,)),
        "'kernel'.* 'd'.*noise_shape.*\\(None,\\).*\\(5, 3\\)",
    )
    yield lambda: drop(keras.layers.ReLU(name="r"), 0.5), "'r' has no weight.*no weights"
    yield lambda: layers.Parametrized(dense(3, name="d"), {}), "parametrizations must be a dict"
    yield lambda: layers.Parametrized(dense(3, name="d"), {"kernel": 0.5}), "'kernel'.*'d'.*0.5"
    yield lambda: drop(dense(3), 0.5, seed=-1), "seed must be None or an integer.*-1"
    yield lambda: drop(dense(3), 0.5, seed=1.5), "seed must be None or an integer.*1.5"
    yield lambda: drop("dense", 0.5), "Keras layer is wanted, got 'dense'"


ERRORS = list(cases_of_errors())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("make", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_name_the_layer_the_weight_and_the_value(make, message: str, when: str) -> None:
    """Whether the wrapped layer is built before it is wrapped or after."""
    if when == "before":
        with pytest.raises(ValueError, match=message), _built_at_once():
            make()
    else:
        with pytest.raises(ValueError, match=message):
            make()(X if "'l'" not in message else SEQUENCE, training=True)


class _built_at_once:
    """Layers are built as soon as they are made."""

    def __enter__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        for cls, shape in ((keras.layers.Dense, (None, 5)), (keras.layers.LSTM, (None, None, 5))):
            self._build(cls, shape)

    def _build(self, cls: type, shape: tuple) -> None:
        original = cls.__init__

        def init(layer, *args, **kwargs) -> None:
            original(layer, *args, **kwargs)
            layer.build(shape)

        self.patch.setattr(cls, "__init__", init)

    def __exit__(self, *_) -> None:
        self.patch.undo()


class WithInteger(keras.layers.Layer):
    def build(self, shape) -> None:
        self.kernel = self.add_weight(shape=(5, 3), name="kernel")
        self.table = self.add_weight(
            shape=(5, 3), dtype="int32", initializer="zeros", name="table", trainable=False
        )

    def call(self, x):
        return keras.ops.matmul(x, self.kernel + keras.ops.cast(self.table, "float32"))


def test_an_integer_weight_is_never_parametrized() -> None:
    wrapped = layers.WeightDropout(WithInteger(), 0.5)
    wrapped(X, training=True)
    assert list(wrapped.effective_weights(0)) == ["kernel"]
    named = layers.WeightDropout(WithInteger(name="w"), 0.5, weights="table")
    with pytest.raises(ValueError, match="'table' of layer 'w' is of dtype int32"):
        named(X, training=True)
    with pytest.raises(ValueError, match="'table' of layer 'w' is of dtype int32"):
        layers.WeightDropout(WithInteger(name="w"), 0.5, weights=".*")(X)


@pytest.mark.parametrize("cell", [keras.layers.LSTMCell, keras.layers.GRUCell])
def test_a_bare_cell_is_an_error(cell: type) -> None:
    with pytest.raises(ValueError, match="'c' of type .*Cell is an RNN cell.*wrap the recurrent"):
        layers.WeightDropout(cell(3, name="c"), 0.5)
    cells = keras.layers.StackedRNNCells([cell(3), cell(3)])
    with pytest.raises(ValueError, match="is an RNN cell"):
        layers.Parametrized(cells, {"kernel": P.Dropout(0.5)})


def test_a_failed_construction_leaves_the_layer_as_it_was() -> None:
    dense = keras.layers.Dense(3)
    expected = dense(X)
    with pytest.raises(ValueError, match="matches no weight"):
        layers.WeightDropout(dense, 0.5, weights="no")
    np.testing.assert_array_equal(dense(X, training=True), expected)


def test_effective_weights_of_a_layer_without_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="'d' has no weights yet: build it or call it first"):
        layers.WeightDropout(keras.layers.Dense(3, name="d"), 0.5).effective_weights(0)


def test_the_first_pattern_that_matches_counts() -> None:
    wrapped = layers.Parametrized(
        keras.layers.Dense(30), {"kernel": P.Dropout(0.5), ".*": P.GaussianNoise(0.1)}, seed=1
    )
    wrapped.build((None, 30))
    values = wrapped.effective_weights(0)
    assert list(values) == ["kernel", "bias"]
    assert (values["kernel"].numpy() == 0).mean() > 0.3
    assert (values["bias"].numpy() != 0).all()


def test_a_rate_may_be_a_schedule_of_the_calls() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.0, 0.5])
    wrapped = layers.WeightDropout(keras.layers.Dense(5), schedule, seed=1)
    function = tf.function(lambda: wrapped(X, training=True))
    evaluated = wrapped(X)
    np.testing.assert_allclose(function(), evaluated, rtol=1e-6)
    assert not np.allclose(function(), evaluated)
    again = type(wrapped).from_config(wrapped.get_config())
    assert isinstance(again.rate, keras.optimizers.schedules.PiecewiseConstantDecay)


def test_deterministic_parametrizations_act_in_evaluation_too() -> None:
    wrapped = layers.Parametrized(keras.layers.Dense(4, use_bias=False), {"kernel": P.WeightNorm()})
    y = wrapped(tf.eye(5))
    np.testing.assert_allclose(np.linalg.norm(y, axis=0), np.ones(4), rtol=1e-5)
    np.testing.assert_allclose(y, wrapped(tf.eye(5), training=True), rtol=1e-6)
    with pytest.raises(ValueError, match="'kernel' in evaluation too"):
        wrapped.unwrapped()


def test_a_function_that_is_retraced_goes_on_with_the_same_draws() -> None:
    def outputs(sizes: list[int]) -> list[np.ndarray]:
        wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5, seed=1)
        wrapped.build((None, 5))
        nonzero(wrapped)
        function = tf.function(lambda x: wrapped(x, training=True), reduce_retracing=False)
        return [function(X[:size]).numpy()[:1] for size in sizes]

    # A new size is a new trace.
    for one, other in zip(outputs([4, 4, 4, 4]), outputs([4, 3, 2, 4]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
