"""`tfwd.parametrize(..., in_place=True)` on layers and models of many kinds, and in many programs.

The oracle is a second plain model of the same kind. Its weights are set to the effective weights
that the parametrization announces. Its gradients are multiplied by the factors of the masks.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stacks import IS_KERAS_2, quick_rows

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 6)).astype("float32")
S = RNG.normal(size=(4, 3, 6)).astype("float32")
IDS = np.array([[1, 2, 0], [3, 0, 0], [4, 1, 2], [2, 2, 0]])
DENSE = keras.layers.Dense


def variables(model: Any) -> list[tf.Variable]:
    return [*map(_keras.variables.tf_variable, model.trainable_variables)]


def made(make: Callable[[], Any], x: Any) -> Any:
    """Returns a built model. Models of one kind have the same weights."""
    keras.utils.set_random_seed(2)
    model = make()
    model(x)
    return model


def added(model: Any) -> Any:
    (one,) = tfwd.added_parametrizations(model)
    return one


def effective(model: Any, call: int) -> dict[int, np.ndarray]:
    """Returns the effective weights of a call, by the ids of the variables."""
    one = added(model)
    values = one.effective_weights(call).values()
    return {id(t.variable): np.asarray(v) for (t, _), v in zip(one.targeted, values, strict=True)}


def flat(outputs: Any) -> list[Any]:
    return tf.nest.flatten(outputs)


def stepped(model: Any, x: Any) -> list[Any]:
    """Returns the outputs, the loss and the gradients of a training call."""
    with tf.GradientTape() as tape:
        outputs = flat(model(x, training=True))
        loss = tf.add_n([tf.reduce_sum(tf.sin(tf.cast(o, tf.float32))) for o in outputs])
        loss += tf.add_n([tf.cast(one, tf.float32) for one in model.losses] or [0.0])
    gradients = tape.gradient(loss, variables(model))
    return [*outputs, loss, *[tf.convert_to_tensor(g) for g in gradients]]


RUNS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "eager": stepped,
    "graph": lambda model, x: tf.function(lambda: stepped(model, x))(),
}


def assert_equals_plain(
    make: Callable[[], Any], x: Any, pattern: str, run: str, calls: int = 2, **options: Any
) -> Any:
    """Compares training calls with the plain model: outputs, loss, gradients, and updates."""
    model, plain = made(make, x), made(make, x)
    expected = flat(model(x))
    tfwd.parametrize(model, {pattern: P.Dropout(0.5)}, seed=1, in_place=True, **options)
    for one, other in zip(flat(model(x)), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    trained = {id(v) for v in model.trainable_weights}
    for call in range(calls):
        values = effective(model, call)
        assert values and any((v == 0).any() for v in values.values())
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        got, wanted = RUNS[run](model, x), stepped(plain, x)
        assert len(got) == len(wanted)
        outputs = len(got) - len(model.trainable_weights)
        for a, b in zip(got[:outputs], wanted[:outputs], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        for v, a, b in zip(model.trainable_variables, got[outputs:], wanted[outputs:], strict=True):
            factor = 2.0 * (values[id(v)] != 0) if id(v) in values else 1.0
            np.testing.assert_allclose(a, b * factor, rtol=1e-4, atol=1e-5)
        for v, other in zip(model.weights, plain.weights, strict=True):
            if id(v) not in trained:  # such as moving statistics
                np.testing.assert_allclose(v, other, rtol=1e-5, atol=1e-6)
    assert added(model).calls == calls
    return model


class Held(keras.Model):
    """A model that keeps its layers in lists and dicts, of which some are in others."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = {"first": [DENSE(5), DENSE(4)], "second": {"last": DENSE(3)}}

    def call(self, x: Any, training: Any = None) -> Any:
        for part in self.parts["first"]:
            x = part(x)
        return self.parts["second"]["last"](x)


class Positional(keras.Model):
    """A model that passes the training flag as a positional argument, to layers of two kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.untrained = Block(), NoFlag()

    def call(self, x: Any, training: Any = False) -> Any:
        # Keras 3 takes only tensors as positional arguments.
        hidden = self.inner(x, training) if IS_KERAS_2 else self.inner(x, training=training)
        return self.untrained(hidden)


class Block(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(4)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any, training: Any = False) -> Any:
        return self.dense(x) + (1.0 if training else 0.0)


class NoFlag(keras.layers.Layer):
    """A layer whose call has no training argument."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(4)

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale_kernel")
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.dense(x * tf.convert_to_tensor(self.scale))


class Losses(keras.layers.Layer):
    """A layer that adds a loss of its output and one of its weight."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.built = True

    def call(self, x: Any) -> Any:
        kernel = tf.convert_to_tensor(self.kernel)
        y = tf.matmul(x, kernel)
        self.add_loss(tf.reduce_mean(y**2))
        self.add_loss(tf.reduce_sum(tf.abs(kernel)))
        return y


class Cell(keras.layers.Layer):
    """A cell of a recurrent layer."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_size = self.output_size = 3

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), name="kernel")
        self.again = self.add_weight(shape=(3, 3), name="again_kernel")
        self.built = True

    def call(self, x: Any, states: Any) -> Any:
        state = states[0] if isinstance(states, (list, tuple)) else states
        kernel, again = tf.convert_to_tensor(self.kernel), tf.convert_to_tensor(self.again)
        state = tf.tanh(tf.matmul(x, kernel) + tf.matmul(state, again))
        return state, [state]


