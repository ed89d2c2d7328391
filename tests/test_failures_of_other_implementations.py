"""Known failures of other implementations of weight dropout: each must not happen here."""

import copy
import pickle
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from replicas import two_replicas
from stack_marks import needs_keras3, quick_rows

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P

X = tf.random.stateless_normal([4, 6], [1, 2])
SEQUENCE = tf.random.stateless_normal([2, 5, 3], [1, 2])
IDS = tf.constant([[1, 2, 3], [4, 0, 2]])


def gradient_of(layer: keras.Layer, x: tf.Tensor, weight: keras.Variable) -> tuple:
    with tf.GradientTape() as tape:
        y = layer(x, training=True)
    gradient = tape.gradient(y, _keras.variables.tf_variable(weight))
    return y, None if gradient is None else tf.convert_to_tensor(gradient)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_dropped_weights_without_effect_after_a_framework_upgrade(kind: str) -> None:
    """Checks that dropping almost all recurrent weights has almost the effect of dropping all."""
    rnn = getattr(keras.layers, kind)(6)
    wrapped = layers.WeightDropout(rnn, 0.999, seed=1)
    raw = wrapped(SEQUENCE)
    dropped = wrapped(SEQUENCE, training=True)
    assert not wrapped.effective_weights(0)["recurrent_kernel"].numpy().any()
    rnn.cell.recurrent_kernel.assign(tf.zeros_like(rnn.cell.recurrent_kernel))
    np.testing.assert_allclose(dropped, rnn(SEQUENCE), rtol=1e-6)
    assert not np.allclose(raw, dropped)


@pytest.mark.parametrize("wrapped", [True, False], ids=["WeightDropout", "WeightDropLSTM"])
def test_only_one_direction_of_a_bidirectional_layer_dropped(wrapped: bool) -> None:
    if wrapped:
        inner = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True))
        layer = layers.WeightDropout(inner, 0.5, seed=1)
    else:
        lstm = layers.WeightDropLSTM(4, weight_dropout=0.5, seed=1, return_sequences=True)
        layer = keras.layers.Bidirectional(lstm)
    raw, dropped = layer(SEQUENCE).numpy(), layer(SEQUENCE, training=True).numpy()
    # Each direction starts at its own end with a state of zero.
    np.testing.assert_allclose(raw[:, 0, :4], dropped[:, 0, :4], rtol=1e-5)
    np.testing.assert_allclose(raw[:, -1, 4:], dropped[:, -1, 4:], rtol=1e-5)
    assert not np.allclose(raw[:, 1:, :4], dropped[:, 1:, :4])
    assert not np.allclose(raw[:, :-1, 4:], dropped[:, :-1, 4:])
    for weight in layer.trainable_weights:
        if weight.name == "recurrent_kernel":
            gradient = gradient_of(layer, SEQUENCE, weight)[1].numpy()
            assert 0 < (gradient == 0.0).sum() < gradient.size


def test_another_mask_at_each_time_step() -> None:
    layer = layers.WeightDropout(keras.layers.SimpleRNN(5), 0.5, seed=1)
    layer.build(SEQUENCE.shape)
    y = layer(SEQUENCE, training=True)
    state, recurrent = tf.zeros([2, 5]), layer.effective_weights(0)["recurrent_kernel"]
    kernel = layer.layer.cell.kernel.numpy()
    for t in range(5):
        state = tf.tanh(SEQUENCE[:, t] @ kernel + state @ recurrent)
    np.testing.assert_allclose(y, state, rtol=1e-5)


