"""Errors, and the model after an error or an interruption."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import DENSE, DROPPED, EXAMPLES, X, added, effective, functional, made, stack
from stack_marks import IS_KERAS_2

import tfwd
from tfwd import _keras
from tfwd import parametrizations as P


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


@pytest.mark.parametrize("graph", [False, True])
def test_an_error_in_a_call_leaves_nothing_behind(graph: bool) -> None:
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
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tfwd.layers._substitution import method_hooks
    from tfwd.layers._substitution.in_place import installation

    model = made(stack, X)
    expected = model(X)
    before = [set(vars(layer)) for layer in _keras.layers.all_layers(model)]
    own, times = method_hooks.add, []

    def interrupted(*args: Any) -> None:
        own(*args)
        times.append(0)
        if len(times) == at:
            raise KeyboardInterrupt

    def untracked(*args: Any) -> None:
        if not times.count(1):
            times.append(1)
            raise KeyboardInterrupt

    monkeypatch.setattr(method_hooks, "add", interrupted)
    if not at:
        monkeypatch.setattr(installation._keras, "track", untracked)
    with pytest.raises(KeyboardInterrupt):
        tfwd.parametrize(model, DROPPED, in_place=True)
    monkeypatch.undo()
    assert [set(vars(layer)) for layer in _keras.layers.all_layers(model)] == before
    np.testing.assert_array_equal(model(X, training=True), expected)
    tfwd.parametrize(model, DROPPED, in_place=True)
    assert added(model).calls == 0


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
    "empty": ({}, "parametrizations of model .* is empty: pass at least one pattern"),
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
        tfwd.moment_matching(dense, EXAMPLES)
    with pytest.raises(ValueError, match="has no weights yet.*call it on a batch first"):
        _unbuilt()
    with pytest.raises(ValueError, match="RNN cell"):
        tfwd.parametrize(keras.layers.LSTMCell(2), {"kernel": P.Dropout(0.5)}, in_place=True)
    model = made(lambda: keras.Sequential([keras.Input((8,)), DENSE(4), DENSE(2)]))
    tfwd.parametrize(model, {"kernel": P.Dropout(0.5)}, in_place=True)
    with pytest.raises(ValueError, match=f"call tfwd.unwrap with '{model.name}'"):
        tfwd.unwrap(model.layers[0])
    with pytest.raises(ValueError, match="inside tf.recompute_grad"):
        tf.recompute_grad(lambda x: model(x, training=True))(tf.constant(EXAMPLES))

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
    expected = EXAMPLES @ (before[0] + low[0] @ low[1]) + np.asarray(dense.bias)
    np.testing.assert_allclose(dense(EXAMPLES, training=True), expected, rtol=1e-4, atol=1e-5)
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
