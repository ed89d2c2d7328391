"""Repeated rows of a sparse gradient: the same step as with the dense gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import NAMES, make
from optimizer_tools import tf_variable
from replicas import two_replicas
from stack_marks import extended, needs_keras3, quick_rows

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD
from tfwd.optimizers.addons import AdamW, extend_with_decoupled_weight_decay

LossScale = keras.optimizers.LossScaleOptimizer
D, RATE = 0.03125, 0.125
# Keras rounds other values to float32.
EXACT = {"beta_1": 0.875, "beta_2": 0.75, "epsilon": 2.0**-20}
ROWS = np.array([3, 0, 3, 3, 5])
PARTS = np.random.default_rng(0).normal(size=(3, 5, 2))
START = np.linspace(-1, 1, 12).reshape(6, 2)


def bare(**options):
    return DecoupledWeightDecay(keras.optimizers.Adam(RATE, **options), 0)


def stepped(optimizer, sparse=True, dtype="float64", compiled=None, rows=ROWS):
    """Returns a table after three steps with the same gradients, sparse or dense."""
    table = keras.Variable(START, dtype=dtype, name="table")
    optimizer.build([table])

    def step(parts):
        gradient = tf.IndexedSlices(parts, tf.constant(rows), tf.constant([6, 2]))
        if not sparse:
            gradient = tf.convert_to_tensor(gradient)
        optimizer.apply_gradients([(gradient, table)])

    function = step if compiled is None else tf.function(step, jit_compile=compiled)
    for parts in PARTS:
        function(tf.constant(parts, dtype))
    return table.numpy()


def adam(decay=0.0):
    """Returns Adam's table in NumPy, after a decay, on the sum of each row's parts."""
    weight, m, v = START.copy(), np.zeros_like(START), np.zeros_like(START)
    for t, parts in enumerate(PARTS, 1):
        gradient = np.zeros_like(START)
        np.add.at(gradient, ROWS, parts)
        weight *= 1 - decay
        m += 0.125 * (gradient - m)
        v += 0.25 * (gradient**2 - v)
        rate = RATE * np.sqrt(1 - 0.75**t) / (1 - 0.875**t)
        weight -= rate * m / (np.sqrt(v) + 2.0**-20)
    return weight


KINDS = {
    "decay of zero": (lambda: bare(**EXACT), 0.0),
    "decay": (lambda: DecoupledWeightDecay(make("Adam", RATE, **EXACT), D), D),
    "AdamW": (lambda: AdamW(D, RATE, sparse="table", **EXACT), D),
    "extended": (
        lambda: extend_with_decoupled_weight_decay(keras.optimizers.Adam)(
            D, learning_rate=RATE, sparse="table", **EXACT
        ),
        D,
    ),
    "averages": (lambda: NonMonotonicASGD(make("Adam", RATE, **EXACT)), 0.0),
    "averages of decay": (lambda: NonMonotonicASGD(KINDS["decay"][0]()), D),
    "decay of averages": (
        lambda: DecoupledWeightDecay(NonMonotonicASGD(make("Adam", RATE, **EXACT)), D),
        D,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_adam(kind):
    made, decay = KINDS[kind]
    np.testing.assert_allclose(stepped(made()), adam(decay), rtol=1e-12)


def test_only_the_rows_in_it_are_decayed_where_that_is_asked_for():
    found = stepped(DecoupledWeightDecay(make("Adam", RATE, **EXACT), D, sparse="rows"))
    expected = np.where(np.isin(np.arange(6), ROWS)[:, None], adam(D), START)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("Adam", "Muon")])
def test_every_optimizer_as_with_the_dense_gradient(name):
    found, expected = (
        stepped(DecoupledWeightDecay(make(name), 0), sparse) for sparse in (True, False)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


CLIPS = [{"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {"clipvalue": 0.3}]


@pytest.mark.parametrize("name", ["Adam", "SGD"])
@pytest.mark.parametrize("clip", CLIPS, ids=str)
def test_clipping_is_of_the_sum(name, clip):
    """Checks that clipping uses the norm of the sum, not the norm of the separate parts."""
    optimizers = [DecoupledWeightDecay(make(name, **clip), D) for _ in range(2)]
    found, expected = stepped(optimizers[0]), stepped(optimizers[1], sparse=False)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert abs(stepped(make(name, **clip)) - stepped(make(name, **clip), sparse=False)).max() > 1e-3


@quick_rows("False-*", "True-clip2")
@pytest.mark.parametrize(
    ("compiled", "clip"), [(False, {"clipnorm": 0.5}), (True, {}), (True, {"clipnorm": 0.5})]
)
def test_in_a_function_with_xla_and_without(compiled, clip):
    def optimizer():
        return NonMonotonicASGD(DecoupledWeightDecay(make("Adam", **clip), D))

    found = stepped(optimizer(), compiled=compiled)
    np.testing.assert_allclose(found, stepped(optimizer(), sparse=False), rtol=1e-6)


@needs_keras3("gradient accumulation")
def test_accumulated():
    options = {"gradient_accumulation_steps": 2, "clipnorm": 0.5}
    found, expected = (
        stepped(DecoupledWeightDecay(make("Adam", **options), D), sparse)
        for sparse in (True, False)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("float32", 1e-5)])
def test_in_the_dtype_of_the_gradient(dtype, tolerance):
    found, expected = (stepped(bare(), sparse, dtype) for sparse in (True, False))
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, atol=tolerance)


@pytest.mark.parametrize("kind", [DecoupledWeightDecay, AdamW, NonMonotonicASGD])
def test_keras_s_own_way_on_demand(kind):
    """Checks the wrapped optimizer's own way bit for bit, also from its config."""
    inner = {} if kind is AdamW else {"optimizer": make("Adam", clipnorm=0.5)}
    rest = {NonMonotonicASGD: {}, DecoupledWeightDecay: {"weight_decay": 0}}
    more = rest.get(kind, {"weight_decay": 0, "learning_rate": 0.1, "clipnorm": 0.5})
    made = kind(**inner, **more, sum_repeated_rows=False)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert again.__class__ is kind and again.sum_repeated_rows is False
    assert kind(**inner, **more).get_config()["sum_repeated_rows"] is True
    plain = stepped(make("Adam", clipnorm=0.5))
    for optimizer in (made, again):
        np.testing.assert_array_equal(stepped(optimizer), plain)
    with pytest.raises(TypeError, match="sum_repeated_rows='no': expected True, or False"):
        kind(**inner, **more, sum_repeated_rows="no")


