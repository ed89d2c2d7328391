"""`tfwd.parametrize(..., in_place=True)` on models that have their own classes and methods.

`tests/conformance` has the table of layers. The oracle here is a second plain model of the same
class, whose weights are set to the effective weights of a call.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from processes import Processes, finish
from stacks import IS_KERAS_2

import tfwd
from tfwd import _keras, layers
from tfwd import parametrizations as P

X = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
Y = X[:, :1]
DENSE = keras.layers.Dense


def tensors(model: Any) -> list[tf.Variable]:
    return [*map(_keras.variables.tf_variable, model.trainable_variables)]


class Autoencoder(keras.Model):
    """A variational autoencoder with its own step. It keeps its layers in a dict."""

    def __init__(self) -> None:
        super().__init__()
        encoder = [keras.Input((8,)), DENSE(6, activation="relu"), DENSE(4)]
        decoder = [keras.Input((2,)), DENSE(8)]
        self.parts = {"in": keras.Sequential(encoder), "out": keras.Sequential(decoder)}
        self.total = keras.metrics.Mean(name="total")

    def encoded(self, x: Any, training: Any) -> tuple[Any, Any]:
        mean, log_variance = tf.split(self.parts["in"](x, training=training), 2, axis=1)
        return mean, log_variance

    def call(self, x: Any, training: Any = False) -> Any:
        return self.parts["out"](self.encoded(x, training)[0], training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoded(x, True)
            noise = tf.random.normal(tf.shape(mean)) * tf.exp(0.5 * log_variance)
            rebuilt = self.parts["out"](mean + noise, training=True)
            divergence = mean**2 + tf.exp(log_variance) - 1 - log_variance
            loss = tf.reduce_mean((rebuilt - x) ** 2) + 0.5 * tf.reduce_mean(divergence)
        gradients = tape.gradient(loss, tensors(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.total.update_state(loss)
        return {"total": self.total.result()}

    def greet(self) -> str:
        return "a method of its own"


class Adversarial(keras.Model):
    """A GAN, whose `call` is never called in training."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), DENSE(8)])
        self.critic = keras.Sequential([keras.Input((8,)), DENSE(4, activation="relu"), DENSE(1)])

    def call(self, x: Any, training: Any = False) -> Any:
        return self.critic(self.generator(x, training=training), training=training)

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            made = self.generator(tf.random.normal([tf.shape(x)[0], 4]), training=True)
            loss = tf.reduce_mean(self.critic(x, training=True) - self.critic(made, training=True))
        gradients = tape.gradient(loss, tensors(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Tied(keras.Model):
    """A language model whose logits read the table of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = keras.layers.Embedding(10, 6)
        self.lstm = keras.layers.LSTM(6, return_sequences=True)

    def call(self, ids: Any, training: Any = False) -> Any:
        hidden = self.lstm(self.words(ids), training=training)
        return tf.matmul(hidden, tf.convert_to_tensor(self.words.embeddings), transpose_b=True)


class Loop(keras.Model):
    """A custom loop over time around a bare cell and a layer that is called at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = keras.layers.GRUCell(3)
        self.out = DENSE(2)

    def call(self, x: Any, training: Any = False) -> Any:
        state, outputs = tf.zeros([tf.shape(x)[0], 3]), []
        for step in range(4):
            _, state = self.cell(x[:, 2 * step : 2 * step + 2], [state], training=training)
            state = state[0] if isinstance(state, (list, tuple)) else state
            outputs.append(self.out(state))
        return tf.stack(outputs, 1)


def nested() -> keras.Model:
    inner = keras.Sequential([keras.Input((8,)), DENSE(8, activation="tanh"), DENSE(8)])
    x = keras.Input((8,))
    return keras.Model(x, DENSE(1)(inner(inner(x)) + DENSE(8)(x)))


def attention() -> keras.Model:
    x = keras.Input((8,))
    parts = keras.layers.Reshape((4, 2))(x)
    mixed = keras.layers.MultiHeadAttention(2, 3)(parts, parts)
    return keras.Model(x, DENSE(1)(keras.layers.Flatten()(mixed)))


def made(make: Callable[[], Any], x: Any = X) -> Any:
    """Returns a built model. Models of one kind have the same weights."""
    keras.utils.set_random_seed(2)
    model = make()
    model(x)
    return model


def added(model: Any) -> Any:
    (one,) = tfwd.added_parametrizations(model)
    return one


def own_names(model: Any) -> list[set[str]]:
    """Returns the attributes of each layer that this feature could leave behind."""
    layers = _keras.layers.all_layers(model)
    return [{n for n in vars(layer) if n == "call" or "tfwd" in n} for layer in layers]


def assert_uses_the_announced_weights(model: Any, plain: Any, x: Any, call: Callable) -> None:
    """Checks one training call against the plain model with the announced weights."""
    one = added(model)
    calls = one.calls
    values = one.effective_weights(calls).values()
    effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
    assert any((np.asarray(v) == 0).any() for v in effective.values())
    assert len(model.weights) == len(plain.weights)
    plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])
    np.testing.assert_allclose(call(model, x), plain(x), rtol=1e-4, atol=1e-5)
    assert one.calls == calls + 1