@pytest.mark.parametrize("order", ["embedding", "decoder", "called", "loaded"])
@pytest.mark.parametrize("kind", ["WeightDropout", "DropoutEmbedding"])
def test_a_tied_model_uninitialised_or_dropped_twice_by_the_order_of_building(
    kind: str, order: str, tmp_path: Path
) -> None:
    def make() -> tuple:
        if kind == "WeightDropout":
            plain = keras.layers.Embedding(9, 4)
            embedding = layers.WeightDropout(plain, 0.5, seed=1, noise_shape=(None, 1))
        else:
            plain = embedding = layers.DropoutEmbedding(9, 4, 0.5, seed=1)
        return plain, embedding, layers.TiedDense(plain)

    plain, embedding, decoder = make()
    if order == "embedding":
        plain.build(None)
    elif order == "decoder":
        decoder.build((None, None, 4))
    elif order == "called":
        embedding(IDS)
    inputs = keras.Input((3,), dtype="int32")
    model = keras.Model(inputs, decoder(embedding(inputs)))
    if order == "loaded":
        model.save(tmp_path / "tied.keras")
        model = keras.saving.load_model(tmp_path / "tied.keras")
        embedding, decoder = model.layers[1:]
        plain = getattr(embedding, "layer", embedding)
    assert [tuple(w.shape) for w in model.trainable_weights] == [(9, 4), (9,)]
    assert decoder.embedding is plain
    matrix = plain.embeddings.numpy()
    assert matrix.any()
    # The embedding is dropped once, and the softmax sees the raw matrix.
    dropped = embedding.effective_weights(0)["embeddings"].numpy()
    expected = dropped[IDS.numpy()] @ matrix.T
    np.testing.assert_allclose(model(IDS, training=True), expected, rtol=1e-4, atol=1e-7)
    # The gradient is the sum of both uses: half through the mask.
    with tf.GradientTape() as tape:
        y = model(IDS, training=True)
    found = tf.convert_to_tensor(
        tape.gradient(y, _keras.variables.tf_variable(plain.embeddings))
    ).numpy()
    dropped = embedding.effective_weights(1)["embeddings"].numpy()
    keep = np.where(dropped.any(1), 2.0, 0.0)[:, None]
    counts = np.bincount(IDS.numpy().ravel(), minlength=9)[:, None]
    expected = counts * keep * matrix.sum(0) + (counts * dropped).sum(0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_tied_weight_is_decayed_once() -> None:
    embedding = layers.DropoutEmbedding(9, 4, 0.0)
    model = keras.Sequential([embedding, layers.TiedDense(embedding, use_bias=False)])
    model.build((None, 3))
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.25)
    before = embedding.embeddings.numpy()
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.zeros([9, 4])], model.trainable_variables)
    np.testing.assert_allclose(embedding.embeddings.numpy(), 0.75 * before)


@pytest.mark.parametrize("run", ["predict", "evaluate", "call", "train"])
def test_the_raw_weight_changed_by_predict(run: str) -> None:
    layer = layers.WeightDropout(keras.layers.Dense(3), 0.5)
    model = keras.Sequential([keras.Input((6,)), layer])
    model.compile(loss="mse")
    before = model.get_weights()
    model(X, training=True)
    if run == "predict":
        model.predict(X, verbose=0)
    elif run == "evaluate":
        model.evaluate(X, tf.ones([4, 3]), verbose=0)
    else:
        model(X, training=run == "train")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("traced", [True, False])
def test_no_gradient_or_a_gradient_to_the_dropped_copy_only(recompute: bool, traced: bool) -> None:
    layer = layers.WeightDropout(
        keras.layers.Dense(3, use_bias=False), 0.5, seed=1, recompute=recompute
    )
    layer.build(X.shape)
    (weight,) = layer.trainable_weights
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([weight])
    before = weight.numpy()

    def step() -> None:
        optimizer.apply([gradient_of(layer, X, weight)[1]], [weight])

    (tf.function(step) if traced else step)()
    dropped = layer.effective_weights(0)["kernel"].numpy() == 0
    update = before - weight.numpy()
    assert (update[dropped] == 0.0).all()
    expected = np.where(dropped, 0, 2 * X.numpy().sum(0)[:, None])
    np.testing.assert_allclose(update, expected, rtol=1e-4, atol=1e-6)


def test_equal_masks_on_all_replicas() -> None:
    strategy = two_replicas()
    with strategy.scope():
        layer = layers.WeightDropout(keras.layers.Dense(20, use_bias=False), 0.5)
        layer.build((None, 20))
    found = strategy.run(tf.function(lambda: layer(tf.eye(20), training=True)))
    one, two = (x.numpy() == 0 for x in strategy.experimental_local_results(found))
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / 20