def test_without_repetition_it_is_the_wrapped_optimizer_bit_for_bit():
    rows = np.array([4, 0, 1, 5, 2])
    np.testing.assert_array_equal(
        stepped(bare(), rows=rows), stepped(make("Adam", RATE), rows=rows)
    )


def operations(optimizer):
    table = keras.Variable(START, name="table")
    optimizer.build([table])

    @tf.function
    def step(parts):
        gradient = tf.IndexedSlices(parts, tf.constant(ROWS), tf.constant([6, 2]))
        optimizer.apply_gradients([(gradient, table)])

    graph = step.get_concrete_function(tf.TensorSpec((5, 2))).graph.as_graph_def()
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return [node.op for node in nodes].count("Unique")


@needs_keras3("optimizer that leaves the sum to this")
def test_it_costs_what_it_must_and_no_more():
    """Checks the cost: SGD is linear in the gradient unless it clips; two wrappers add up once."""
    adam, sgd = keras.optimizers.Adam, keras.optimizers.SGD
    assert operations(DecoupledWeightDecay(sgd(RATE, momentum=0.9), D)) == 0
    assert operations(DecoupledWeightDecay(sgd(RATE, clipnorm=1.0), D)) == 1
    assert operations(DecoupledWeightDecay(adam(RATE, clipnorm=1.0), D)) == 1
    assert operations(NonMonotonicASGD(DecoupledWeightDecay(adam(RATE), D))) == 1