CALLS = {
    "eager": lambda model, x: model(x, training=True),
    "graph": lambda model, x: tf.function(lambda: model(x, training=True))(),
    "compiled": lambda model, x: tf.function(
        lambda: model(x, training=True), jit_compile=True, autograph=False
    )(),
}
KINDS = {
    "autoencoder": (Autoencoder, ".*kernel", X),
    "adversarial": (Adversarial, ".*kernel", X[:, :4]),
    "tied": (Tied, "embeddings|.*recurrent_kernel", np.array([[1, 2, 3], [9, 0, 1]])),
    "loop": (Loop, ".*kernel", X),
    "nested": (nested, ".*kernel", X),
    "attention": (attention, ".*kernel", X),
}


@pytest.mark.parametrize("call", ["eager", "graph"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_training_call_uses_the_announced_weights(kind: str, call: str) -> None:
    make, pattern, x = KINDS[kind]
    model, plain = made(make, x), made(make, x)
    expected = model(x)
    names = own_names(model)
    assert tfwd.parametrize(model, {pattern: P.Dropout(0.4)}, seed=1, in_place=True) is model
    np.testing.assert_array_equal(model(x), expected)
    for _ in range(2):
        assert_uses_the_announced_weights(model, plain, x, CALLS[call])
    assert tfwd.unwrap(model) is model
    np.testing.assert_array_equal(model(x, training=True), expected)
    assert own_names(model) == names


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_the_plain_models_with_masks(kind: str) -> None:
    """Uses a plain model with the effective weights, and the factors mask / keep."""
    make, pattern, x = KINDS[kind]
    model, plain = made(make, x), made(make, x)
    tfwd.parametrize(model, {pattern: P.Dropout(0.5)}, seed=1, in_place=True)
    one = added(model)
    values = one.effective_weights(0).values()
    effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
    plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])

    def gradients(of: Any, training: bool) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(of(x, training=training)))
        return [*map(tf.convert_to_tensor, tape.gradient(loss, tensors(of)))]

    got, raw = gradients(model, True), gradients(plain, False)
    for variable, one_gradient, other in zip(model.trainable_variables, got, raw, strict=True):
        factor = 1.0
        if id(variable) in effective:
            factor = 2.0 * (np.asarray(effective[id(variable)]) != 0)
        np.testing.assert_allclose(one_gradient, other * factor, rtol=1e-4, atol=1e-5)


def test_fit_with_a_step_of_its_own() -> None:
    model = made(Autoencoder)
    model.compile("adam")
    kind, optimizer = type(model), model.optimizer
    model.fit(X, batch_size=8, verbose=0)  # its training function exists already
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    assert type(model) is kind and model.optimizer is optimizer
    assert model.greet() == "a method of its own"
    model.fit(X, batch_size=8, epochs=2, verbose=0)
    # Each step calls the encoder and the decoder, which count separately.
    assert added(model).calls == 8
    tfwd.unwrap(model)
    model.fit(X, batch_size=8, verbose=0)


