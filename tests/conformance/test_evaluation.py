"""Evaluation of a perturbed layer: the same outputs and weights as the plain layer."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfwd
from conformance import harness
from conformance.table import (
    CASES,
    DROPOUT,
    FURTHER,
    IN_PLACE,
    NOT_NOISE,
    OTHER_DIMENSIONS,
    ROWS,
    Case,
)
from tfwd import _keras, layers


@harness.each([*CASES, *FURTHER, *IN_PLACE])
def test_evaluation_is_bit_for_bit_the_plain_layer(case: Case) -> None:
    wrapped, plain = harness.built(case), harness.plain(case)
    for training in (False, None, tf.constant(False)):
        harness.reset(plain)
        harness.reset(wrapped)
        expected = harness.run(plain, case, training=False)
        harness.assert_same(harness.run(wrapped, case, training=training), expected, str(training))


@harness.each_or_half([*NOT_NOISE, *IN_PLACE])
def test_traced_evaluation_is_bit_for_bit_the_plain_layer(case: Case) -> None:
    """Checks that traced evaluation consists of the plain layer's operations and no other."""
    wrapped, plain = harness.built(case), harness.plain(case)
    functions = [
        tf.function(lambda layer=layer: harness.run(layer, case)) for layer in (wrapped, plain)
    ]
    harness.assert_same(functions[0](), functions[1]())
    operations = [
        Counter(op.type for op in function.get_concrete_function().graph.get_operations())
        for function in functions
    ]
    assert operations[0] == operations[1]


@harness.each_or_half([*NOT_NOISE, *IN_PLACE])
def test_variables_equal_the_plain_layers_in_the_same_order(case: Case) -> None:
    wrapped, plain = harness.built(case), harness.plain(case)

    def kinds(weights: list[keras.Variable]) -> list[tuple]:
        return [(_keras.variables.name(w), tuple(w.shape), w.dtype, w.trainable) for w in weights]

    assert kinds(wrapped.weights) == kinds(plain.weights)
    assert kinds(wrapped.trainable_weights) == kinds(plain.trainable_weights)
    assert kinds(wrapped.non_trainable_weights) == kinds(plain.non_trainable_weights)
    assert len(harness.states(wrapped)) == len(harness.states(plain))


@harness.each_or_half([*NOT_NOISE, *IN_PLACE])
def test_set_weights_works_both_ways(case: Case) -> None:
    wrapped, plain = harness.built(case), harness.plain(case)
    values = [np.asarray(w) + 1 for w in plain.weights]
    plain.set_weights(values)
    wrapped.set_weights(plain.get_weights())
    harness.assert_same(wrapped.get_weights(), values)
    wrapped.set_weights([value - 3 for value in values])
    plain.set_weights(wrapped.get_weights())
    harness.assert_same(plain.get_weights(), [value - 3 for value in values])


@harness.each_or_half([*NOT_NOISE, *IN_PLACE])
def test_unwrap_gives_the_plain_layer_on_the_same_variables(case: Case) -> None:
    wrapped, plain = harness.built(case), harness.plain(case)
    harness.run(wrapped, case, training=True)
    bare = tfwd.unwrap(wrapped)
    assert not _of_tfwd(bare)
    assert _is_plain_as(bare, plain)
    if isinstance(plain, layers.TiedDense):  # Keras has only a layer of another order for it
        assert {id(w) for w in bare.weights} == {id(w) for w in wrapped.weights}
    else:
        assert [id(w) for w in bare.weights] == [id(w) for w in wrapped.weights]
        assert [*map(_keras.variables.name, bare.weights)] == [
            *map(_keras.variables.name, plain.weights)
        ]
    for weight, value in zip(wrapped.weights, plain.weights, strict=True):
        weight.assign(value)  # the statistics of a normalization have changed
    harness.reset(bare)
    outputs, expected = harness.run(bare, case), harness.run(plain, case)
    if isinstance(plain, layers.TiedDense):
        harness.assert_close(outputs, expected, 1e-6)
    else:
        harness.assert_same(outputs, expected)


@pytest.mark.parametrize("row", [*ROWS, *OTHER_DIMENSIONS], ids=lambda row: row.name)
def test_the_default_weights(row) -> None:
    layer = row.make()
    arguments, keywords = row.inputs()
    wrapped = layers.WeightDropout(layer, 0.5)
    wrapped(*arguments, **keywords)
    names = [
        name
        for name, value in wrapped.effective_weights(0).items()
        if harness.weight_named(wrapped, name).shape == value.shape
    ]
    assert tuple(names) == row.default


@harness.each_or_half([*DROPOUT, *IN_PLACE])
def test_output_spec_equals_the_plain_layers(case: Case) -> None:
    wrapped, plain = harness.model_of(harness.built(case), case), case.row
    expected = harness.model_of(plain.make(), case)

    def kinds(outputs) -> list[tuple]:
        return [(x.shape, x.dtype) for x in tf.nest.flatten(outputs)]

    assert kinds(wrapped.outputs) == kinds(expected.outputs)


def _of_tfwd(layer: keras.Layer) -> bool:
    module = type(layer).__module__
    own = module.startswith("tfwd") and not module.startswith("tfwd.layers.transformer")
    return (own and not isinstance(layer, keras.Model)) or any(
        map(_of_tfwd, _keras.layers.sublayers(layer))
    )


def _is_plain_as(bare: keras.Layer, plain: keras.Layer) -> bool:
    if isinstance(plain, layers.TiedDense):
        return type(bare) is keras.layers.EinsumDense
    return type(bare) is type(plain)
