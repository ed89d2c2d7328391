"""Deleted models are freed, and stored functions can still be differentiated."""

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, extended, once
from tables_by_make_target import with_slow_rest

import tfwd
from tfwd._graph import custom_gradient
from tfwd.layers import VariationalNoise, WeightDropout

X, Y = tf.ones([4, 3]), tf.ones([4, 2])


@pytest.fixture(autouse=True)
def nothing_from_before() -> Iterator[None]:
    """Removes the objects of earlier tests, so that they are not counted."""
    custom_gradient.release_models()
    gc.collect()
    yield


def wrapped(activation: str = "relu") -> keras.Model:
    inner = keras.layers.Dense(4, activation=activation)
    layers = [keras.layers.Input([3]), WeightDropout(inner, 0.5), keras.layers.Dense(2)]
    return keras.Sequential(layers)


def plain(activation: str = "relu") -> keras.Model:
    inner = keras.layers.Dense(4, activation=activation)
    return keras.Sequential([keras.layers.Input([3]), inner, keras.layers.Dense(2)])


def fit(model: keras.Model, optimizer: object = "sgd", callbacks: tuple = ()) -> None:
    model.compile(optimizer, "mse")
    model.fit(X, Y, epochs=2, verbose=0, callbacks=list(callbacks))


def fit_noise() -> None:
    layer = VariationalNoise(keras.layers.Dense(2), 0.1)
    fit(keras.Sequential([keras.layers.Input([3]), layer]), "adam")


def step_of_a_users_own() -> None:
    model = wrapped()

    @tf.function
    def step(x: tf.Tensor) -> list:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    step(X)


def moments() -> None:
    model = wrapped()

    @tf.function
    def of_a_batch(x: tf.Tensor, y: tf.Tensor) -> tuple:
        return tuple(tfwd.gradients.moments(model, x, y, "mse", training=True))

    of_a_batch(X, Y)


def with_a_callback() -> None:
    fit(wrapped(), callbacks=(tfwd.callbacks.GradientSquaredMean(every_n_steps=1),))


def with_optimizers() -> None:
    inner = keras.optimizers.Adam(0.1)
    fit(wrapped(), tfwd.optimizers.DecoupledWeightDecay(inner, 0.1, exclude=[".*bias"]))


WAYS = {
    "fit": lambda: fit(wrapped()),
    "a tf.function": step_of_a_users_own,
    "moments": moments,
    "optimizers": with_optimizers,
    "callbacks": with_a_callback,
    "noise": fit_noise,
}


def kept() -> Counter:
    """Counts the traces of a stored model: its variables, its graphs, and names of gradients."""
    objects = gc.get_objects()
    eager = type(tf.constant(0))
    return Counter(
        variables=sum(isinstance(x, eager) and x.dtype == tf.resource for x in objects),
        graphs=sum(isinstance(x, tf.Graph) for x in objects),
        names=len(custom_gradient.registered()),
    )


def grown(way: Callable[[], None], models: int) -> Counter:
    """Counts the objects that the models leave, without the objects of the first two."""
    found = Counter()
    for number in range(models):
        way()
        if IS_KERAS_2:
            keras.backend.clear_session()
        else:
            keras.backend.clear_session(free_memory=False)
        if number in (1, models - 1):
            gc.collect()
            found, before = kept(), found
    found.subtract(before)
    return found


@pytest.mark.parametrize("way", with_slow_rest(WAYS, ("fit", "a tf.function", "moments")))
def test_models_that_were_dropped_leave_nothing(way):
    assert not any(grown(WAYS[way], 3).values())


@pytest.mark.slow
@once
def test_fifty_models_leave_nothing():
    """Checks fifty models of the most common kind; three of each other kind show the same."""
    assert not any(grown(WAYS["fit"], 50).values())


@extended
def test_gradients_of_others_inside_a_layer_leave_less_than_in_a_plain_one():
    """Checks gradients such as TensorFlow's silu.

    Keras 2 traces it once more, in a graph without tfwd.
    """
    ours, theirs = (grown(lambda make=make: fit(make("silu")), 3) for make in (wrapped, plain))
    assert all(ours[what] < theirs[what] for what in ("variables", "graphs", "names"))