# In fit.

WORDS = np.array([[1, 1, 1, 2], [0, 1, 1, 3], [1, 4, 1, 1], [2, 2, 1, 5]])
TARGETS = np.array([[1.0], [-1.0], [0.5], [2.0]], "float32")


def language(sparse, optimizer, **options):
    """Returns a model of words, by lookups or by one-hot products, after five epochs."""
    keras.utils.set_random_seed(1)
    first = keras.layers.Embedding(6, 2) if sparse else keras.layers.Dense(2, use_bias=False)
    inputs = keras.Input((4,), dtype="int32") if sparse else keras.Input((4, 6))
    pooled = keras.layers.GlobalAveragePooling1D()
    net = keras.Sequential([inputs, first, pooled, keras.layers.Dense(1)])
    net.set_weights([START, np.array([[1.0], [-1.0]]), np.zeros(1)])
    net.compile(optimizer, "mse", **options)
    x = WORDS if sparse else np.eye(6, dtype="float32")[WORDS]
    net.fit(x, TARGETS, epochs=5, batch_size=4, verbose=0)
    return net.get_weights()


@pytest.fixture(scope="module")
def expected():
    return language(False, keras.optimizers.Adam(RATE))


FITS = {
    "default": (bare, {}),
    "eager": (bare, {"run_eagerly": True}),
    "averages": (lambda: NonMonotonicASGD(keras.optimizers.Adam(RATE)), {}),
    "scale around": (lambda: LossScale(bare()), {}),
    "scale inside": (lambda: DecoupledWeightDecay(LossScale(keras.optimizers.Adam(RATE)), 0), {}),
}


@quick_rows("default")
@pytest.mark.filterwarnings("ignore:.*has not observed any validation loss")
@pytest.mark.parametrize("kind", FITS)
def test_an_embedding_in_fit(kind, expected):
    made, options = FITS[kind]
    for a, b in zip(language(True, made(), **options), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@extended
@needs_keras3("optimizer of its own that does not add them up")
def test_what_keras_does_by_itself(expected):
    """Checks Keras's own behaviour, which makes the repair necessary."""
    found = language(True, keras.optimizers.Adam(RATE))
    assert abs(found[0] - expected[0]).max() > 0.05


@pytest.fixture(scope="module")
def strategy():
    return two_replicas()


@extended
@pytest.mark.parametrize(("clip", "nested"), [({}, True), ({"clipnorm": 0.5}, False)])
def test_on_two_replicas(strategy, clip, nested):
    """Checks rows that are repeated on a replica, and rows that both replicas have."""
    tables = []
    for sparse in (True, False):
        with strategy.scope():
            table = keras.Variable(START, dtype="float64", name="table")
            optimizer = DecoupledWeightDecay(make("Adam", **clip), D)
            optimizer = NonMonotonicASGD(optimizer) if nested else optimizer
            optimizer.build([table])

        def replica(parts, table=table, optimizer=optimizer, sparse=sparse):
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            rows = tf.constant(ROWS, tf.int32) - number * [1, 0, 0, 0, 2]
            gradient = tf.IndexedSlices(parts, rows, tf.constant([6, 2]))
            gradient = gradient if sparse else tf.convert_to_tensor(gradient)
            optimizer.apply_gradients([(gradient, table)])

        step = tf.function(lambda parts, replica=replica: strategy.run(replica, args=(parts,)))
        for parts in PARTS:
            step(tf.constant(parts))
        copies = strategy.experimental_local_results(tf_variable(table))
        np.testing.assert_array_equal(copies[0].numpy(), copies[1].numpy())
        tables.append(copies[0].numpy())
    np.testing.assert_allclose(tables[0], tables[1], rtol=1e-9)
