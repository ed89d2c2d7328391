"""Closed forms in float64 for every rule of `DecoupledWeightDecay`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import make
from optimizer_tools import gradients, tf_variable, values, variables
from stack_marks import extended

from tfwd import optimizers
from tfwd.optimizers import DecoupledWeightDecay

Schedule = keras.optimizers.schedules.PiecewiseConstantDecay
D, RATE = 0.03, 0.125  # schedules compute in float32, where this rate and its halves are exact


@pytest.fixture(autouse=True)
def float64():
    keras.config.set_floatx("float64")


def run(optimizer, steps=4):
    """Returns the variables after each step."""
    weights = variables()
    after = []
    for step in range(steps):
        optimizer.apply(gradients(step), weights)
        after.append(values(weights))
    return after


def sgd(fraction, rate=lambda t: RATE, steps=4):
    """Returns w - f*w - rate*g in NumPy, with f by step and position."""
    weights, after = values(variables()), []
    for step in range(steps):
        for i, gradient in enumerate(gradients(step)):
            decayed = weights[i] - fraction(step, i) * weights[i]
            weights[i] = decayed - rate(step) * gradient.numpy()
        after.append([w.copy() for w in weights])
    return after


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-15)


def halving(step):
    return RATE * 0.5**step


RULES = {
    "absolute": ({}, lambda t, i: D),
    "learning_rate": ({"scale": "learning_rate"}, lambda t, i: D * RATE),
    "schedule, of a constant rate": ({"scale": "schedule"}, lambda t, i: D),
    "include": ({"include": "bias"}, lambda t, i: D * (i == 1)),
    "include by whole path": ({"include": ["kernel"]}, lambda t, i: D * (i == 0)),
    "exclude": ({"exclude": ["b.*"]}, lambda t, i: D * (i == 0)),
    "exclude wins": ({"include": [".*"], "exclude": "bias"}, lambda t, i: D * (i == 0)),
    "multipliers": ({"multipliers": {"bias": 2.5}}, lambda t, i: D * (2.5 if i else 1)),
    "the first multiplier counts": (
        {"multipliers": {"kern.*": 0.5, ".*": 2, "bias": 9}},
        lambda t, i: D * (2 if i else 0.5),
    ),
    "multiplier of nothing": ({"multipliers": {"bias": 0}}, lambda t, i: D * (i == 0)),
}


@pytest.mark.parametrize("rule", RULES)
def test_closed_form(rule):
    options, fraction = RULES[rule]
    assert_close(run(DecoupledWeightDecay(make("SGD", RATE), D, **options)), sgd(fraction))


HALVING = Schedule([0, 1, 2], [halving(t) for t in range(4)])
SCALES = {
    "absolute": lambda t, i: D,
    "learning_rate": lambda t, i: D * halving(t),
    "schedule": lambda t, i: D * 0.5**t,
}


@pytest.mark.parametrize("scale", SCALES)
def test_with_a_schedule_of_the_learning_rate(scale):
    optimizer = DecoupledWeightDecay(make("SGD", HALVING), D, scale=scale)
    assert_close(run(optimizer), sgd(SCALES[scale], halving))


@pytest.mark.parametrize("scale", SCALES)
def test_with_a_learning_rate_that_is_assigned(scale):
    optimizer, weights, after = (
        DecoupledWeightDecay(make("SGD", RATE), D, scale=scale),
        variables(),
        [],
    )
    for step in range(4):
        optimizer.learning_rate = halving(step)
        optimizer.apply(gradients(step), weights)
        after.append(values(weights))
    assert_close(after, sgd(SCALES[scale], halving))


def variable_decay():
    return tf.Variable(D, dtype=tf.float64)


@pytest.mark.parametrize(
    ("weight_decay", "fraction"),
    [
        (Schedule([0, 1, 2], [0.5, 0.25, 0.125, 0.0625]), lambda t, i: 0.5 ** (t + 1)),
        (lambda: 0.25, lambda t, i: 0.25),
        (variable_decay, lambda t, i: D),
        (0.0, lambda t, i: 0.0),
    ],
    ids=["schedule", "function", "function of a variable", "zero"],
)
def test_kinds_of_weight_decay(weight_decay, fraction):
    assert_close(run(DecoupledWeightDecay(make("SGD", RATE), weight_decay)), sgd(fraction))


@extended
def test_a_variable_as_weight_decay_is_read_in_each_step():
    decay = variable_decay()
    optimizer, weights = DecoupledWeightDecay(make("SGD", RATE), decay), variables()
    step = tf.function(lambda a, b: optimizer.apply([a, b], weights))
    expected = values(weights)
    for number, d in enumerate((0.5, 0.0, 0.25)):
        decay.assign(d)
        step(*gradients(number))
        for i, gradient in enumerate(gradients(number)):
            expected[i] = expected[i] * (1 - d) - RATE * gradient.numpy()
    for found, right in zip(values(weights), expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-13)
    assert optimizer.get_config()["weight_decay"] == 0.25


def test_caffes_decay():
    """Checks that a weight with zero gradient becomes W * (1 - 0.0005)."""
    optimizer, weights = DecoupledWeightDecay(make("SGD", RATE), 0.0005), variables()
    before = values(weights)
    for _ in range(10):
        optimizer.apply([tf.zeros_like(tf_variable(v)) for v in weights], weights)
    for found, old in zip(values(weights), before, strict=True):
        np.testing.assert_allclose(found, old * (1 - 0.0005) ** 10, rtol=1e-13)


def test_initial_rate_of_the_schedule_scale_is_the_rate_at_construction():
    inner = make("SGD", 0.4)
    optimizer = DecoupledWeightDecay(inner, D, scale="schedule")
    optimizer.learning_rate = 0.1
    again = DecoupledWeightDecay.from_config(optimizer.get_config())
    for found in (optimizer, again):
        weights = variables()
        assert found.decay_table(weights)[0].decay == pytest.approx(D / 4, rel=1e-12)
    with pytest.raises(ValueError, match="SGD '(?i:sgd).*' is 0.0: use scale='learning_rate'"):
        DecoupledWeightDecay(make("SGD", Schedule([1], [0.0, 0.1])), D, scale="schedule")


# Embeddings.


def table_and_gradient():
    table = keras.Variable(np.arange(1.0, 11).reshape(5, 2), name="table")
    values = tf.constant([[1.0, 2], [3, 4], [5, 6]], tf.float64)
    return table, tf.IndexedSlices(values, tf.constant([3, 0, 3]), tf.constant([5, 2]))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("sparse", ["table", "rows"])
def test_a_sparse_gradient(sparse, compiled):
    table, gradient = table_and_gradient()
    old, dense = table.numpy(), tf.convert_to_tensor(gradient).numpy()
    optimizer = DecoupledWeightDecay(make("SGD", RATE), D, sparse=sparse)
    optimizer.build([table])
    step = tf.function(
        lambda v, i: optimizer.apply([tf.IndexedSlices(v, i, tf.constant([5, 2]))], [table]),
        jit_compile=compiled,
    )
    step(gradient.values, gradient.indices)
    decayed = np.array([1, 0, 0, 1, 0])[:, None] if sparse == "rows" else 1
    np.testing.assert_allclose(table.numpy(), old * (1 - D * decayed) - RATE * dense, rtol=1e-13)


@extended
def test_rows_of_a_real_embedding():
    def train(sparse):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Embedding(6, 2, name="e"), keras.layers.Dense(1)])
        model.build((None, 3))
        model.compile(DecoupledWeightDecay(make("SGD", 0.0), D, sparse=sparse), "mse")
        old = model.get_weights()[0]
        model.fit(np.array([[1, 4, 1]]), np.zeros((1, 3, 1)), verbose=0)
        return model.get_weights()[0] / old

    np.testing.assert_allclose(train("table"), 1 - D, rtol=1e-6)
    expected = np.ones((6, 2))
    expected[[1, 4]] = 1 - D
    np.testing.assert_allclose(train("rows"), expected, rtol=1e-6)


# Variables without a gradient.


def test_unused_variables_are_left_alone_and_listed_once():
    optimizer, weights = DecoupledWeightDecay(make("SGD", RATE), D), variables()
    old = values(weights)
    with pytest.warns(UserWarning, match="no gradient reaches .*neither updated nor decayed: bias"):
        optimizer.apply([gradients(0)[0], None], weights)
    optimizer.apply([gradients(1)[0], None], weights)  # a second warning would be an error
    np.testing.assert_array_equal(weights[1].numpy(), old[1])
    assert not np.array_equal(weights[0].numpy(), old[0])


@pytest.mark.parametrize("scale", SCALES)
def test_unused_variables_are_decayed_when_asked(scale):
    optimizer = DecoupledWeightDecay(make("SGD", RATE), D, scale=scale, decay_unused=True)
    weights = variables()
    old = values(weights)
    for _ in range(2):
        optimizer.apply([gradients(0)[0], None], weights)
    fraction = D * RATE if scale == "learning_rate" else D
    np.testing.assert_allclose(weights[1].numpy(), old[1] * (1 - fraction) ** 2, rtol=1e-13)


def test_unused_variables_that_are_excluded_are_not():
    optimizer = DecoupledWeightDecay(make("SGD", RATE), D, decay_unused=True, exclude="bias")
    weights = variables()
    old = values(weights)
    optimizer.apply([gradients(0)[0], None], weights)
    np.testing.assert_array_equal(weights[1].numpy(), old[1])


def test_no_gradient_at_all_is_keras_error():
    optimizer, weights = DecoupledWeightDecay(make("SGD", RATE), D, decay_unused=True), variables()
    old = values(weights)
    with pytest.raises(ValueError, match="No gradients provided"):
        optimizer.apply([None, None], weights)
    np.testing.assert_array_equal(weights[0].numpy(), old[0])


# Ties.


def test_a_variable_that_is_given_twice_decays_once():
    weights = variables()[:1]
    optimizer = DecoupledWeightDecay(make("SGD", RATE), D)
    a, b = gradients(0)[0], gradients(1)[0]
    old = weights[0].numpy()
    optimizer.apply_gradients([(a, weights[0]), (b, weights[0])])
    np.testing.assert_allclose(
        weights[0].numpy(), old * (1 - D) - RATE * (a + b).numpy(), rtol=1e-13
    )


def test_a_tied_embedding_decays_once():
    from tfwd import layers

    embedding = keras.layers.Embedding(5, 3)
    model = keras.Sequential([embedding, layers.TiedDense(embedding)])
    model.build((None, 2))
    model.compile(DecoupledWeightDecay(make("SGD", 0.0), D), "mse")
    old = model.get_weights()
    model.fit(np.array([[1, 2]]), np.zeros((1, 2, 5)), verbose=0)
    for found, before in zip(model.get_weights(), old, strict=True):
        np.testing.assert_allclose(found, before * (1 - D), rtol=1e-6)


# Half precision and large variables.


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype):
    weight = keras.Variable(np.linspace(-2, 2, 41), dtype=dtype)
    old = tf.cast(tf_variable(weight), tf.float64).numpy()
    DecoupledWeightDecay(make("SGD", 0.0), 0.01).apply([tf.zeros([41], dtype)], [weight])
    right = tf.cast(tf.constant(old * (1 - 0.01)), dtype)
    np.testing.assert_array_equal(
        tf.cast(tf_variable(weight), tf.float32), tf.cast(right, tf.float32)
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_large_variable_takes_decay_and_step_in_one(momentum):
    rng = np.random.default_rng(0)
    start = rng.normal(size=(600, 500))
    weight, other = keras.Variable(start), keras.Variable(start)
    optimizer = DecoupledWeightDecay(make("SGD", RATE, momentum=momentum), D, scale="learning_rate")
    bare = make("SGD", RATE, momentum=momentum)
    step = tf.function(lambda g: optimizer.apply([g], [weight]), autograph=False)
    optimizer.build([weight])
    for number in range(3):
        gradient = tf.constant(rng.normal(size=start.shape))
        if number == 1:
            optimizer.learning_rate = bare.learning_rate = 0.05  # no constant of the compiled step
        other.assign(other.numpy() * (1 - D * float(bare.learning_rate)))
        bare.apply([gradient], [other])
        step(gradient)
    assert len(optimizer._fused._functions) == 1
    np.testing.assert_allclose(weight.numpy(), other.numpy(), rtol=1e-11, atol=1e-14)


def test_exported():
    assert optimizers.DecoupledWeightDecay is DecoupledWeightDecay


@pytest.mark.parametrize("clip", [{}, {"clipnorm": 1.0}, {"global_clipnorm": 1.0}])
def test_clipping_leaves_the_rows_that_are_decayed_alone(clip: dict) -> None:
    embedding = keras.layers.Embedding(6, 2, embeddings_initializer="ones")
    embedding.build((None,))
    inner = keras.optimizers.SGD(0.0, **clip)
    optimizer = optimizers.DecoupledWeightDecay(inner, 0.5, sparse="rows")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(embedding(tf.constant([1, 1, 3])))
    gradient = tape.gradient(loss, tf_variable(embedding.embeddings))
    optimizer.apply([gradient], [embedding.embeddings])
    np.testing.assert_array_equal(embedding.embeddings.numpy()[:, 0], [1, 0.5, 1, 0.5, 1, 1])


@pytest.mark.parametrize("arguments", [{}, {"multipliers": {"weight": 4.0}}])
def test_a_share_of_one_and_more_is_refused(arguments: dict) -> None:
    share = 0.25 if arguments else 1.5
    with pytest.raises(ValueError, match="must be below 1"):
        optimizers.DecoupledWeightDecay("sgd", share, **arguments)
    optimizers.DecoupledWeightDecay("sgd", share, scale="learning_rate", **arguments)
