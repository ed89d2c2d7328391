"""Gradients: those of the very draw, with or without recomputation, in every kind of program."""

import numpy as np
import pytest
import tensorflow as tf

from conformance import harness
from conformance.table import CASES, DROPOUT, OWN, Case

STEPS = 2


@harness.each(CASES)
@pytest.mark.parametrize("recompute", [True, False], ids=["recompute", "keep"])
def test_gradient_is_that_of_the_plain_layer_times_mask_over_keep(
    case: Case, recompute: bool
) -> None:
    wrapped = harness.built(case, recompute=recompute)
    harness.run(wrapped, case, training=True)
    weights = harness.all_effective(wrapped, 1)
    plain = harness.plain(case, weights)
    harness.copy_states(wrapped, plain)
    _, expected = harness.step(plain, case)
    _, gradients = harness.step(wrapped, case)
    trainable = [i for i, w in enumerate(wrapped.weights) if w.trainable]
    rates = harness.rates(case, wrapped)
    for index, position in enumerate(trainable):
        name = wrapped.weights[position].path
        if rates.get(position) is not None:
            kept = np.asarray(weights[position]) != 0.0
            assert (gradients[index].numpy()[~kept] == 0.0).all(), name
            expected[index] = expected[index] * kept / (1 - rates[position])
        harness.assert_close(gradients[index], expected[index], what=name)
    # The gradients of the inputs.
    harness.assert_close(gradients[len(trainable) :], expected[len(trainable) :])


def _train(case: Case, mode: str, recompute: bool) -> list[np.ndarray]:
    """Outputs, gradients and weights of some training steps with a plain gradient descent."""
    layer = harness.built(case, recompute=recompute)
    weights = [w.value for w in layer.trainable_weights]

    def step(training) -> list[tf.Tensor]:
        outputs, gradients = harness.step(layer, case, training)
        for weight, gradient in zip(weights, gradients, strict=False):
            weight.assign_sub(0.1 * gradient)
        return [tf.convert_to_tensor(x) for x in (*tf.nest.flatten(outputs), *gradients)]

    return [*_MODES[mode](layer, case, step), *(w.numpy() for w in layer.weights)]


def _eager(layer, case, step) -> list[np.ndarray]:
    return [x for _ in range(STEPS) for x in harness.numbers(step(True))]


def _function(layer, case, step) -> list[np.ndarray]:
    function = tf.function(lambda: step(True))
    return [x for _ in range(STEPS) for x in harness.numbers(function())]


def _while_loop(layer, case, step) -> list[np.ndarray]:
    kinds = tf.function(lambda: step(True)).get_concrete_function().structured_outputs

    @tf.function
    def loop() -> list[tf.Tensor]:
        def body(index, *results):
            found = [
                tf.tensor_scatter_nd_update(r, [[index]], [x])
                for r, x in zip(results, step(True), strict=True)
            ]
            return index + 1, *found

        start = [tf.zeros([STEPS, *x.shape], x.dtype) for x in kinds]
        return tf.while_loop(lambda index, *_: index < STEPS, body, (0, *start))[1:]

    stacked = harness.numbers(loop())
    return [x[i] for i in range(STEPS) for x in stacked]


def _tensor_flag(layer, case, step) -> list[np.ndarray]:
    function = tf.function(step, input_signature=[tf.TensorSpec([], tf.bool)])
    return [x for _ in range(STEPS) for x in harness.numbers(function(tf.constant(True)))]


def _tape_outside(layer, case, step) -> list[np.ndarray]:
    """The tape is outside of a function that takes the flag as a tensor."""
    signature = [tf.TensorSpec([], tf.bool)]
    arguments, keywords = case.row.inputs()
    weights = [w.value for w in layer.trainable_weights]
    watched = [x for x in arguments if x.dtype.is_floating]

    def forward(training, *arguments):
        outputs = layer(*arguments, **keywords, training=training)
        return outputs, harness.loss_of(outputs, layer.losses)

    signature += [tf.TensorSpec(x.shape, x.dtype) for x in arguments]
    function = tf.function(forward, input_signature=signature)
    results = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs, loss = function(tf.constant(True), *arguments)
        gradients = tape.gradient(loss, [*weights, *watched], unconnected_gradients="zero")
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        for weight, gradient in zip(weights, gradients, strict=False):
            weight.assign_sub(0.1 * gradient)
        results += [*harness.numbers(outputs), *harness.numbers(gradients)]
    return results


_MODES = {
    "eager": _eager,
    "tf.function": _function,
    "tf.while_loop": _while_loop,
    "tensor flag, tape inside": _tensor_flag,
    "tensor flag, tape outside": _tape_outside,
}


@pytest.mark.parametrize("mode", [mode for mode in _MODES if mode != "tf.function"])
@harness.each([*DROPOUT, *OWN])
def test_recomputation_changes_nothing(case: Case, mode: str) -> None:
    expected = _train(case, "eager", recompute=False)
    harness.assert_close(_train(case, mode, recompute=True), expected, what=mode)


@harness.each([*DROPOUT, *OWN])
def test_a_tensor_flag_without_recomputation(case: Case) -> None:
    expected = _train(case, "eager", recompute=False)
    harness.assert_close(_train(case, "tensor flag, tape inside", recompute=False), expected)


@harness.each([*DROPOUT, *OWN])
def test_one_traced_function_serves_training_and_evaluation(case: Case) -> None:
    wrapped, eager = harness.built(case), harness.built(case)
    function = tf.function(
        lambda training: harness.run(wrapped, case, training),
        input_signature=[tf.TensorSpec([], tf.bool)],
    )
    for flag in (False, True, False, False, True):
        for layer in (wrapped, eager):
            harness.reset(layer)
        expected = harness.run(eager, case, flag)
        harness.assert_close(function(tf.constant(flag)), expected, 1e-6)
    calls = [inner.calls for inner in harness.perturbing(wrapped)]
    assert calls == [2] * len(calls)