class NoFlag(keras.Model):
    """A model whose `call` has no training argument."""

    def __init__(self) -> None:
        super().__init__()
        # Keras 3 takes the flag of such a layer, False by default, for the layers after it.
        self.first, self.dropout, self.last = DENSE(8), keras.layers.Dropout(0.0), DENSE(1)

    def call(self, x: Any) -> Any:
        return self.last(self.dropout(self.first(x)))


@pytest.mark.parametrize("checked", [False, True])
def test_fit_of_a_model_without_a_training_argument(checked: bool) -> None:
    """Compares one update with the plain model's update at the effective weights."""
    model, plain = made(NoFlag), made(NoFlag)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    one = added(model)
    values = [np.asarray(v) for v in one.effective_weights(0).values()]
    raw = model.get_weights()
    start = [values[0], raw[1], values[1], raw[3]]
    plain.set_weights(start)
    callbacks = [tfwd.callbacks.FiniteCheck()] if checked else []
    for trained in (model, plain):
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        trained.fit(X, Y, batch_size=16, verbose=0, callbacks=callbacks)
    factors = [2.0 * (values[0] != 0), 1.0, 2.0 * (values[1] != 0), 1.0]
    moved = zip(model.get_weights(), raw, plain.get_weights(), start, factors, strict=True)
    for after, before, plain_after, plain_before, factor in moved:
        change = (plain_after - plain_before) * factor
        np.testing.assert_allclose(after - before, change, rtol=1e-3, atol=1e-6)
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert one.calls == 1


def test_dropout_in_a_model_without_a_training_argument() -> None:
    class Dropped(NoFlag):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = keras.layers.Dropout(0.5)

        def call(self, x: Any) -> Any:
            self.kept = self.dropout(tf.ones_like(x))
            return super().call(x)

    model = made(Dropped)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, in_place=True)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=16, verbose=0)
    assert 0 < np.count_nonzero(model.kept) < X.size
    model.evaluate(X, Y, batch_size=16, verbose=0)
    assert np.count_nonzero(model.kept) == X.size


class Unflagged(Autoencoder):
    """Its step calls its parts without a training flag, or with False."""

    flag: dict[str, bool]

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            hidden = self.parts["in"](x, **self.flag)[:, :2]
            loss = tf.reduce_mean((self.parts["out"](hidden, **self.flag) - x) ** 2)
        gradients = tape.gradient(loss, tensors(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_a_step_that_passes_no_flag() -> None:
    model = made(Unflagged)
    model.flag = {}
    model.compile("sgd")
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.fit(X, batch_size=8, verbose=0)
    assert added(model).calls == 4


def test_a_step_without_a_training_call_warns() -> None:
    model = made(Unflagged)
    model.flag = {"training": False}
    model.compile("sgd")
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    with pytest.warns(UserWarning, match="makes no training call.*pass training=True"):
        model.fit(X, batch_size=8, verbose=0)
    assert added(model).calls == 0


def test_methods_of_the_object_itself_are_kept() -> None:
    model = made(nested)
    dense = model.layers[-1]
    dense.call = lambda x: -type(dense).call(dense, x)
    expected = np.asarray(model(X))
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    np.testing.assert_array_equal(model(X), expected)
    tfwd.unwrap(model)
    np.testing.assert_array_equal(model(X), expected)


def test_parts_of_a_model_that_its_step_calls() -> None:
    model = made(Adversarial, X[:, :4])
    model.compile("sgd")
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.fit(X, batch_size=8, verbose=0)
    assert added(model).calls == 6  # the generator once a step, and the critic twice
    one = added(model)
    names = [name for name in one.effective_weights(6) if name.endswith("kernel")]
    weight = one.effective_weights(6)[names[0]]
    x = X[:, :4]
    bias = model.generator.layers[-1].bias
    expected = x @ weight.numpy() + np.asarray(_keras.variables.value(bias))
    np.testing.assert_allclose(model.generator(x, training=True), expected, rtol=1e-5, atol=1e-5)


def test_draws_do_not_depend_on_what_was_built_before() -> None:
    def drawn() -> list[np.ndarray]:
        model = made(nested)
        tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=7, in_place=True)
        return [np.asarray(v) for v in added(model).effective_weights(3).values()]

    first = drawn()
    DENSE(2)(tf.ones([1, 2]))
    for one, other in zip(first, drawn(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_layer_equals_a_wrapper() -> None:
    dense = made(lambda: DENSE(3))
    wrapped = layers.Parametrized(DENSE(3), {"kernel": P.Dropout(0.5)}, seed=5)
    wrapped(X)
    wrapped.set_weights(dense.get_weights())
    tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, seed=5, in_place=True)
    np.testing.assert_array_equal(dense(X, training=True), wrapped(X, training=True))


def test_a_layer_inside_a_model() -> None:
    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), DENSE(4, activation="tanh"), DENSE(1)])

    model, plain = made(make), made(make)
    tfwd.parametrize(model.layers[0], {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert added(model).calls == 2
    assert_uses_the_announced_weights(model, plain, X, CALLS["graph"])
    tfwd.unwrap(model)
    assert not tfwd.added_parametrizations(model)


def test_a_second_call_is_a_chain() -> None:
    """Equals nested wrappers, of which the first call is the inner one."""
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(64)]))
    raw, expected = model.get_weights(), model(X)
    tfwd.parametrize(model, {"kernel": P.GaussianNoise(0.3)}, seed=1, in_place=True)
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=2, in_place=True)
    noisy = layers.VariationalNoise(DENSE(64), 0.3, seed=1)
    wrapped = layers.WeightDropout(noisy, 0.5, seed=2)
    wrapped(X)
    wrapped.set_weights(raw)
    outputs = model(X, training=True)
    np.testing.assert_allclose(outputs, wrapped(X, training=True), rtol=1e-4, atol=1e-5)
    (weight,) = tfwd.added_parametrizations(model)[1].effective_weights(0).values()
    np.testing.assert_allclose(wrapped.effective_weights(0)["kernel"], weight, rtol=1e-6, atol=1e-6)
    tfwd.unwrap(model)
    np.testing.assert_array_equal(model(X, training=True), expected)