def test_plain_models_leave_their_variables_until_they_are_released():
    # Graphs that other tests keep, such as the graphs of a model that several tests share.
    before = custom_gradient.registered()
    left = grown(lambda: fit(plain()), 3)
    assert left["variables"] > 0, "TensorFlow has mended it: docs/memory.md is no longer true"
    custom_gradient.release_models()
    gc.collect()
    assert custom_gradient.registered() <= before


def test_steps_of_one_model_leave_nothing():
    model = wrapped()
    data = tf.data.Dataset.from_tensors((X, Y)).repeat(300)
    model.compile("adam", "mse")
    counts = []
    for _ in range(3):
        model.fit(data, shuffle=False, verbose=0)
        gc.collect()
        counts.append((sum(kept().values()), len(gc.get_objects())))
    assert counts[2][0] == counts[1][0]
    assert counts[2][1] - counts[1][1] < 30  # a step that left one object would leave 300


# Functions whose layers are deleted. The gradients are made up, so that a test notices other
# gradients: 7 x for the first derivative, and 7 for the second.


@custom_gradient.custom_gradient
def marked(x):
    return 2.0 * x, lambda upstream: 7.0 * x * upstream


@tf.custom_gradient
def marked_by_a_user(x):
    return 2.0 * x, lambda upstream: 7.0 * x * upstream


SPEC = tf.TensorSpec([], tf.float32)


def looped(f: Callable) -> Callable:
    return lambda x: tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, f(y)), [0, x])[1]


FUNCTIONS = {
    "as it is": lambda f: f,
    "in a function": lambda f: tf.function(f),
    "in a loop": looped,
    "compiled": lambda f: tf.function(f, jit_compile=True),
    "twice": lambda f: lambda x: f(x) + 0.0 * f(x),
}


@pytest.fixture(params=[marked, marked_by_a_user], ids=["ours", "a user's"])
def kept_function(request) -> Callable[[str], Callable]:
    def make(way: str) -> Callable:
        made = tf.function(FUNCTIONS[way](request.param)).get_concrete_function(SPEC)
        custom_gradient.release_models()
        gc.collect()
        return made

    return make


@pytest.mark.parametrize("way", FUNCTIONS)
def test_a_function_that_is_kept_has_its_gradient(kept_function, way):
    function, x = kept_function(way), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    gc.collect()
    assert float(tape.gradient(y, x)) == 21.0

    @tf.function
    def outer(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        gc.collect()
        return tape.gradient(y, x)

    assert float(outer(x)) == 21.0


def test_second_derivatives(kept_function):
    function, x = kept_function("as it is"), tf.constant(3.0)

    @tf.function
    def second(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = function(x)
            first = inner.gradient(y, x)
        gc.collect()
        return outer.gradient(first, x)

    assert float(second(x)) == 7.0


def test_a_saved_function_has_its_gradient(tmp_path):
    module = tf.Module()
    module.function = tf.function(marked, input_signature=[SPEC])
    module.function(1.0)
    gc.collect()
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=True)
    tf.saved_model.save(module, str(tmp_path), options=options)
    del module
    custom_gradient.release_models()
    gc.collect()
    loaded, x = tf.saved_model.load(str(tmp_path)), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loaded.function(x)
    assert float(tape.gradient(y, x)) == 21.0


def test_a_function_outlives_its_layer():
    function, kernel, layer = traced_and_dropped()
    custom_gradient.release_models()
    gc.collect()
    assert layer() is None
    with tf.GradientTape() as tape:
        y = function(X)
    # With a kernel and inputs of ones, the outputs are sums over a column's mask, divided by keep.
    columns = tf.reduce_sum(tape.gradient(y, kernel), 0) / len(X)
    np.testing.assert_array_equal(columns, y[0])


def traced_and_dropped() -> tuple[Callable, keras.Variable, weakref.ref]:
    """Returns a layer's function, its kernel, and a weak reference to the deleted layer.

    A function of its own, since frames may keep deleted objects before Python 3.13 (PEP 667).
    """
    layer = WeightDropout(keras.layers.Dense(2, use_bias=False), 0.5, seed=1)
    layer(X)
    (kernel,) = layer.trainable_variables
    kernel.assign(tf.ones([3, 2]))
    function = tf.function(functools.partial(layer, training=True)).get_concrete_function(X)
    # TensorFlow's functions do not hold their variables. The layer's count of calls is one.
    function.held = function.variables
    return function, kernel, weakref.ref(layer)
