"""The LSTM with the gradient written by hand, against those of Keras and PyTorch."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import lstm

TIME, BATCH, FEATURES, UNITS = 7, 3, 5, 4
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


def problem(dtype: str, bias: bool = True, time: int = TIME, batch: int = BATCH) -> list[tf.Tensor]:
    """Inputs, h, c, kernel, recurrent kernel, and bias."""
    generator = np.random.default_rng(0)
    shapes = [(time, batch, FEATURES), (batch, UNITS), (batch, UNITS)]
    shapes += [(FEATURES, 4 * UNITS), (UNITS, 4 * UNITS), (4 * UNITS,)]
    values = [tf.constant(generator.normal(size=shape), dtype) for shape in shapes]
    return values if bias else values[:-1]


def upstream(time: int = TIME) -> list[np.ndarray]:
    """The gradients of the outputs and of the last states."""
    generator = np.random.default_rng(1)
    shapes = [(time, BATCH, UNITS), (BATCH, UNITS), (BATCH, UNITS)]
    return [generator.normal(size=shape) for shape in shapes]


MASK = np.array([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0]], bool).T


def ours(x, h, c, kernel, recurrent, bias=None, mask=None) -> tuple:
    return lstm.lstm(x, [h, c], kernel, recurrent, bias, mask)


def by_keras(x, h, c, kernel, recurrent, bias=None, mask=None) -> tuple:
    layer = keras.layers.LSTM(
        UNITS, return_sequences=True, return_state=True, use_bias=bias is not None, dtype=x.dtype
    )
    layer.build((None, None, FEATURES))
    values = [kernel, recurrent] + ([] if bias is None else [bias])
    mask = None if mask is None else tf.transpose(mask)
    with keras.StatelessScope(list(zip(layer.weights, values, strict=True))):
        y, h, c = layer(tf.transpose(x, [1, 0, 2]), initial_state=[h, c], mask=mask)
    return tf.transpose(y, [1, 0, 2]), h, c


def by_torch(values: list[tf.Tensor], gradients: list[np.ndarray]) -> tuple[list, list]:
    torch = pytest.importorskip("torch")
    x, h, c, kernel, recurrent, *bias = (v.numpy() for v in values)
    layer = torch.nn.LSTM(FEATURES, UNITS, bias=bool(bias), dtype=getattr(torch, str(x.dtype)))
    weights = [kernel.T, recurrent.T, *bias]
    names = ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"][: len(weights)]
    with torch.no_grad():
        for name, value in zip(names, weights, strict=True):
            getattr(layer, name).copy_(torch.tensor(value.copy()))
        if bias:
            layer.bias_hh_l0.zero_()
    x, h, c = (torch.tensor(v, requires_grad=True) for v in (x, h, c))
    y, (last_h, last_c) = layer(x, (h[None], c[None]))
    found = [y, last_h[0], last_c[0]]
    sum((a * torch.tensor(g)).sum() for a, g in zip(found, gradients, strict=True)).backward()
    of_weights = [getattr(layer, name).grad.numpy().T for name in names]
    return [a.detach().numpy() for a in found], [v.grad.numpy() for v in (x, h, c)] + of_weights


def results(function, values: list[tf.Tensor], gradients: list[np.ndarray], **options):
    """What the function returns, and the gradients of all arguments."""
    with tf.GradientTape() as tape:
        tape.watch(values)
        found = function(*values, **options)
        pairs = zip(found, gradients, strict=True)
        loss = tf.add_n([tf.reduce_sum(a * tf.cast(g, a.dtype)) for a, g in pairs])
    return list(found), tape.gradient(loss, values)


def assert_close(found, expected, dtype: str) -> None:
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        scale = max(1.0, np.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("graph", [True, False], ids=["graph", "eager"])
def test_values_and_gradients_are_those_of_keras(dtype: str, bias: bool, graph: bool) -> None:
    values = problem(dtype, bias)
    run = tf.function(results) if graph else results
    assert_close(run(ours, values, upstream()), results(by_keras, values, upstream()), dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_torch(dtype: str, bias: bool) -> None:
    values = problem(dtype, bias)
    expected = by_torch(values, upstream())
    assert_close(tf.function(results)(ours, values, upstream()), expected, dtype)


def test_masked_steps_carry_the_state() -> None:
    values = problem("float64")
    found, gradients = tf.function(results)(ours, values, upstream(), mask=tf.constant(MASK))
    h, c = values[1:3]
    for t in range(TIME):
        _, new_h, new_c = ours(values[0][t : t + 1], h, c, *values[3:])
        h = tf.where(MASK[t][:, None], new_h, h)
        c = tf.where(MASK[t][:, None], new_c, c)
        assert_close(found[0][t], h, "float64")

    assert_close(found[1:], [h, c], "float64")
    # Keras shows zeros before a row's first step that is not masked, so these get no gradient.
    seen = np.cumsum(MASK, 0) > 0
    dy, *others = upstream()
    given = [dy * seen[:, :, None], *others]
    _, gradients = results(ours, values, given, mask=tf.constant(MASK))
    _, expected = results(by_keras, values, given, mask=tf.constant(MASK))
    assert_close(gradients, expected, "float64")


def test_a_masked_step_that_overflows_harms_nothing() -> None:
    values = problem("float32")
    spoiled = tf.where(MASK[:, :, None], values[0], np.inf)
    found, gradients = results(ours, [spoiled, *values[1:]], upstream(), mask=tf.constant(MASK))
    expected, _ = results(ours, values, upstream(), mask=tf.constant(MASK))
    assert_close(found, expected, "float32")
    assert all(np.isfinite(g).all() for g in gradients[1:3])


@pytest.mark.parametrize("graph", [True, False, "compiled"], ids=["graph", "eager", "compiled"])
def test_second_derivatives_are_those_of_keras(graph: bool | str) -> None:
    values = problem("float64")

    def squares(function) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(values)
            _, gradients = results(function, values, upstream())
            loss = tf.add_n([tf.reduce_sum(g * g) for g in gradients])
        return tape.gradient(loss, values)

    run = tf.function(squares, jit_compile=graph == "compiled") if graph else squares
    assert_close(run(ours), squares(by_keras), "float64")


def test_lengths_and_batches_of_any_size_are_one_trace() -> None:
    traces, weights = [], problem("float32")[3:]

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, None, FEATURES]),
            tf.TensorSpec([None, UNITS]),
            tf.TensorSpec([None, UNITS]),
        ]
    )
    def run(x, h, c):
        traces.append(x.shape)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y, *_ = ours(x, h, c, *weights)
        return y, tape.gradient(y, weights)

    for time, batch in [(1, 1), (4, 3), (9, 2)]:
        given = problem("float32", time=time, batch=batch)[:3]
        y, gradients = run(*given)
        assert y.shape == (time, batch, UNITS)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y, *_ = by_keras(*given, *weights)
        assert_close(gradients, tape.gradient(y, weights), "float32")
    assert len(traces) == 1


def test_it_compiles_as_a_whole() -> None:
    values = problem("float32")
    compiled = tf.function(results, jit_compile=True)
    assert_close(compiled(ours, values, upstream()), results(ours, values, upstream()), "float32")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    values = problem("float32")
    half = [tf.cast(v, dtype) for v in values]
    found = tf.function(results)(ours, half, upstream())
    exact = results(ours, [tf.cast(v, "float32") for v in half], upstream())
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(exact), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(tf.cast(a, "float32"), b, atol=0.05 * np.abs(b).max())


def test_backward_keeps_six_numbers_a_step_row_and_unit() -> None:
    def kept(time: int) -> int:
        """Numbers that the graph hands from forward to backward in lists, by tracing alone."""
        values = problem("float32", time=time)
        forward = tf.function(lambda *v: ours(*v)[0]).get_concrete_function(*values)
        graph = forward.graph
        with graph.as_default():
            (gradients,) = tf.gradients([graph.outputs[0]], [graph.inputs[4]])
        loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile")]
        # Each pass is a loop of several steps a turn and one for the rest.
        assert len(loops) == 4 and gradients is not None
        first, second = loops[:2], loops[2:]
        lists = {
            t.ref()
            for loop in second
            for t in loop.inputs
            if t.op in first and t.dtype == tf.variant
        }
        # Whatever backward reads in lists comes from forward's loop: four gates and the cells.
        return len(lists)

    assert kept(TIME) == 5