@pytest.mark.parametrize("inner_first", [True, False])
def test_a_chain_of_a_layer_inside_and_the_layer_around_it(inner_first: bool) -> None:
    """Compares with the weights that both announce, and with the order of their formulas."""

    def make() -> Any:
        return keras.layers.MultiHeadAttention(2, 8)

    x = tf.constant(X.reshape(2, 8, 8))
    keras.utils.set_random_seed(2)
    model, plain = make(), make()
    model(x, x), plain(x, x)
    plain.set_weights(model.get_weights())
    expected = model(x, x)
    inner = next(layer for layer in _keras.layers.sublayers(model) if "query" in layer.name)
    targets = [(inner, {"kernel": P.GaussianNoise(0.3)}), (model, {".*kernel": P.Dropout(0.5)})]
    for seed, (target, parts) in enumerate(targets if inner_first else targets[::-1]):
        tfwd.parametrize(target, parts, seed=seed, in_place=True)
    found = {one.target.name: one for one in tfwd.added_parametrizations(model)}
    weights = [np.asarray(w) for w in model.get_weights()]
    values = list(found[model.name].effective_weights(0).values())
    (noisy,) = found[inner.name].effective_weights(0).values()
    for (target, _), value in zip(found[model.name].targeted, values, strict=True):
        weights[target.position] = np.asarray(value)
        if target.variable is inner.kernel:
            both = np.asarray(noisy) if not inner_first else np.asarray(value)
            weights[target.position] = both
    plain.set_weights(weights)
    np.testing.assert_allclose(model(x, x, training=True), plain(x, x), rtol=1e-4, atol=1e-5)
    tfwd.unwrap(model)
    np.testing.assert_array_equal(model(x, x, training=True), expected)


def test_a_layer_in_a_wrapper_of_keras_draws_once_in_a_call() -> None:
    """The kernel that is used is read off from the outputs for unit vectors."""
    model = keras.layers.TimeDistributed(DENSE(3, use_bias=False))
    keras.utils.set_random_seed(2)
    model(tf.eye(3)[None])
    tfwd.parametrize(model.layer, {"kernel": P.GaussianNoise(0.3)}, seed=1, in_place=True)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=0, in_place=True)
    for call in range(2):
        outer, inner = tfwd.added_parametrizations(model)
        (expected,) = outer.effective_weights(call).values()
        used = model(tf.eye(3)[None], training=True)[0]
        np.testing.assert_allclose(used, expected, rtol=1e-5, atol=1e-6)
        assert outer.calls == inner.calls == call + 1