class Reader(keras.layers.Layer):
    """A layer that reads a weight of another layer, which Keras does not know to be inside."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self._other = lambda: other

    def call(self, x: Any) -> Any:
        return tf.matmul(x, tf.convert_to_tensor(self._other().kernel), transpose_b=True)


class Back(keras.Model):
    """A model with an inner layer that reads the weight of a sibling."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(4)
        self.reader = Reader(self.dense)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.reader(self.dense(x))


def doubled() -> Any:
    layer = DENSE(4)
    before = layer.call
    object.__setattr__(layer, "call", lambda *args, **kwargs: 2.0 * before(*args, **kwargs))
    return layer


def functional(make: Callable[[Any], Any], shape: tuple[int, ...], dtype: str = "float32") -> Any:
    x = keras.Input(shape, dtype=dtype)
    return keras.Model(x, make(x))


def several() -> keras.Model:
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    shared = DENSE(4)
    hidden = keras.layers.concatenate([shared(a), shared(b)])
    return keras.Model({"a": a, "b": b}, {"y": DENSE(2)(hidden), "z": DENSE(1)(hidden)})


def in_sequences(layer: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: functional(lambda x: layer()(x), (3, 6))


def masked(x: Any) -> Any:
    hidden = keras.layers.Embedding(6, 4, mask_zero=True)(x)
    return keras.layers.LSTM(3)(keras.layers.LSTM(4, return_sequences=True)(hidden))


def shared_inside(x: Any) -> Any:
    inner = keras.Sequential([keras.Input((6,)), DENSE(6, activation="tanh"), DENSE(6)])
    outer = keras.Sequential([keras.Input((6,)), inner, DENSE(6)])
    return inner(outer(inner(x)))


MODELS: dict[str, tuple[Callable[[], Any], str, Any]] = {
    "several inputs and outputs": (several, ".*kernel", {"a": X, "b": X + 1}),
    "masks": (lambda: functional(masked, (3,), "int32"), "embeddings|.*kernel", IDS),
    "lists and dicts": (Held, ".*kernel", X),
    "positional flag": (Positional, ".*kernel", X),
    "no flag": (NoFlag, ".*kernel", X),
    "losses": (lambda: functional(lambda x: Losses()(x), (6,)), "kernel", X),
    "activity": (
        lambda: functional(lambda x: DENSE(4, activity_regularizer="l2")(x), (6,)),
        "kernel",
        X,
    ),
    "batch normalization": (
        lambda: functional(lambda x: keras.layers.BatchNormalization()(DENSE(4)(x)), (6,)),
        "kernel|gamma",
        X,
    ),
    "bidirectional": (
        in_sequences(lambda: keras.layers.Bidirectional(keras.layers.LSTM(3))),
        ".*kernel",
        S,
    ),
    "bidirectional sum of sequences": (
        in_sequences(
            lambda: keras.layers.Bidirectional(
                keras.layers.GRU(3, return_sequences=True), merge_mode="sum"
            )
        ),
        ".*recurrent_kernel",
        S,
    ),
    "in time": (in_sequences(lambda: keras.layers.TimeDistributed(DENSE(3))), ".*kernel", S),
    "recurrent dropout of 0": (
        in_sequences(lambda: keras.layers.LSTM(3, unroll=True)),
        ".*kernel",
        S,
    ),
    "custom cells": (
        in_sequences(lambda: keras.layers.RNN([Cell(), keras.layers.GRUCell(2)])),
        ".*kernel",
        S,
    ),
    "custom cell": (in_sequences(lambda: keras.layers.RNN(Cell())), ".*kernel", S),
    "nested, shared": (lambda: functional(shared_inside, (6,)), ".*kernel", X),
    "reads a sibling": (Back, ".*kernel", X),
    "call replaced": (lambda: functional(lambda x: DENSE(2)(doubled()(x)), (6,)), ".*kernel", X),
    "convolutions": (
        in_sequences(
            lambda: keras.Sequential(
                [
                    keras.layers.Conv1D(4, 2, padding="same"),
                    keras.layers.SeparableConv1D(3, 2, padding="same"),
                ]
            )
        ),
        ".*kernel",
        S,
    ),
    "layer normalization": (
        in_sequences(lambda: keras.layers.LayerNormalization()),
        "gamma",
        S,
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_training_calls_equal_the_plain_model(kind: str) -> None:
    make, pattern, x = MODELS[kind]
    assert_equals_plain(make, x, pattern, "graph")


@quick_rows("masks", "custom cells")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.usefixtures("all_large")
def test_large_weights_equal_the_plain_model(kind: str) -> None:
    make, pattern, x = MODELS[kind]
    assert_equals_plain(make, x, pattern, "eager")


def stack() -> keras.Model:
    return keras.Sequential([keras.Input((6,)), DENSE(5, activation="tanh"), DENSE(1)])


DROPPED = {".*kernel": P.Dropout(0.5)}


class TestTraces:
    """Functions of `fit` that were traced before a change."""

    @pytest.mark.parametrize("inner", [False, True])
    def test_fit_before_and_after(self, inner: bool) -> None:
        model = made(stack, X)
        target = model.layers[0] if inner else model
        model.compile("sgd", "mse")
        model.fit(X, X[:, :1], batch_size=2, verbose=0)
        tfwd.parametrize(target, DROPPED, seed=1, in_place=True)
        model.fit(X, X[:, :1], batch_size=2, verbose=0)
        one = added(target)
        assert one.calls == 2
        tfwd.unwrap(target)
        model.fit(X, X[:, :1], batch_size=2, verbose=0)
        assert one.calls == 2

    def test_a_model_around_the_target(self) -> None:
        """Evaluation changes too, if the parametrization acts in evaluation."""
        inner = made(stack, X)
        outer = keras.Sequential([keras.Input((6,)), inner])
        around = Outer(outer)
        around(X)
        around.compile("sgd", "mse")
        around.predict(X, verbose=0)
        around.evaluate(X, X[:, :1], verbose=0)
        around.train_on_batch(X, X[:, :1])
        tfwd.parametrize(inner.layers[0], {"kernel": P.WeightNorm()}, in_place=True)
        np.testing.assert_allclose(around.predict(X, verbose=0), around(X), rtol=1e-4, atol=1e-5)
        loss = float(np.mean((np.asarray(around(X)) - X[:, :1]) ** 2))
        assert around.evaluate(X, X[:, :1], verbose=0) == pytest.approx(loss, rel=1e-4)
        before = added(inner).calls
        around.train_on_batch(X, X[:, :1])
        assert added(inner).calls == before + 1
        tfwd.unwrap(inner, fold=True)
        np.testing.assert_allclose(around.predict(X, verbose=0), around(X), rtol=1e-4, atol=1e-5)

    def test_a_function_from_before_unwrap_can_still_be_called(self) -> None:
        model = made(stack, X)
        expected = model(X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        old = tf.function(lambda x: model(x, training=True))
        old(X)
        tfwd.unwrap(model)
        old(X)
        np.testing.assert_array_equal(model(X, training=True), expected)
        new = tf.function(lambda x: model(x, training=True))
        np.testing.assert_allclose(new(X), expected, rtol=1e-5, atol=1e-6)

    def test_each_way_of_training_counts_each_call(self) -> None:
        model = made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        raw, found = model.get_weights(), []
        options: list[dict[str, Any]] = [{}, {"run_eagerly": True}, {"steps_per_execution": 2}]
        for option in options:
            model.set_weights(raw)
            one = added(model)
            one.draws.state.assign([1, 0])
            model.compile("sgd", "mse", **option)
            model.fit(X, X[:, :1], batch_size=1, verbose=0, shuffle=False)
            assert one.calls == 4
            found.append(model.get_weights())
        for weights in found[1:]:
            for a, b in zip(weights, found[0], strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_training_on_batches(self) -> None:
        """Four steps of `fit` equal four calls of `train_on_batch`."""
        found = []
        for alone in (False, True):
            model = made(stack, X)
            tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
            model.compile("sgd", "mse")
            if alone:
                for i in range(4):
                    model.train_on_batch(X[i : i + 1], X[i : i + 1, :1])
            else:
                model.fit(X, X[:, :1], batch_size=1, verbose=0, shuffle=False)
            assert added(model).calls == 4
            found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_passes_of_a_loop_draw_anew(self) -> None:
        """Sums the gradients of three calls in a `tf.while_loop`."""
        model, plain = made(stack, X), made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)

        @tf.function(autograph=False)
        def total() -> Any:
            def body(number: Any, sums: list[Any]) -> Any:
                gradients = stepped(model, X)[2:]
                return number + 1, [a + b for a, b in zip(sums, gradients, strict=True)]

            first = [tf.zeros_like(v) for v in variables(model)]
            return tf.while_loop(lambda n, _: n < 3, body, [tf.constant(0), first])[1]

        got = total()
        assert added(model).calls == 3
        expected = [np.zeros_like(w) for w in model.get_weights()]
        for call in range(3):
            values = effective(model, call)
            plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
            for v, sum_, g in zip(model.weights, expected, stepped(plain, X)[2:], strict=True):
                sum_ += np.asarray(g) * (2.0 * (values[id(v)] != 0) if id(v) in values else 1.0)
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Pair(keras.Model):
    """A custom model of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = DENSE(6, name="first"), DENSE(2, name="second")

    def call(self, x: Any, training: Any = None) -> Any:
        return self.second(self.first(x, training=training), training=training)


class TestSeveral:
    """Several parametrizations that meet in one layer."""

    @pytest.mark.parametrize("large", [False, True])
    @pytest.mark.parametrize("order", ["inner first", "outer first"])
    def test_a_model_inside_a_model(self, order: str, large: bool, request: Any) -> None:
        """The chain of both acts on the inner weights, in the order in which they were added."""
        if large:
            request.getfixturevalue("all_large")

        def make() -> Any:
            return Outer(Pair())

        model, plain = made(make, X), made(make, X)
        targets = [model.inner, model][:: 1 if order == "inner first" else -1]
        for seed, target in enumerate(targets):
            tfwd.parametrize(target, DROPPED, seed=seed, in_place=True)
        last = next(one for one in tfwd.added_parametrizations(model) if one.target is targets[-1])
        for call in range(2):
            weights = last.effective_weights(call).values()
            values = {
                id(t.variable): np.asarray(v)
                for (t, _), v in zip(last.targeted, weights, strict=True)
            }
            plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
            got, wanted = stepped(model, X), stepped(plain, X)
            np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
            for v, a, b in zip(model.weights, got[2:], wanted[2:], strict=True):
                factor = 4.0 * (values[id(v)] != 0) if id(v) in values else 1.0
                np.testing.assert_allclose(a, b * factor, rtol=1e-4, atol=1e-5)
        assert [one.calls for one in tfwd.added_parametrizations(model)] == [2, 2]

    @pytest.mark.parametrize("graph", [False, True])
    @pytest.mark.usefixtures("all_large")
    def test_one_layer_of_two_with_equal_code(self, graph: bool) -> None:
        """The second layer has one parametrization more, and an own number of calls."""

        def make() -> Any:
            x = keras.Input((6,))
            first, second = DENSE(6, activation="tanh"), DENSE(6, activation="tanh")
            return keras.Model(x, second(first(x)))

        model, plain = made(make, tf.constant(X)), made(make, tf.constant(X))
        tfwd.parametrize(model.layers[2], {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
        tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=2, in_place=True)
        run: Any = RUNS["graph" if graph else "eager"]
        outer = tfwd.added_parametrizations(model)[0]
        values = [np.asarray(v) for v in outer.effective_weights(0).values()]
        weights = plain.get_weights()
        plain.set_weights([values[0], weights[1], values[1], weights[3]])
        got, wanted = run(model, X), stepped(plain, X)
        factors = [2.0 * (values[0] != 0), 1.0, 4.0 * (values[1] != 0), 1.0]
        for a, b, factor in zip(got[2:], wanted[2:], factors, strict=True):
            np.testing.assert_allclose(a, b * factor, rtol=1e-4, atol=1e-5)

    @pytest.mark.usefixtures("all_large")
    def test_equal_layers_of_which_one_has_two_of_its_own(self) -> None:
        first, second = DENSE(6, activation="tanh"), DENSE(6, activation="tanh")
        x = tf.constant(X)
        for layer, times in ((first, 1), (second, 2)):
            layer(x)
            for seed in range(times):
                tfwd.parametrize(layer, DROPPED, seed=seed, in_place=True)
        plain = made(lambda: DENSE(6, activation="tanh"), x)
        for layer, scale in ((first, 2.0), (second, 4.0)):
            (kernel,) = tfwd.added_parametrizations(layer)[-1].effective_weights(0).values()
            plain.set_weights([np.asarray(kernel), layer.get_weights()[1]])
            got, wanted = stepped(layer, x), stepped(plain, x)
            np.testing.assert_allclose(got[0], wanted[0], rtol=1e-4, atol=1e-5)
            expected = wanted[2] * scale * (np.asarray(kernel) != 0)
            np.testing.assert_allclose(got[2], expected, rtol=1e-4, atol=1e-5)
            assert {one.calls for one in tfwd.added_parametrizations(layer)} == {1}

    def test_an_embedding_with_two(self) -> None:
        def make() -> Any:
            return functional(lambda x: keras.layers.Embedding(6, 4)(x), (3,), "int32")

        model = made(make, IDS)
        for seed in (1, 2):
            parts = {"embeddings": P.GaussianNoise(0.5)}
            tfwd.parametrize(model, parts, seed=seed, in_place=True)
        one, other = tfwd.added_parametrizations(model)
        (table,) = other.effective_weights(0).values()
        expected = tf.gather(table, IDS)
        np.testing.assert_allclose(model(IDS, training=True), expected, rtol=1e-5, atol=1e-6)
        assert one.calls == other.calls == 1

    @pytest.mark.parametrize("kind", ["lookup", "recurrent", "product"])
    def test_a_wrapper_around_a_layer_with_one_in_place(self, kind: str) -> None:
        """Fast ways of calling a layer do not go past the layer's own parametrization."""
        layer, x, weight = {
            "lookup": (keras.layers.Embedding(6, 4), IDS, "embeddings"),
            "recurrent": (keras.layers.LSTM(3), S, "recurrent_kernel"),
            "product": (DENSE(3), X, "kernel"),
        }[kind]
        layer(x)
        tfwd.parametrize(layer, {weight: P.GaussianNoise(100.0)}, seed=1, in_place=True)
        options = {"per_example": True} if kind == "product" else {}
        wrapped = layers.WeightDropout(layer, 0.25, weights=[weight], seed=2, **options)
        before = np.asarray(wrapped(x))
        after = np.asarray(wrapped(x, training=True))
        assert added(layer).calls == 1 and wrapped.calls == 1
        assert np.abs(before).max() < 10 and (kind == "recurrent" or np.abs(after).max() > 10)

    def test_masks_for_each_example_around_another_one(self) -> None:
        model = made(lambda: keras.Sequential([keras.Input((6,)), DENSE(3)]), X)
        tfwd.parametrize(model, {"kernel": P.Dropout(0.0)}, seed=1, in_place=True)
        parts = {"kernel": P.Dropout(0.5, per_example=True)}
        tfwd.parametrize(model, parts, seed=2, in_place=True)
        (kernel,) = tfwd.added_parametrizations(model)[1].effective_weights(0, 4).values()
        expected = np.einsum("bi,bij->bj", X, kernel)
        np.testing.assert_allclose(model(X, training=True), expected, rtol=1e-4, atol=1e-5)

    def test_references_inside_another_one_are_raw(self) -> None:
        model = made(lambda: Outer(Pair()), X)
        raw = [np.asarray(v) for v in model.weights]
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        tfwd.parametrize(model.inner, {".*kernel": P.Mixout(0.5)}, seed=2, in_place=True)
        model(X, training=True)
        one = next(o for o in tfwd.added_parametrizations(model) if o.target is model.inner)
        for (target, parametrization), weight in zip(one.targeted, (raw[0], raw[2]), strict=True):
            (reference,) = one.references_of(target, parametrization)
            np.testing.assert_array_equal(reference, weight)

    def test_two_models_with_one_layer(self) -> None:
        """A layer computes with all its parametrizations, whichever model calls it."""
        shared = DENSE(6)

        def make() -> Any:
            return keras.Sequential([keras.Input((6,)), shared, DENSE(2)])

        one, two = made(make, X), made(make, X)
        tfwd.parametrize(one, DROPPED, seed=1, in_place=True)
        tfwd.parametrize(two, DROPPED, seed=2, in_place=True)
        first = [np.asarray(v) for v in added(one).effective_weights(0).values()][1]
        both = next(np.asarray(v) for v in added(two).effective_weights(0).values())
        hidden = X @ both
        np.testing.assert_allclose(one(X, training=True), hidden @ first, rtol=1e-4, atol=1e-5)
        assert added(one).calls == added(two).calls == 1
        tfwd.unwrap(one)
        (alone, _) = (np.asarray(v) for v in added(two).effective_weights(1).values())
        np.testing.assert_allclose(shared(X, training=True), X @ alone, rtol=1e-4, atol=1e-5)
        tfwd.unwrap(two)
        np.testing.assert_array_equal(shared(X, training=True), shared(X))

    @pytest.mark.parametrize("outer", [False, True])
    def test_layers_of_tfwd(self, outer: bool) -> None:
        """A wrapper inside a model in place, and a wrapper around it."""
        wrapped = layers.WeightDropout(DENSE(5), 0.5, seed=3)
        model = keras.Sequential([keras.Input((6,)), wrapped, DENSE(2)])
        plain = made(lambda: keras.Sequential([keras.Input((6,)), DENSE(5), DENSE(2)]), X)
        if outer:
            model = made(lambda: keras.Sequential([keras.Input((6,)), DENSE(5), DENSE(2)]), X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        raw = model.get_weights()
        top: Any = layers.Parametrized(model, {".*kernel": P.Dropout(0.5)}, 4) if outer else model
        source = top if outer else added(model)
        a, b = (np.asarray(v) for v in source.effective_weights(0).values())
        plain.set_weights([a, raw[1], b, raw[3]])
        np.testing.assert_allclose(top(X, training=True), plain(X), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("order", ["inner first", "outer first"])
    def test_a_layer_in_a_wrapper_of_keras(self, order: str) -> None:
        """The outer layer's parametrization comes last, in whichever order they were added."""

        def make() -> Any:
            return functional(lambda x: keras.layers.TimeDistributed(DENSE(3))(x), (3, 6))

        model, plain = made(make, S), made(make, S)
        targets = [model.layers[1].layer, model][:: 1 if order == "inner first" else -1]
        for target in targets:
            part = P.Dropout(0.5) if target is model else P.WeightNorm()
            tfwd.parametrize(target, {".*kernel": part}, seed=1, in_place=True)
        last = next(o for o in tfwd.added_parametrizations(model) if o.target is model)
        (kernel,) = last.effective_weights(0).values()
        plain.set_weights([np.asarray(kernel), plain.get_weights()[1]])
        np.testing.assert_allclose(model(S, training=True), plain(S), rtol=1e-4, atol=1e-5)
        expected = model(S)
        tfwd.unwrap(model, fold=True)
        np.testing.assert_allclose(model(S), expected, rtol=1e-5, atol=1e-6)

    def test_layers_with_their_own_dropout(self) -> None:
        def make() -> Any:
            first = layers.DropoutEmbedding(6, 4, 0.0)
            second = layers.WeightDropLSTM(3, weight_dropout=0.5, seed=3)
            return functional(lambda x: second(first(x)), (3,), "int32")

        model = made(make, IDS)
        plain = made(
            lambda: functional(
                lambda x: keras.layers.LSTM(3)(keras.layers.Embedding(6, 4)(x)), (3,), "int32"
            ),
            IDS,
        )
        parts = {"embeddings": P.Dropout(0.5), ".*recurrent_kernel": P.Dropout(0.5)}
        tfwd.parametrize(model, parts, seed=1, in_place=True)
        table, kernel = (np.asarray(v) for v in added(model).effective_weights(0).values())
        _, inputs, _, bias = model.get_weights()
        assert 0.6 < np.mean(kernel == 0) < 0.9
        plain.set_weights([table, inputs, kernel, bias])
        np.testing.assert_allclose(model(IDS, training=True), plain(IDS), rtol=1e-4, atol=1e-5)


class Outer(keras.Model):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def call(self, x: Any, training: Any = None) -> Any:
        return self.inner(x, training=training)


class Failing(keras.layers.Layer):
    """A layer that raises an error in training, as long as `fails` is True."""

    fails = True

    def __init__(self) -> None:
        super().__init__()
        self.dense = DENSE(5)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, x: Any, training: Any = False) -> Any:
        y = self.dense(x)
        if training and self.fails:
            raise ZeroDivisionError("in training")
        return y


class TestFailures:
    @pytest.mark.parametrize("graph", [False, True])
    def test_an_error_in_a_call_leaves_nothing_behind(self, graph: bool) -> None:
        def make() -> Any:
            return functional(lambda x: DENSE(1)(Failing()(x)), (6,))

        model, plain = made(make, X), made(make, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        call: Any = lambda x: model(x, training=True)  # noqa: E731
        with pytest.raises(Exception, match="in training"):
            (tf.function(call, autograph=False) if graph else call)(X)
        np.testing.assert_array_equal(model(X), plain(X))
        raw = model.layers[1].dense.kernel
        np.testing.assert_array_equal(tf.convert_to_tensor(raw), plain.layers[1].dense.kernel)
        model.layers[1].fails = plain.layers[1].fails = False
        calls = added(model).calls
        values = effective(model, calls)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        np.testing.assert_allclose(model(X, training=True), plain(X), rtol=1e-4, atol=1e-5)
        assert added(model).calls == calls + 1

    @pytest.mark.parametrize("at", [0, 2])
    def test_an_interruption_leaves_the_model_as_it_was(
        self, at: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tfwd.layers._substitution import hooks, in_place

        model = made(stack, X)
        expected = model(X)
        before = [set(vars(layer)) for layer in _keras.layers.all_layers(model)]
        own, times = hooks.add, []

        def interrupted(*args: Any) -> None:
            own(*args)
            times.append(0)
            if len(times) == at:
                raise KeyboardInterrupt

        def untracked(*args: Any) -> None:
            if not times.count(1):
                times.append(1)
                raise KeyboardInterrupt

        monkeypatch.setattr(hooks, "add", interrupted)
        if not at:
            monkeypatch.setattr(in_place._keras, "track", untracked)
        with pytest.raises(KeyboardInterrupt):
            tfwd.parametrize(model, DROPPED, in_place=True)
        monkeypatch.undo()
        assert [set(vars(layer)) for layer in _keras.layers.all_layers(model)] == before
        np.testing.assert_array_equal(model(X, training=True), expected)
        tfwd.parametrize(model, DROPPED, in_place=True)
        assert added(model).calls == 0

    def test_spectral_normalization(self) -> None:
        def make() -> Any:
            normal = keras.layers.SpectralNormalization(DENSE(4))
            return functional(lambda x: DENSE(2, name="last")(normal(x)), (6,))

        if not hasattr(keras.layers, "SpectralNormalization"):
            pytest.skip("this Keras has none")
        with pytest.raises(ValueError, match="SpectralNormalization assigns to it"):
            tfwd.parametrize(made(make, X), DROPPED, in_place=True)
        model = made(make, X)
        tfwd.parametrize(model, {"last/kernel": P.Dropout(0.5)}, seed=1, in_place=True)
        model(X, training=True)
        assert added(model).calls == 1

    def test_a_layer_that_is_built_in_its_first_call(self) -> None:
        class Lazy(keras.layers.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.dense = DENSE(4)

            def build(self, shape: Any) -> None:
                self.kernel = self.add_weight(shape=(6, 6), name="kernel")
                self.built = True

            def call(self, x: Any) -> Any:
                return self.dense(tf.matmul(x, tf.convert_to_tensor(self.kernel)))

        lazy = Lazy()
        lazy.build((None, 6))
        with pytest.raises(ValueError, match="has no weights yet, or not all of them"):
            tfwd.parametrize(lazy, DROPPED, in_place=True)
        assert_equals_plain(Lazy, X, ".*kernel", "eager")


class TestLifetime:
    def test_a_deleted_model_is_freed(self) -> None:
        model = made(stack, X)
        tfwd.parametrize(model, {**DROPPED, "bias": P.Mixout(0.5)}, seed=1, in_place=True)
        model.compile("sgd", "mse")
        model.fit(X, X[:, :1], verbose=0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(X, training=True))
        tape.gradient(loss, variables(model))
        watched = [weakref.ref(model), weakref.ref(model.layers[0]), weakref.ref(added(model))]
        del model, tape, loss
        keras.backend.clear_session()
        gc.collect()
        assert [ref() for ref in watched] == [None] * 3

    def test_a_removed_parametrization_is_freed(self) -> None:
        model = made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        model(X, training=True)
        watched = weakref.ref(added(model))
        tfwd.unwrap(model)
        gc.collect()
        assert watched() is None

    def test_a_loaded_model(self, tmp_path: Path) -> None:
        path = tmp_path / "model.keras"
        made(stack, X).save(path)
        assert_equals_plain(lambda: keras.models.load_model(path), X, ".*kernel", "graph")

    def test_two_threads(self) -> None:
        model, plain = made(stack, X), made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        found: list[np.ndarray] = []

        def run() -> None:
            for _ in range(5):
                found.append(np.asarray(model(X, training=True)))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert added(model).calls == 10
        for call in range(10):
            values = effective(model, call)
            plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
            expected = np.asarray(plain(X))
            assert sum(np.allclose(one, expected, rtol=1e-4, atol=1e-5) for one in found) == 1


def kept_for_backward(model: Any, x: Any) -> list[tf.Tensor]:
    """Returns the tensors that forward hands to backward in a graph."""
    concrete = tf.function(lambda x: model(x, training=True)).get_concrete_function(x)
    forward, _ = concrete._delayed_rewrite_functions.forward_backward()
    return list(forward.graph.outputs)[1:]


def made_by(tensor: tf.Tensor) -> str:
    """Returns the type of the operation that made a tensor, past identities."""
    passing = ("Identity", "IdentityN", "StatelessWhile")  # a loop hands its constants on
    while tensor.op.type in passing and tensor.value_index < len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op.type


def address(tensor: tf.Tensor) -> int:
    return tensor._numpy_internal().__array_interface__["data"][0]


def eager_tensors(least: int) -> dict[int, tuple[int, ...]]:
    """Returns addresses and shapes of eager tensors with at least `least` bits."""
    gc.collect()
    eager = type(tf.zeros([]))
    found = [t for t in gc.get_objects() if isinstance(t, eager) and t.dtype != tf.resource]
    large = [t for t in found if t.shape.num_elements() * t.dtype.size * 8 >= least]
    return {address(t): tuple(t.shape) for t in large}


def wide(recurrent: bool) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        if recurrent:
            return functional(lambda x: keras.layers.LSTM(32)(x), (3, 32))
        return keras.Sequential(
            [keras.Input((32,)), *(DENSE(32, use_bias=False) for _ in range(3))]
        )

    return make


@pytest.mark.usefixtures("all_large")
class TestMemory:
    """Backward computes effective weights again. Like `test_saved_tensors`, this counts tensors."""

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_graphs_keep_no_effective_weight(self, recurrent: bool) -> None:
        x = tf.ones([2, 3, 32] if recurrent else [2, 32])

        def drawn(recomputed: bool) -> list[str]:
            model = made(wide(recurrent), x)
            tfwd.parametrize(model, DROPPED, seed=1, recompute=recomputed, in_place=True)
            kept = kept_for_backward(model, x)
            large = [t for t in kept if t.shape.rank == 2 and t.shape[0] == 32]
            sources = [made_by(t) for t in large]
            return [one for one in sources if one not in ("ReadVariableOp", "Placeholder")]

        assert drawn(True) == []
        assert len(drawn(False)) >= (1 if recurrent else 3)

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_eager_mode_keeps_no_effective_weight(self, recurrent: bool) -> None:
        x = tf.ones([2, 3, 32] if recurrent else [2, 32])

        def held(recomputed: bool) -> int:
            model = made(wide(recurrent), x)
            tfwd.parametrize(model, DROPPED, seed=1, recompute=recomputed, in_place=True)
            model(x, training=True)
            before, tapes = set(eager_tensors(32 * 32)), []
            for _ in range(3):
                with tf.GradientTape() as tape:
                    y = model(x, training=True)
                tapes.append((tape, y))
            own = {address(tf.convert_to_tensor(v)) for v in variables(model)}
            found = eager_tensors(32 * 32)
            shapes = [s for a, s in found.items() if a not in before | own]
            return sum(s in ((32, 32), (32, 128)) for s in shapes)

        assert held(True) == 0
        assert held(False) >= 3


class TestPrograms:
    """Other ways to run a layer."""

    @pytest.mark.parametrize("size", ["small", "large"])
    def test_states_of_a_stateful_layer(self, size: str, request: Any) -> None:
        if size == "large":
            request.getfixturevalue("all_large")

        def make() -> Any:
            x = keras.Input((3, 6), batch_size=4)
            return keras.Model(x, keras.layers.LSTM(3, stateful=True)(x))

        model, plain = made(make, S), made(make, S)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        for call in range(3):
            values = effective(model, call)
            plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
            got, expected = model(S, training=True), plain(S, training=True)
            np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

    def test_metrics_inside_a_layer_are_updated_once(self) -> None:
        class Counting(DENSE):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.seen = keras.metrics.Sum()

            def call(self, x: Any, training: Any = None) -> Any:
                if training:
                    self.seen.update_state(tf.ones([]))
                return super().call(x)

        model = made(lambda: functional(lambda x: Counting(4)(x), (6,)), X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        stepped(model, X)
        RUNS["graph"](model, X)
        assert float(model.layers[1].seen.result()) == 2

    @pytest.mark.parametrize("size", ["small", "large"])
    def test_a_flag_that_is_a_tensor(self, size: str, request: Any) -> None:
        if size == "large":
            request.getfixturevalue("all_large")

        def make() -> Any:
            return Outer(Pair())

        model, plain = made(make, X), made(make, X)
        expected = model(X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        call = tf.function(lambda flag: model(X, training=flag))
        np.testing.assert_allclose(call(tf.constant(False)), expected, rtol=1e-5, atol=1e-6)
        assert added(model).calls == 0
        values = effective(model, 0)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
        np.testing.assert_allclose(call(tf.constant(True)), plain(X), rtol=1e-4, atol=1e-5)
        assert added(model).calls == 1

    def test_a_mapped_call(self) -> None:
        model, plain = made(stack, X), made(stack, X)
        tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        mapped = tf.map_fn(lambda x: model(x[None], training=True)[0], tf.constant(X))
        for call in range(4):
            values = effective(model, call)
            plain.set_weights([values.get(id(v), np.asarray(v)) for v in model.weights])
            expected = plain(X[call : call + 1])[0]
            np.testing.assert_allclose(mapped[call], expected, rtol=1e-4, atol=1e-5)

    def test_a_model_built_on_the_target_afterwards(self) -> None:
        base, plain = made(stack, X), made(stack, X)
        tfwd.parametrize(base, DROPPED, seed=1, in_place=True)
        x = keras.Input((6,))
        model = keras.Model(x, base(x))
        features = keras.Model(base.inputs[0], base.layers[0].output)
        assert added(base).calls == 0
        np.testing.assert_allclose(model(X), plain(X), rtol=1e-5, atol=1e-6)
        values = effective(base, 0)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in base.weights])
        np.testing.assert_allclose(model(X, training=True), plain(X), rtol=1e-4, atol=1e-5)
        values = effective(base, 1)
        plain.set_weights([values.get(id(v), np.asarray(v)) for v in base.weights])
        expected = plain.layers[0](X)
        np.testing.assert_allclose(features(X, training=True), expected, rtol=1e-4, atol=1e-5)

    def test_without_recomputation(self) -> None:
        make, pattern, x = MODELS["masks"]
        assert_equals_plain(make, x, pattern, "graph", recompute=False)

    def test_scaled_losses(self) -> None:
        """Compares a step of float16 with float32."""
        found = []
        for policy in ("float32", "mixed_float16"):
            keras.config.set_dtype_policy(policy)
            model = made(stack, X)
            tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
            optimizer: Any = keras.optimizers.SGD(0.1)
            if policy == "mixed_float16":
                scaled = keras.mixed_precision if IS_KERAS_2 else keras.optimizers
                optimizer = scaled.LossScaleOptimizer(optimizer, initial_scale=64)
            model.compile(optimizer, "mse")
            model.fit(X, X[:, :1], epochs=2, verbose=0)
            assert added(model).calls == 2
            found.append(model.get_weights())
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-2, atol=1e-2)

    @pytest.mark.parametrize("inside", [False, True])
    def test_replicas_of_a_model(self, inside: bool) -> None:
        """`parametrize` may be called outside the scope in which the model was made."""
        strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), DENSE(64)])
            if inside:
                tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
        if not inside:
            tfwd.parametrize(model, DROPPED, seed=1, in_place=True)

        def call() -> Any:
            return model(X, training=True)

        step = tf.function(lambda: strategy.run(call), autograph=False)
        one, other = strategy.experimental_local_results(step())
        assert not np.array_equal(one, other)
        assert added(model).calls == 1
        (kernel,) = added(model).effective_weights(0).values()
        np.testing.assert_allclose(one, X @ kernel, rtol=1e-4, atol=1e-5)
        one, _ = strategy.experimental_local_results(step())
        (kernel,) = added(model).effective_weights(1).values()
        np.testing.assert_allclose(one, X @ kernel, rtol=1e-4, atol=1e-5)