def test_equal_masks_for_all_layers_of_one_shape() -> None:
    made = [layers.WeightDropout(keras.layers.Dense(20, use_bias=False), 0.5) for _ in range(3)]
    masks = [layer(tf.eye(20), training=True).numpy().ravel() == 0 for layer in made]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(masks[i], masks[j])[0, 1]) < 5 / 20


def test_masks_that_shift_when_a_function_is_retraced() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(6, use_bias=False), 0.5, seed=1)
    layer.build((None, 6))
    function = tf.function(lambda x: layer(x, training=True))
    for call, rows in enumerate((6, 4, 6, 2, 1)):
        kernel = layer.effective_weights(call)["kernel"].numpy()
        np.testing.assert_allclose(function(tf.eye(6)[:rows]), kernel[:rows], rtol=1e-6)
    assert function.experimental_get_tracing_count() > 1


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float16"])
def test_the_drop_rate_rounded_to_zero_in_half_precision(policy: str) -> None:
    dense = keras.layers.Dense(300, use_bias=False, dtype=policy, kernel_initializer="ones")
    layer = layers.WeightDropout(dense, 0.001, seed=1)
    y = layer(tf.eye(300), training=True)
    dropped = np.mean(tf.cast(y, tf.float32) == 0)
    assert abs(dropped - 0.001) < 5 * np.sqrt(0.001 * 0.999 / 90000)
    assert y.dtype == dense.compute_dtype


def test_a_lost_checkpoint_key(tmp_path: Path) -> None:
    def make() -> keras.Sequential:
        model = keras.Sequential(
            [
                layers.WeightDropout(keras.layers.Dense(3), 0.5),
                layers.VariationalNoise(keras.layers.Dense(3), 0.1),
                layers.LockedDropout(0.5),
                layers.WeightDropLSTM(3),
            ]
        )
        model(SEQUENCE, training=True)
        return model

    model, other = make(), make()
    model(SEQUENCE, training=True)
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    restored = tf.train.Checkpoint(model=other).restore(path)
    restored.assert_existing_objects_matched().assert_consumed()
    for _ in range(2):
        one, two = (m(SEQUENCE, training=True) for m in (model, other))
        np.testing.assert_array_equal(one, two)
    keys = {key.split("/.ATTRIBUTES")[0] for key, _ in tf.train.list_variables(path)}
    assert len([key for key in keys if "draws" in key]) >= 4


PICKLED = pytest.param("pickle", marks=needs_keras3("pickling of layers that are not built"))


@pytest.mark.parametrize("how", ["deepcopy", "clone_model", PICKLED])
@pytest.mark.parametrize("built", [True, False])
def test_deepcopy_clone_or_pickle_that_breaks(how: str, built: bool) -> None:
    model = keras.Sequential(
        [
            layers.WeightDropout(keras.layers.LSTM(3), 0.5, seed=1),
            layers.VariationalNoise(keras.layers.Dense(2), 0.1, seed=2),
        ]
    )
    if built:
        model(SEQUENCE)
    copies = {
        "deepcopy": copy.deepcopy,
        "clone_model": keras.models.clone_model,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    }
    other = copies[how](model)
    first, second = model(SEQUENCE), other(SEQUENCE)
    if how == "clone_model" or not built:
        assert first.shape == second.shape
        other.set_weights(model.get_weights())
    np.testing.assert_array_equal(model(SEQUENCE, training=True), other(SEQUENCE, training=True))
    other.layers[1].weights[0].assign(tf.zeros([3, 2]))
    assert model.layers[1].weights[0].numpy().any()


@pytest.mark.parametrize("traced", [True, False])
def test_recomputation_that_draws_another_mask(traced: bool) -> None:
    """Checks y = sum(x w'): the gradient is x wherever forward kept the weight."""
    layer = layers.WeightDropout(
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"), 0.5, recompute=True
    )
    x = tf.linalg.diag(tf.range(1.0, 201.0))

    def step() -> tuple:
        return gradient_of(layer, x, layer.trainable_weights[0])

    layer.build(x.shape)
    step = tf.function(step) if traced else step
    for _ in range(3):
        y, gradient = step()
        np.testing.assert_array_equal(y, gradient)
        assert 0 < (y.numpy() == 0).sum() < 200