def test_masks_for_each_example_inside_attention() -> None:
    model, x = keras.layers.MultiHeadAttention(2, 4), tf.constant(X.reshape(2, 8, 8))
    keras.utils.set_random_seed(2)
    model(x, x)
    parts = {"value/kernel": P.Dropout(0.5, per_example=True), ".*kernel": P.Dropout(0.3)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    model(x, x, training=True)
    assert added(model).calls == 1


def test_the_frozen_part_of_a_model_is_called_in_evaluation() -> None:
    class Teacher(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = DENSE(4), DENSE(4)

        def call(self, x: Any, training: Any = None) -> Any:
            return self.teacher(x), self.student(x)

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Teacher()
            self.last = keras.Sequential([keras.Input((4,)), DENSE(2)])

        def call(self, x: Any, training: Any = None) -> Any:
            return self.last(self.inner(x, training=False)[0], training=training)

    model, plain = made(Outer), made(Outer)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    np.testing.assert_array_equal(
        model.inner(X, training=False)[0], plain.inner(X, training=False)[0]
    )
    names = {
        t.name: v
        for (t, _), v in zip(
            added(model).targeted, added(model).effective_weights(0).values(), strict=True
        )
    }
    last = next(value for name, value in names.items() if value.shape == (4, 2))
    hidden = plain.inner(X, training=False)[0]
    np.testing.assert_allclose(model(X, training=True), hidden @ last, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["deepcopy", "pickle", "clone"])
def test_copies_are_plain(kind: str) -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4), DENSE(1)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    copies = {
        "deepcopy": copy.deepcopy,
        "pickle": lambda model: pickle.loads(pickle.dumps(model)),
        "clone": keras.models.clone_model,
    }
    other = copies[kind](model)
    assert not tfwd.added_parametrizations(other)
    np.testing.assert_array_equal(other(X, training=True), other(X))
    assert added(model).calls == 0


def test_a_copied_layer_calls_itself() -> None:
    dense = made(lambda: DENSE(3))
    tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, in_place=True)
    other = copy.deepcopy(dense)
    other.set_weights([w * 0 for w in other.get_weights()])
    assert not np.asarray(other(X)).any()
    assert np.asarray(dense(X)).any()


# A functional model with a preprocessor outside its graph. It compiles itself, and its `fit` takes
# texts, as in keras-hub. A second process defines the same class.
OF_TEXTS = """
import keras
import numpy as np


class Letters(keras.layers.Layer):
    def build(self, shape):
        self.built = True

    def call(self, texts):
        return np.array([[text.count(c) for c in "abcdefgh"] for text in texts], "float32")


class OfTexts(keras.Model):
    def __init__(self, **kwargs):
        counts = keras.Input((8,))
        hidden = keras.layers.Dense(16, "tanh", name="hidden")(counts)
        super().__init__(counts, keras.layers.Dense(1, name="answer")(hidden), **kwargs)
        self.preprocessor = Letters()
        self.compile(keras.optimizers.Adam(0.01), "mse")

    def fit(self, texts, labels, **kwargs):
        return super().fit(self.preprocessor.call(texts), labels, **kwargs)

    def predict(self, texts, **kwargs):
        return super().predict(self.preprocessor.call(texts), **kwargs)

    def get_config(self):
        return {}

    @classmethod
    def from_config(cls, config):
        return cls()
"""
LOAD = """
import sys
sys.modules["tfwd"] = None
model = keras.models.load_model(sys.argv[1], custom_objects={"OfTexts": OfTexts}, compile=False)
np.save(sys.argv[2], model.predict(sys.argv[3:], verbose=0))
"""


