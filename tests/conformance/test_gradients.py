"""Gradients of the same draw, with or without recomputation, in every kind of program."""

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2, quick_rows, rest, soak

from conformance import harness
from conformance.table import CASES, FURTHER, IN_PLACE, NATURES, NOT_NOISE, Case
from tfwd import _keras
from tfwd._random import masks_and_normals

STEPS = 2
SIZES = ("small", "large")


def _sizes(case: Case, number: int) -> tuple[str, ...]:
    """Returns both sizes for one layer of each nature, and one size in turn for the others."""
    return SIZES if case in NATURES else (SIZES[number % 2],)


# Without recomputation the cases are the reference of test_recomputation_changes_nothing.
_BOTH = [
    pytest.param(
        case,
        recompute,
        size,
        id=f"{case.name}, {'recompute' if recompute else 'keep'}, {size}",
        marks=[rest] * (case not in NATURES and number % 2 == 1) + harness.further(case),
    )
    for number, case in enumerate([*CASES, *FURTHER, *IN_PLACE])
    for recompute in (True, False)
    if recompute or case in NATURES
    for size in _sizes(case, number)
]


@quick_rows(
    "Bidirectional of WeightDropLSTM, recompute, small",
    "BatchNormalization, dropout, recompute, large",
    "LSTM, dropout, recompute, large",
    "user's layer, dropout, recompute, large",
    "Dense, dropout, recompute, large",
    "LSTM, dropout, keep, small",
    "LSTM, dropout, recompute, small",
    "MultiHeadAttention, dropout, recompute, small",
    "LSTM, in place, recompute, small",
    "WeightDropout of VariationalNoise, recompute, small",
    "user's layer, dropout, keep, large",
    "functional model, dropout, recompute, small",
    "Dense, dropout, recompute, small",
    "Dense, dropout, keep, small",
    "Conv1D, dropout, recompute, small",
    "Dense, noise, recompute, small",
    "Dense, mixout, recompute, small",
    "Embedding, mixout, recompute, small",
    "Embedding, dropout, recompute, small",
    "TiedDense, in place, recompute, small",
)
@pytest.mark.parametrize(("case", "recompute", "size"), _BOTH, indirect=["size"])
def test_gradient_is_the_plain_layers_times_mask_over_keep(
    case: Case, recompute: bool, size: str
) -> None:
    wrapped = harness.built(case, recompute=recompute)
    harness.run(wrapped, case, training=True)
    weights = harness.all_effective(wrapped, 1)
    plain = harness.plain(case, weights)
    harness.copy_states(wrapped, plain)
    _, expected = harness.step(plain, case)
    before = [w.numpy() for w in wrapped.trainable_weights]
    _, gradients = harness.step(wrapped, case)
    harness.assert_same([w.numpy() for w in wrapped.trainable_weights], before, "assigned to")
    trainable = [i for i, w in enumerate(wrapped.weights) if w.trainable]
    rates = harness.rates(case, wrapped)
    for index, position in enumerate(trainable):
        name = _keras.variables.path(wrapped.weights[position])
        if rates.get(position) is not None:
            kept = np.asarray(weights[position]) != 0.0
            assert (gradients[index].numpy()[~kept] == 0.0).all(), name
            expected[index] = expected[index] * kept / (1 - rates[position])
        harness.assert_close(gradients[index], expected[index], what=name)
    # The gradients of the inputs.
    harness.assert_close(gradients[len(trainable) :], expected[len(trainable) :])


def _expected(case: Case) -> list[np.ndarray]:
    """Returns the training in eager mode without recomputation, which all others must equal."""
    key = case.name, masks_and_normals.SMALL
    if key not in _known:
        _known[key] = _train(case, "eager", recompute=False)
    return _known[key]


_known: dict[tuple[str, int], list[np.ndarray]] = {}


def _train(case: Case, mode: str, recompute: bool) -> list[np.ndarray]:
    """Returns outputs, gradients and weights of some steps of plain gradient descent."""
    layer = harness.built(case, recompute=recompute)
    return [*_MODES[mode](layer, case), *(w.numpy() for w in layer.weights)]


def _step(layer, case: Case, training) -> list[tf.Tensor]:
    outputs, gradients = harness.step(layer, case, training)
    _descend(layer, gradients)
    return [tf.convert_to_tensor(x) for x in (*tf.nest.flatten(outputs), *gradients)]


def _descend(layer, gradients) -> None:
    for weight, gradient in zip(layer.trainable_weights, gradients, strict=False):
        _keras.variables.tf_variable(weight).assign_sub(0.1 * gradient)


def _eager(layer, case: Case) -> list[np.ndarray]:
    return [x for _ in range(STEPS) for x in harness.numbers(_step(layer, case, True))]


def _function(layer, case: Case) -> list[np.ndarray]:
    function = tf.function(lambda: _step(layer, case, True))
    return [x for _ in range(STEPS) for x in harness.numbers(function())]


