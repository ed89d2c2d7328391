"""Helpers of the table's tests: built layers, training steps, comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, extended, soak

import tfwd
from conformance.table import IN_PLACE_KINDS, NATURES, SEED, Case
from tfwd import _keras
from tfwd.parametrizations.parametrized_layers import added_in_place


def each(cases: Sequence[Case]) -> Any:
    """Parametrizes a test over cases, and names them in the test's id."""
    rows = [pytest.param(case, id=case.name, marks=further(case)) for case in cases]
    return pytest.mark.parametrize("case", rows)


def further(case: Case) -> list[pytest.MarkDecorator]:
    """Returns the mark of a case in place that `make test` leaves out, or none.

    Each kind of hooked layer has a row there.
    """
    is_quick = case.in_place is None or case.row.name in IN_PLACE_KINDS
    return [] if is_quick else [extended]


def each_or_half(cases: Sequence[Case]) -> Any:
    """Parametrizes a test over cases. Every other case is for `make soak`.

    Keras 2 leaves out the other half.

    For code that several layers of a nature share.
    """
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                case,
                id=case.name,
                marks=[soak] * (case not in NATURES and number % 2 == IS_KERAS_2) + further(case),
            )
            for number, case in enumerate(cases)
        ],
    )


def randomize(layer: keras.Layer) -> None:
    """Gives every weight values other than zero, the same for layers of the same kind."""
    random = np.random.default_rng(7)
    for weight in layer.weights:
        values = random.uniform(0.2, 0.9, weight.shape) * random.choice([-1, 1], weight.shape)
        weight.assign(abs(values) if "variance" in _keras.variables.name(weight) else values)


def built(case: Case, seed: int | None = SEED, recompute: bool = True) -> keras.Layer:
    """Returns the case's layer, built by a call in evaluation, with the weights of `randomize`."""
    layer = case.make(seed=seed, recompute=recompute)
    run(layer, case)
    if case.in_place is not None:
        options = {"seed": seed, "recompute": recompute}
        assert tfwd.parametrize(layer, case.in_place, **options, in_place=True) is layer
    randomize(layer)
    reset(layer)
    return layer


def plain(case: Case, values: Sequence[Any] | None = None) -> keras.Layer:
    """Returns the row's plain layer, with the weights of `randomize` or the given ones."""
    layer = case.row.make()
    run(layer, case)
    if values is None:
        randomize(layer)
    else:
        layer.set_weights([np.asarray(value) for value in values])
    reset(layer)
    return layer


def run(layer: keras.Layer, case: Case, training: Any = False, inputs: Any = None) -> Any:
    arguments, keywords = case.row.inputs() if inputs is None else inputs
    return layer(*arguments, **keywords, training=training)


def states(layer: keras.Layer) -> list[keras.Variable]:
    """Returns the seeds and recurrent states, without the state of draws."""
    weights = {id(weight) for weight in layer.weights}
    own = {id(inner.draws.state) for inner in inner_layers(layer) if hasattr(inner, "draws")}
    seeds = [v for v in layer.variables if id(v) not in weights | own]
    # Keras does not count the states of a stateful recurrent layer among its variables.
    held = [getattr(inner, "states", None) for inner in inner_layers(layer)]
    return [*seeds, *(v for v in tf.nest.flatten(held) if isinstance(v, keras.Variable))]