def test_the_script_of_the_documentation(tmp_path: Path) -> None:
    """`test_keras_hub` does the same with a classifier of keras-hub."""
    names: dict[str, Any] = {"__name__": "of_texts"}
    exec(OF_TEXTS, names)
    keras.utils.set_random_seed(1)
    model, texts, labels = names["OfTexts"](), ["abba", "head", "cabbage", "face"], Y[:4]
    before = model.predict(texts, verbose=0)
    tfwd.parametrize(model, {"hidden/kernel": P.Dropout(0.1)}, in_place=True)
    np.testing.assert_array_equal(model.predict(texts, verbose=0), before)
    model.fit(texts, labels, epochs=3, verbose=0)
    assert added(model).calls == 3
    assert tfwd.unwrap(model) is model
    model.save(tmp_path / "plain.keras")
    with Processes() as started:
        arguments = [str(tmp_path / "plain.keras"), str(tmp_path / "found.npy"), *texts]
        status, output = finish(started.python(OF_TEXTS + LOAD, arguments))
    assert status == 0, output
    expected = model.predict(texts, verbose=0)
    assert abs(expected - before).max() > 1e-3
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, rtol=1e-6, atol=1e-6)


def test_exports_are_plain(tmp_path: Path) -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4), DENSE(1)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model(X, training=True)
    model.export(str(tmp_path / "export"))
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    np.testing.assert_allclose(loaded.serve(X), model(X), rtol=1e-5, atol=1e-6)
    graph = loaded.signatures["serving_default"].graph.as_graph_def()
    assert not any("tateless" in node.op and "Random" in node.op for node in graph.node)
    if IS_KERAS_2:
        model.save(tmp_path / "saved")
        loaded = keras.models.load_model(tmp_path / "saved")
        np.testing.assert_allclose(loaded.predict(X, verbose=0), model(X), rtol=1e-5, atol=1e-6)


def test_mixed_precision() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(32), DENSE(1)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert all(v.dtype == "float32" for v in added(model).effective_weights(0).values())
    assert model(X, training=True).dtype == "float16"


def test_replicas_draw_differently_or_alike() -> None:
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    for share in (False, True):
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), DENSE(64)])
            tfwd.parametrize(
                model,
                {"kernel": P.Dropout(0.5)},
                seed=1,
                share_across_replicas=share,
                in_place=True,
            )

        @tf.function
        def step() -> Any:
            return strategy.run(lambda: model(X, training=True))  # noqa: B023

        one, other = strategy.experimental_local_results(step())
        assert np.array_equal(one, other) is share
        assert added(model).calls == 1


def test_compiled_by_xla() -> None:
    model = made(nested)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert added(model).calls == 4
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_moments_use_one_draw_for_all_chunks() -> None:
    """Compares with one plain gradient per example, with the masks' factors."""

    def make() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), DENSE(4, activation="tanh"), DENSE(1)])

    model, plain = made(make), made(make)
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    values = [v.numpy() for v in added(model).effective_weights(0).values()]
    found = tfwd.gradients.moments(
        model, X, Y, keras.losses.MeanSquaredError(), training=True, chunk_size=4
    )
    assert added(model).calls == 1
    raw = model.get_weights()
    plain.set_weights([values[0], raw[1], values[1], raw[3]])
    factors = [2.0 * (values[0] != 0), 1.0, 2.0 * (values[1] != 0), 1.0]
    expected = [np.zeros_like(w) for w in raw]
    for i in range(16):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((plain(X[i : i + 1]) - Y[i : i + 1]) ** 2)
        for total, gradient, factor in zip(
            expected, tape.gradient(loss, tensors(plain)), factors, strict=True
        ):
            total += (gradient.numpy() * factor) ** 2 / 16
    for got, one in zip(found.mean_square, expected, strict=True):
        np.testing.assert_allclose(got, one, rtol=1e-4, atol=1e-6)


def test_finite_check_names_the_layer_inside() -> None:
    model = made(Autoencoder)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.compile("sgd")
    bad = model.parts["in"].layers[-1]
    bad.set_weights([np.full_like(w, np.inf) for w in bad.get_weights()])
    with pytest.raises(Exception, match=bad.name):
        model.fit(X, verbose=0, callbacks=[tfwd.callbacks.FiniteCheck()])


