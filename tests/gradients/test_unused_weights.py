"""Weights that no example's loss depends on: zeros, named "unused", at no cost."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients.brute_force import assert_moments, per_example, randomized

from tfwd import gradients
from tfwd.gradients import example_by_example

L = keras.layers


class Own(L.Layer):
    """A layer without a rule."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x @ self.kernel


def two_heads(head: L.Layer, dropout: float = 0.0) -> keras.Model:
    inputs = keras.Input((3,))
    hidden = L.Dropout(dropout, seed=1)(L.Dense(4, "tanh")(inputs))
    return randomized(keras.Model(inputs, {"one": L.Dense(2)(hidden), "two": head(hidden)}))


def data(batch: int = 5) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    random = np.random.default_rng(1)
    y = random.normal(size=(batch, 2)).astype("f")
    return random.normal(size=(batch, 3)).astype("f"), {"one": y, "two": y}


@pytest.mark.parametrize("head", [L.Dense, Own])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_head_without_a_loss(
    head: type, dropout: float, chunk_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for way in ("one_by_one", "backward_each"):
        monkeypatch.setattr(example_by_example, way, lambda *_: pytest.fail("the general way"))
    model, (x, y) = two_heads(head(2) if head is L.Dense else head(), dropout), data()
    found = gradients.moments(model, x, y, {"one": "mse"}, training=True, chunk_size=chunk_size)
    own = len(model.layers[-1].trainable_variables)
    assert found.methods == ["dense"] * 4 + ["unused"] * own
    for moment in [*found.mean[4:], *found.mean_square[4:]]:
        np.testing.assert_array_equal(moment, np.zeros(moment.shape))
    if not dropout:
        rows = per_example(model, x, y, lambda y, p: tf.reduce_mean((y["one"] - p["one"]) ** 2))
        assert_moments(found, rows, 1e-5)


def products(model: keras.Model, x: Any, y: Any, loss: Any) -> int:
    """Counts the products in the graph of the moments that the results depend on."""

    @tf.function
    def run(x: Any, y: Any) -> Any:
        moments = gradients.moments(model, x, y, loss)
        return moments.mean, moments.mean_square

    function = run.get_concrete_function(*tf.nest.map_structure(tf.constant, (x, y)))
    graph = tf.compat.v1.graph_util.extract_sub_graph(
        function.graph.as_graph_def(), [output.op.name for output in function.outputs]
    )
    return sum(node.op in ("MatMul", "BatchMatMulV2") for node in graph.node)


def test_head_without_a_loss_costs_nothing_in_a_graph() -> None:
    model, (x, y) = two_heads(Own()), data()
    without = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(2)])
    wanted = products(without, x, y["one"], "mse")
    assert products(model, x, y, {"one": "mse"}) == wanted


def test_layer_that_is_not_called_and_one_with_a_loss_of_its_own() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle, self.penalized = L.Dense(2), L.Dense(2), L.Dense(2)

        def build(self, shape: Any) -> None:
            for layer in (self.used, self.idle, self.penalized):
                layer.build(shape)
            self.built = True

        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.add_loss(tf.reduce_sum(self.penalized(x) ** 2))
            return self.used(x)

    model, (x, y) = Model(), data()
    model.build((None, 3))
    found = gradients.moments(model, x, y["one"], "mse", chunk_size=2)
    assert found.methods == ["dense"] * 2 + ["unused"] * 4
    np.testing.assert_array_equal(found.mean[2], np.zeros([3, 2]))
    np.testing.assert_array_equal(found.mean_square[4], np.zeros([3, 2]))
    assert found.penalty[2] is None and found.penalty[0] is None
    # The chunks have 2, 2 and 1 examples, and count by their sizes.
    output = model.penalized(x).numpy()
    parts = [2 * x[a:b].T @ output[a:b] * (b - a) / 5 for a, b in ((0, 2), (2, 4), (4, 5))]
    np.testing.assert_allclose(found.penalty[4], sum(parts), rtol=1e-4)
    np.testing.assert_array_equal(found.mean[4], found.penalty[4])


@pytest.mark.parametrize("rule_uses", ["what it gave", "what it made of it"])
def test_rule_that_does_not_give_its_probe_back_is_named(rule_uses: str) -> None:
    @gradients.rule(Own)
    def forgetful(layer: L.Layer, call: gradients.Call, x: tf.Tensor) -> tf.Tensor:
        result = x @ call.value(layer.kernel)
        probe = call.probe(result)
        wrong = result if rule_uses == "what it gave" else probe + 0
        call.use(layer.kernel, wrong, lambda d: gradients.OuterProduct(x, d))
        return probe

    x, y = data()
    own = Own(name="mine")
    model = keras.Sequential([keras.Input((3,)), own])
    try:
        message = "rule 'forgetful' of layer 'mine' .* '.*kernel', .* compute with the result of"
        with pytest.raises(ValueError, match=message):
            gradients.moments(model, x, y["one"], "mse")
    finally:
        gradients.rules.registry._rules.pop(Own)