@quick_rows("Dense-*", "SimpleRNN-while_loop")
@pytest.mark.parametrize("inside", ["cond", "while_loop", "scan"])
@pytest.mark.parametrize("kind", ["Dense", "SimpleRNN"])
def test_recomputation_inside_cond_or_loops_that_gives_none(inside: str, kind: str) -> None:
    if kind == "Dense":
        layer = layers.WeightDropout(keras.layers.Dense(6, use_bias=False), 0.5, seed=1)
        x = X
    else:
        layer = layers.WeightDropout(keras.layers.SimpleRNN(6), 0.5, seed=1)
        x = SEQUENCE
    layer.build(x.shape)
    weight = layer.trainable_weights[0]

    def once() -> tf.Tensor:
        return tf.reduce_sum(layer(x, training=True) ** 2)

    @tf.function
    def step(flag: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            if inside == "cond":
                loss = tf.cond(flag, once, lambda: 0.0)
            elif inside == "while_loop":
                loop = tf.while_loop(
                    lambda i, _: i < 2, lambda i, total: (i + 1, total + once()), (0, 0.0)
                )
                loss = loop[1]
            else:
                loss = tf.scan(lambda total, _: total + once(), tf.zeros([2]), 0.0)[-1]
        return loss, tape.gradient(loss, _keras.variables.tf_variable(weight))

    loss, gradient = step(tf.constant(True))
    times = 1 if inside == "cond" else 2
    # The same in eager mode, call by call.
    other = type(layer).from_config(layer.get_config())
    other.build(x.shape)
    other.set_weights(layer.get_weights())
    with tf.GradientTape() as tape:
        expected = tf.add_n([tf.reduce_sum(other(x, training=True) ** 2) for _ in range(times)])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    expected = tape.gradient(expected, _keras.variables.tf_variable(other.trainable_weights[0]))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert layer.calls == times


@quick_rows("predict-*")
@pytest.mark.parametrize(
    ("build", "jit"),
    [
        ("predict", False),
        ("call", False),
        pytest.param("evaluate", False, marks=pytest.mark.slow),
        pytest.param("predict", True, marks=pytest.mark.slow),
    ],
)
def test_crash_on_the_first_training_step_after_an_evaluation(build: str, jit: bool) -> None:
    model = keras.Sequential(
        [
            keras.Input((5, 3)),
            layers.WeightDropLSTM(4),
            layers.WeightDropout(keras.layers.Dense(1), 0.5),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit)
    target = tf.ones([2, 1])
    if build == "predict":
        model.predict(SEQUENCE, verbose=0)
    elif build == "evaluate":
        model.evaluate(SEQUENCE, target, verbose=0)
    else:
        model(SEQUENCE)
    before = model.get_weights()
    model.fit(SEQUENCE, target, epochs=2, verbose=0)
    assert [layer.calls for layer in model.layers] == [2, 2]
    pairs = zip(before, model.get_weights(), strict=True)
    assert all(not np.array_equal(one, other) for one, other in pairs)


def test_decay_or_dropout_of_a_model_that_shares_a_layer() -> None:
    """Checks one wrapped layer in two positions of a model: two calls and draws, one weight."""
    shared = layers.WeightDropout(keras.layers.Dense(6, use_bias=False), 0.5, seed=1)
    inputs = keras.Input((6,))
    model = keras.Model(inputs, shared(shared(inputs)))
    assert len(model.trainable_weights) == 1
    x = tf.eye(6)
    one, two = (shared.effective_weights(call)["kernel"] for call in range(2))
    np.testing.assert_allclose(model(x, training=True), one @ two, rtol=1e-4, atol=1e-6)


def test_parametrize_twice_is_a_chain() -> None:
    model = keras.Sequential([keras.Input((30,)), keras.layers.Dense(30, use_bias=False)])
    once = tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1)
    twice = tfwd.parametrize(once, {"kernel": P.Dropout(0.5)}, seed=1)
    zeros = np.mean(twice(tf.eye(30), training=True) == 0)
    assert abs(zeros - 0.75) < 5 * np.sqrt(0.1875 / 900)