def test_masks_for_each_example() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(6), DENSE(3)]))
    parts = {"kernel": P.Dropout(0.5, per_example=True)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    first, second = (np.asarray(v) for v in added(model).effective_weights(0, 16).values())
    raw = model.get_weights()
    expected = [(x @ a + raw[1]) @ b + raw[3] for x, a, b in zip(X, first, second, strict=True)]
    np.testing.assert_allclose(model(X, training=True), expected, rtol=1e-4, atol=1e-5)


def test_samples_of_masks_for_each_example() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(6)]))
    parts = {"kernel": P.Dropout(0.5, per_example=True)}
    tfwd.parametrize(model, parts, seed=1, in_place=True)
    found = tfwd.predict_samples(model, X, 2, verbose=0, return_samples=True)
    for call in range(2):
        (kernels,) = added(model).effective_weights(call, 16).values()
        expected = np.einsum("bi,bio->bo", X, kernels) + model.get_weights()[1]
        np.testing.assert_allclose(found.samples[call], expected, rtol=1e-4, atol=1e-5)


def test_samples() -> None:
    model, plain = made(Autoencoder), made(Autoencoder)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    found = tfwd.predict_samples(model, X, 3, batch_size=6, verbose=0, return_samples=True)
    one = added(model)
    assert one.calls == 0
    for call in range(3):
        values = one.effective_weights(call).values()
        effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
        plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])
        np.testing.assert_allclose(found.samples[call], plain(X), rtol=1e-4, atol=1e-5)


def test_mixout_in_place_mixes_with_the_first_weights() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(3)]))
    start = model.get_weights()
    tfwd.parametrize(model, {"kernel": P.Mixout(0.5)}, seed=1, in_place=True)
    model(X, training=True)
    model.set_weights([start[0] + 1, start[1]])
    (weight,) = added(model).effective_weights(1).values()
    kept = np.isclose(weight, start[0], atol=1e-6)
    assert 0 < kept.sum() < kept.size
    # The others are moved so that the mean over draws is the present weight.
    np.testing.assert_allclose(weight[~kept], (start[0] + 2)[~kept], rtol=1e-5)
    tfwd.reset_references(model)
    (weight,) = added(model).effective_weights(1).values()
    np.testing.assert_allclose(weight, start[0] + 1, rtol=1e-6)


def test_weight_norm_is_folded_in_place() -> None:
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(3)]))
    tfwd.parametrize(model, {"kernel": P.WeightNorm()}, in_place=True)
    expected, kernel = model(X), model.layers[0].kernel
    with pytest.raises(ValueError, match="in evaluation"):
        tfwd.unwrap(model)
    assert tfwd.unwrap(model, fold=True) is model
    assert model.layers[0].kernel is kernel
    np.testing.assert_allclose(model(X), expected, rtol=1e-6)


def _unbuilt() -> None:
    tfwd.parametrize(keras.Sequential([DENSE(2)]), {"kernel": P.Dropout(0.5)}, in_place=True)


