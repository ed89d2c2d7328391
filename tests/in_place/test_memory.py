"""Backward computes effective weights again, and removed parametrizations are freed.

Like `test_saved_tensors`, this counts tensors.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf
from in_place_tools import DENSE, DROPPED, X, added, functional, made, stack, variables

import tfwd
from tfwd import parametrizations as P


def test_a_deleted_model_is_freed() -> None:
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


def test_a_removed_parametrization_is_freed() -> None:
    model = made(stack, X)
    tfwd.parametrize(model, DROPPED, seed=1, in_place=True)
    model(X, training=True)
    watched = weakref.ref(added(model))
    tfwd.unwrap(model)
    gc.collect()
    assert watched() is None


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
@pytest.mark.parametrize("recurrent", [False, True])
def test_graphs_keep_no_effective_weight(recurrent: bool) -> None:
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


@pytest.mark.usefixtures("all_large")
@pytest.mark.parametrize("recurrent", [False, True])
def test_eager_mode_keeps_no_effective_weight(recurrent: bool) -> None:
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