def _while_loop(layer, case: Case, flag: tf.Tensor | None = None) -> list[np.ndarray]:
    """Makes all steps in one loop. The training flag is a tensor if one is given."""
    expected = _expected(case)
    kinds = [(x.shape, x.dtype) for x in expected[: (len(expected) - len(layer.weights)) // STEPS]]

    @tf.function(input_signature=[tf.TensorSpec([], tf.bool)])
    def loop(training: tf.Tensor) -> list[tf.Tensor]:
        def body(index, *stacks):
            found = _step(layer, case, True if flag is None else training)
            return index + 1, *(
                tf.tensor_scatter_nd_update(stack, [[index]], [x])
                for stack, x in zip(stacks, found, strict=True)
            )

        start = [tf.zeros([STEPS, *shape], dtype) for shape, dtype in kinds]
        return tf.while_loop(lambda index, *_: index < STEPS, body, (0, *start))[1:]

    stacks = harness.numbers(loop(tf.constant(True)))
    return [stack[i] for i in range(STEPS) for stack in stacks]


def _tape_outside(layer, case: Case) -> list[np.ndarray]:
    """Trains with the tape outside a function that takes the flag as a tensor."""
    arguments, keywords = case.row.inputs()
    watched = [x for x in tf.nest.flatten(arguments) if x.dtype.is_floating]

    def forward(training, *arguments):
        outputs = layer(*arguments, **keywords, training=training)
        return outputs, harness.loss_of(outputs, layer.losses)

    specs = tf.nest.map_structure(lambda x: tf.TensorSpec(x.shape, x.dtype), arguments)
    signature = [tf.TensorSpec([], tf.bool), *specs]
    function = tf.function(forward, input_signature=signature)
    results = []
    for _ in range(STEPS):
        with tf.GradientTape() as tape:
            tape.watch(watched)
            outputs, loss = function(tf.constant(True), *arguments)
        sources = [*(_keras.variables.tf_variable(w) for w in layer.trainable_weights), *watched]
        gradients = tape.gradient(loss, sources, unconnected_gradients="zero")
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        _descend(layer, gradients)
        results += [*harness.numbers(outputs), *harness.numbers(gradients)]
    # The same trace serves evaluation.
    harness.reset(layer)
    outputs, _ = function(tf.constant(False), *arguments)
    harness.reset(layer)
    harness.assert_close(outputs, harness.run(layer, case), 1e-6, "evaluation")
    assert {inner.calls for inner in harness.perturbing(layer)} == {STEPS}
    assert function.experimental_get_tracing_count() == 1
    return results


_MODES = {
    "eager": _eager,
    "function": _function,
    "loop": _while_loop,
    "loop, tensor flag": lambda layer, case: _while_loop(layer, case, tf.constant(True)),
    "tensor flag, tape outside": _tape_outside,
}
_KEPT = ("loop, tensor flag", "tensor flag, tape outside")


def _refuses_tensors(case: Case) -> bool:
    """Returns True if a layer of Keras inside gets the flag as a tensor, which it refuses.

    In a wrapper it gets a Python bool.
    """
    has_dropout = case.row.name in ("BatchNormalization", "Bert", "T5Stack")
    return case.in_place is not None and has_dropout and not IS_KERAS_2


# Every mode for a layer of each nature (two of them are slow, which others contain), and for the
# others one of the two that contain all the rest, by turns; an eighth of those in little time.
_FAST = (5,)
_RECOMPUTED = [
    pytest.param(
        case,
        mode,
        size,
        id=f"{case.name}, {mode}, {size}",
        marks=[soak] * (case not in NATURES and number % 8 not in _FAST)
        + [rest] * (case in NATURES and mode in ("function", "loop"))
        + harness.further(case),
    )
    for number, case in enumerate([*NOT_NOISE, *IN_PLACE])
    for mode in _MODES
    if case in NATURES or mode == ("loop" if _refuses_tensors(case) else _KEPT[number % 2])
    for size in _sizes(case, number // 2)
]


@quick_rows(
    "LSTM, dropout, tensor flag, tape outside, large",
    "BatchNormalization, dropout, loop, tensor flag, small",
    "user's layer, dropout, eager, large",
    "Dense, dropout, eager, small",
    "Dense, dropout, tensor flag, tape outside, small",
    "LSTM, dropout, eager, small",
    "BatchNormalization, dropout, eager, small",
)
@pytest.mark.parametrize(("case", "mode", "size"), _RECOMPUTED, indirect=["size"])
def test_recomputation_changes_nothing(case: Case, mode: str, size: str) -> None:
    harness.assert_close(_train(case, mode, recompute=True), _expected(case), what=mode)


@quick_rows("Dense, *", "user's layer, dropout-tensor flag*", "LSTM, dropout-loop*")
@pytest.mark.parametrize(("mode", "size"), [*zip(_KEPT, SIZES, strict=True)], indirect=["size"])
@harness.each(NATURES)
def test_modes_without_recomputation(case: Case, mode: str, size: str) -> None:
    harness.assert_close(_train(case, mode, recompute=False), _expected(case), what=mode)