WRONG: dict[str, tuple[dict[Any, Any], str]] = {
    "no match": ({"krnel": P.Dropout(0.5)}, "'krnel' matches no weight.*first/kernel"),
    "shadowed": ({".*": P.Dropout(0.5), "kernel": P.Dropout(0.1)}, "'kernel' selects no weight"),
    "frozen": ({"frozen/kernel": P.Dropout(0.5)}, "selects only frozen weights.*frozen/kernel"),
    "rate": ({"kernel": P.Dropout(1.5)}, r"weight 'first/kernel'.*rate must be in \[0, 1\)"),
    "source": ({"kernel": P.Mixout(0.5, towards="none.npz")}, "cannot read its reference"),
    "not finite": (
        {"first/kernel": P.Mixout(0.5, towards={"first/kernel": np.full((8, 4), np.nan)})},
        "elements that are NaN or infinite",
    ),
    "no parametrization": ({"kernel": 0.5}, "expected a parametrization"),
    "gain": ({"first/kernel": P.WeightNorm(gain=True)}, "adds trainable weights"),
    "empty": ({}, "parametrizations is empty"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_leave_the_model_as_it_was(name: str) -> None:
    parts, message = WRONG[name]
    model = made(
        lambda: keras.Sequential(
            [keras.Input((8,)), DENSE(4, name="first"), DENSE(2, name="frozen")]
        )
    )
    model.layers[1].trainable = False
    names = [set(vars(layer)) for layer in _keras.layers.all_layers(model)]
    with pytest.raises(ValueError, match=message):
        tfwd.parametrize(model, parts, in_place=True)
    assert [set(vars(layer)) for layer in _keras.layers.all_layers(model)] == names
    assert not tfwd.added_parametrizations(model)


def test_errors_name_what_to_do() -> None:
    dense = made(lambda: DENSE(2))
    tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, in_place=True)
    with pytest.raises(ValueError, match="parametrized in place is not supported"):
        tfwd.moment_matching(dense, X)
    with pytest.raises(ValueError, match="has no weights yet.*call it on a batch first"):
        _unbuilt()
    with pytest.raises(ValueError, match="RNN cell"):
        tfwd.parametrize(keras.layers.LSTMCell(2), {"kernel": P.Dropout(0.5)}, in_place=True)
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4), DENSE(2)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, in_place=True)
    with pytest.raises(ValueError, match=f"call tfwd.unwrap with '{model.name}'"):
        tfwd.unwrap(model.layers[0])
    with pytest.raises(ValueError, match="inside tf.recompute_grad"):
        tf.recompute_grad(lambda x: model(x, training=True))(tf.constant(X))

    class Traced(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = DENSE(2)

        @tf.function
        def call(self, x: Any) -> Any:
            return self.dense(x)

    with pytest.raises(ValueError, match="is itself a tf.function"):
        tfwd.parametrize(made(Traced), {".*kernel": P.Dropout(0.5)}, in_place=True)


@pytest.mark.skipif(IS_KERAS_2, reason="Keras 2 has neither")
def test_low_rank_adaptation_and_quantized_layers() -> None:
    dense = made(lambda: DENSE(6))
    tfwd.parametrize(dense, {"kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    before = [np.asarray(v) for v in added(dense).effective_weights(0).values()]
    dense.enable_lora(2)
    for one, other in zip(before, added(dense).effective_weights(0).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    low = [np.asarray(v) for v in (dense.lora_kernel_a, dense.lora_kernel_b)]
    expected = X @ (before[0] + low[0] @ low[1]) + np.asarray(dense.bias)
    np.testing.assert_allclose(dense(X, training=True), expected, rtol=1e-4, atol=1e-5)
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, in_place=True)
    with pytest.warns(UserWarning) as caught:
        model.quantize("int8")
    assert any("is parametrized in place" in str(one.message) for one in caught)
    assert model.layers[0].quantization_mode is None
    tfwd.unwrap(model)
    quantized = made(lambda: DENSE(6))
    quantized.quantize("int8")
    with pytest.raises(ValueError, match="dtype int8.*quantized"):
        tfwd.parametrize(quantized, {"kernel": P.Dropout(0.5)}, in_place=True)


@pytest.mark.slow
def test_a_published_model() -> None:
    """Adds dropout to the convolutions of MobileNetV2, which has BatchNormalization."""

    def make() -> keras.Model:
        return keras.applications.MobileNetV2((32, 32, 3), alpha=0.35, weights=None, classes=3)

    x = np.random.default_rng(1).uniform(size=(4, 32, 32, 3)).astype("float32")
    model, plain = made(make, x), made(make, x)
    expected = model.predict(x, verbose=0)
    pointwise = "(.*_(expand|project)|Conv_1)/kernel"
    tfwd.parametrize(model, {pointwise: P.Dropout(0.3)}, seed=1, in_place=True)
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    one = added(model)
    values = one.effective_weights(0).values()
    effective = {id(t.variable): v for (t, _), v in zip(one.targeted, values, strict=True)}
    assert len(effective) == 34
    plain.set_weights([np.asarray(effective.get(id(v), v)) for v in model.weights])
    outputs = model(x, training=True)
    np.testing.assert_allclose(outputs, plain(x, training=True), rtol=1e-3, atol=1e-4)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy())
    model.fit(x, np.array([0, 1, 2, 0]), verbose=0)
    assert one.calls == 2
    assert tfwd.unwrap(model) is model