def inner_layers(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the layer and all layers in it, outermost first."""
    return [layer, *(f for inner in _keras.layers.sublayers(layer) for f in inner_layers(inner))]


def numbers(nest: Any) -> list[np.ndarray]:
    return [np.asarray(tf.convert_to_tensor(x)) for x in tf.nest.flatten(nest)]


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """Asserts that values are equal bit for bit."""
    actual, expected = numbers(actual), numbers(expected)
    assert len(actual) == len(expected), what
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype, what
        np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), err_msg=what)


def assert_close(actual: Any, expected: Any, tolerance: float = 2e-5, what: str = "") -> None:
    actual, expected = numbers(actual), numbers(expected)
    assert len(actual) == len(expected), what
    for a, b in zip(actual, expected, strict=True):
        a, b = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)


def differ(one: Any, other: Any) -> bool:
    pairs = zip(numbers(one), numbers(other), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


def perturbing(layer: keras.Layer) -> list[keras.Layer]:
    """Returns the outermost layers that perturb weights: layers inside, or the layer itself."""
    if found := added_in_place(layer):
        return found
    if hasattr(layer, "effective_weights"):
        return [layer]
    return [found for inner in _keras.layers.sublayers(layer) for found in perturbing(inner)]


def effective(layer: keras.Layer, call: int) -> dict[int, tf.Tensor]:
    """Returns the effective weights of a training call, by their positions in `layer.weights`."""
    positions = {id(weight): i for i, weight in enumerate(layer.weights)}
    result = {}
    for inner in perturbing(layer):
        for name, tensor in inner.effective_weights(call).items():
            holder = getattr(inner, "target", inner)
            result[positions[id(weight_named(holder, name))]] = tensor
    return result


def weight_named(layer: keras.Layer, name: str) -> keras.Variable:
    """Returns the one weight whose path ends in the name."""
    paths = zip(layer.weights, _keras.variables.paths(layer), strict=True)
    (weight,) = (weight for weight, path in paths if f"/{path}".endswith(f"/{name}"))
    return weight


def rates(case: Case, layer: keras.Layer) -> dict[int, float | None]:
    """Returns the drop rates of the case by positions in `layer.weights`."""
    positions = {id(weight): i for i, weight in enumerate(layer.weights)}
    return {positions[id(weight_named(layer, name))]: rate for name, rate in case.rates.items()}


def all_effective(layer: keras.Layer, call: int) -> list[Any]:
    """Returns all weights as training call number `call` uses them."""
    found = effective(layer, call)
    return [found.get(i, weight) for i, weight in enumerate(layer.weights)]


def loss_of(outputs: Any, losses: Sequence[Any]) -> tf.Tensor:
    """Returns a scalar to which every entry of every output contributes differently."""
    total = tf.add_n([tf.cast(x, tf.float32) for x in losses]) if losses else tf.zeros([])
    for output in tf.nest.flatten(outputs):
        if not output.dtype.is_floating:
            continue
        flat = tf.reshape(tf.cast(output, tf.float32), [-1])
        size = tf.cast(tf.size(flat), tf.float32)
        total += tf.reduce_sum(flat * tf.cos(tf.range(size) * 0.7)) / size
    return total


def step(layer: keras.Layer, case: Case, training: Any = True) -> tuple[Any, list[Any]]:
    """Returns outputs, and gradients of the trainable weights and the floating-point inputs."""
    return step_on(layer, case.row.inputs(), training)


def step_on(layer: keras.Layer, inputs: Any, training: Any = True) -> tuple[Any, list[Any]]:
    arguments, keywords = inputs
    watched = [x for x in tf.nest.flatten(arguments) if x.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch(watched)
        outputs = layer(*arguments, **keywords, training=training)
        loss = loss_of(outputs, layer.losses)
    sources = [*map(_keras.variables.tf_variable, layer.trainable_weights), *watched]
    gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
    return outputs, [tf.convert_to_tensor(g) for g in gradients]


def model_of(layer: keras.Layer, case: Case) -> keras.Model:
    """Returns a functional model that consists of the layer."""
    arguments, keywords = case.row.inputs()
    inputs = tf.nest.map_structure(
        lambda x: keras.Input(batch_shape=x.shape, dtype=x.dtype.name), arguments
    )
    by_name = {
        key: keras.Input(batch_shape=x.shape, dtype=x.dtype.name, name=key)
        for key, x in keywords.items()
    }
    outputs = layer(*inputs, **by_name)
    flat = [*tf.nest.flatten(inputs), *by_name.values()]
    return keras.Model(flat[0] if len(flat) == 1 else flat, outputs)


def feed(case: Case) -> Any:
    """Returns the inputs of `model_of`."""
    arguments, keywords = case.row.inputs()
    flat = [*tf.nest.flatten(arguments), *keywords.values()]
    return flat[0] if len(flat) == 1 else flat


def reset(layer: keras.Layer) -> None:
    """Sets the states of recurrent layers to zero."""
    for state in states(layer):
        if "float" in str(state.dtype):
            state.assign(tf.zeros(state.shape, state.dtype))


def copy_states(source: keras.Layer, target: keras.Layer) -> None:
    """Gives a layer the seeds and recurrent states of another layer of its kind."""
    for a, b in zip(states(source), states(target), strict=True):
        b.assign(_keras.variables.value(a))
