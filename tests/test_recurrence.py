"""LSTM and GRU with custom gradients, against the gradients of Keras and PyTorch."""

import dataclasses
from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import extended, quick_rows, soak

from tfwd._graph import stateless_call
from tfwd._recurrent import gru, lstm

TIME, BATCH, FEATURES, UNITS = 7, 3, 5, 4
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}


@dataclasses.dataclass
class Kind:
    """A kind of recurrent layer, in tfwd and in its peers.

    Attributes:
        function: tfwd's function of inputs, states, kernel, recurrent kernel, bias and mask.
        layer: Keras's layer.
        torch: name of PyTorch's layer.
        gates: number of gates of a unit.
        states: number of states of a unit.
        lists: number of lists that the loop stores for backward: an LSTM's four gates and the
            cells, a GRU's z, r, g and q.
        order: positions of the gates in PyTorch.
    """

    function: Callable
    layer: type
    torch: str
    gates: int
    states: int
    lists: int
    order: tuple[int, ...]

    def split(self, values: Sequence) -> tuple[list, list]:
        """Returns the states and the weights from the arguments after the inputs."""
        return list(values[: self.states]), list(values[self.states :])

    def ours(self, x, *rest, mask=None) -> tuple:
        states, (kernel, recurrent, *bias) = self.split(rest)
        given = states[0] if self.states == 1 else states
        return self.function(x, given, kernel, recurrent, *bias, mask=mask)

    def by_keras(self, x, *rest, mask=None) -> tuple:
        states, values = self.split(rest)
        layer = self.layer(
            UNITS, return_sequences=True, return_state=True, use_bias=len(values) > 2, dtype=x.dtype
        )
        layer.build((None, None, FEATURES))
        mask = None if mask is None else tf.transpose(mask)

        def call() -> list:
            return layer(tf.transpose(x, [1, 0, 2]), initial_state=states, mask=mask)

        y, *last = stateless_call.call(call, list(zip(layer.weights, values, strict=True))).outputs
        return tf.transpose(y, [1, 0, 2]), *last

    def problem(
        self, dtype: str, bias: bool = True, time: int = TIME, batch: int = BATCH
    ) -> list[tf.Tensor]:
        """Returns inputs, states, kernel, recurrent kernel, and bias."""
        generator, width = np.random.default_rng(0), self.gates * UNITS
        shapes = [(time, batch, FEATURES), *[(batch, UNITS)] * self.states]
        shapes += [(FEATURES, width), (UNITS, width), (2, width) if self.gates == 3 else (width,)]
        values = [tf.constant(generator.normal(size=shape), dtype) for shape in shapes]
        return values if bias else values[:-1]

    def upstream(self) -> list[np.ndarray]:
        """Returns the gradients of the outputs and of the last states."""
        generator = np.random.default_rng(1)
        shapes = [(TIME, BATCH, UNITS), *[(BATCH, UNITS)] * self.states]
        return [generator.normal(size=shape) for shape in shapes]

    def by_torch(self, values: list[tf.Tensor], gradients: list[np.ndarray]) -> tuple[list, list]:
        torch = pytest.importorskip("torch")

        def turned(weight: np.ndarray, order: Sequence[int]) -> np.ndarray:
            """Returns an array with the gates, along the last axis, in another order."""
            parts = np.split(weight, self.gates, -1)
            return np.concatenate([parts[place] for place in order], -1)

        x, *rest = (v.numpy() for v in values)
        states, (kernel, recurrent, *bias) = self.split(rest)
        layer = getattr(torch.nn, self.torch)(
            FEATURES, UNITS, bias=bool(bias), dtype=getattr(torch, str(x.dtype))
        )
        weights = {"weight_ih_l0": kernel, "weight_hh_l0": recurrent}
        if bias:
            pair = bias[0] if self.gates == 3 else (bias[0], 0 * bias[0])
            weights |= dict(zip(("bias_ih_l0", "bias_hh_l0"), pair, strict=True))
        with torch.no_grad():
            for name, value in weights.items():
                value = torch.tensor(turned(value, self.order).T.copy())
                getattr(layer, name).copy_(value)
        x, *states = (torch.tensor(v, requires_grad=True) for v in (x, *states))
        first = tuple(state[None] for state in states)
        y, last = layer(x, first if self.states == 2 else first[0])
        last = last if self.states == 2 else (last,)
        found = [y, *(state[0] for state in last)]
        pairs = zip(found, gradients, strict=True)
        sum((a * torch.tensor(g)).sum() for a, g in pairs).backward()
        back = np.argsort(self.order)
        of = {name: turned(getattr(layer, name).grad.numpy().T, back) for name in weights}
        of_bias = [of.pop(name) for name in ("bias_ih_l0", "bias_hh_l0") if bias]
        if bias:
            of["bias"] = np.stack(of_bias) if self.gates == 3 else of_bias[0]
        return [a.detach().numpy() for a in found], [
            *(v.grad.numpy() for v in (x, *states)),
            *of.values(),
        ]


KINDS = {
    "lstm": Kind(lstm.lstm, keras.layers.LSTM, "LSTM", 4, 2, 5, (0, 1, 2, 3)),
    "gru": Kind(gru.gru, keras.layers.GRU, "GRU", 3, 1, 4, (1, 0, 2)),
}
MASK = np.array([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0]], bool).T


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


def results(function, values: list[tf.Tensor], gradients: list[np.ndarray], **options):
    """Returns the function's results, and the gradients of all arguments."""
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


@quick_rows(
    "lstm-True-True-float32",
    "gru-True-False-float64",
    "lstm-False-False-float32",
    "gru-False-True-float64",
)
@pytest.mark.parametrize(
    ("graph", "bias", "dtype"),
    [
        (True, True, "float32"),
        (True, False, "float64"),
        (False, False, "float32"),
        (False, True, "float64"),
    ],
)
def test_values_and_gradients_equal_keras(kind: Kind, dtype: str, bias: bool, graph: bool) -> None:
    values = kind.problem(dtype, bias)
    run = tf.function(results) if graph else results
    assert_close(
        run(kind.ours, values, kind.upstream()),
        results(kind.by_keras, values, kind.upstream()),
        dtype,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_equal_torch(kind: Kind, dtype: str, bias: bool) -> None:
    values = kind.problem(dtype, bias)
    expected = kind.by_torch(values, kind.upstream())
    assert_close(tf.function(results)(kind.ours, values, kind.upstream()), expected, dtype)


@extended
def test_masked_steps_carry_the_state(kind: Kind) -> None:
    values = kind.problem("float64")
    found, gradients = tf.function(results)(
        kind.ours, values, kind.upstream(), mask=tf.constant(MASK)
    )
    states, weights = kind.split(values[1:])
    for t in range(TIME):
        _, *new = kind.ours(values[0][t : t + 1], *states, *weights)
        pairs = zip(new, states, strict=True)
        states = [tf.where(MASK[t][:, None], after, before) for after, before in pairs]
        assert_close(found[0][t], states[0], "float64")

    assert_close(found[1:], states, "float64")
    # Keras shows zeros before a row's first step that is not masked, so these get no gradient.
    seen = np.cumsum(MASK, 0) > 0
    dy, *others = kind.upstream()
    given = [dy * seen[:, :, None], *others]
    _, gradients = results(kind.ours, values, given, mask=tf.constant(MASK))
    _, expected = results(kind.by_keras, values, given, mask=tf.constant(MASK))
    assert_close(gradients, expected, "float64")


def test_a_masked_step_that_overflows_harms_nothing(kind: Kind) -> None:
    values = kind.problem("float32")
    spoiled = tf.where(MASK[:, :, None], values[0], np.inf)
    found, gradients = results(
        kind.ours, [spoiled, *values[1:]], kind.upstream(), mask=tf.constant(MASK)
    )
    expected, _ = results(kind.ours, values, kind.upstream(), mask=tf.constant(MASK))
    assert_close(found, expected, "float32")
    assert all(np.isfinite(g).all() for g in kind.split(gradients[1:])[0])


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(True, id="graph", marks=pytest.mark.slow),
        pytest.param(False, id="eager"),
        pytest.param("compiled", id="compiled", marks=soak),
    ],
)
def test_second_derivatives_equal_keras(kind: Kind, graph: bool | str) -> None:
    values = kind.problem("float64")

    def squares(function) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(values)
            _, gradients = results(function, values, kind.upstream())
            loss = tf.add_n([tf.reduce_sum(g * g) for g in gradients])
        return tape.gradient(loss, values)

    run = tf.function(squares, jit_compile=graph == "compiled") if graph else squares
    assert_close(run(kind.ours), squares(kind.by_keras), "float64")


@extended
def test_lengths_and_batches_of_any_size_are_one_trace(kind: Kind) -> None:
    traces, (_, weights) = [], kind.split(kind.problem("float32")[1:])
    states = [tf.TensorSpec([None, UNITS])] * kind.states

    @tf.function(input_signature=[tf.TensorSpec([None, None, FEATURES]), *states])
    def run(x, *states):
        traces.append(x.shape)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y, *_ = kind.ours(x, *states, *weights)
        return y, tape.gradient(y, weights)

    for time, batch in [(1, 1), (4, 3), (9, 2)]:
        given = kind.problem("float32", time=time, batch=batch)[: 1 + kind.states]
        y, gradients = run(*given)
        assert y.shape == (time, batch, UNITS)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            y, *_ = kind.by_keras(*given, *weights)
        assert_close(gradients, tape.gradient(y, weights), "float32")
    assert len(traces) == 1


@extended
def test_it_compiles_as_a_whole(kind: Kind) -> None:
    values = kind.problem("float32")
    compiled = tf.function(results, jit_compile=True)
    assert_close(
        compiled(kind.ours, values, kind.upstream()),
        results(kind.ours, values, kind.upstream()),
        "float32",
    )


@extended
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(kind: Kind, dtype: str) -> None:
    values = kind.problem("float32")
    half = [tf.cast(v, dtype) for v in values]
    found = tf.function(results)(kind.ours, half, kind.upstream())
    exact = results(kind.ours, [tf.cast(v, "float32") for v in half], kind.upstream())
    for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(exact), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(tf.cast(a, "float32"), b, atol=0.05 * np.abs(b).max())


def test_what_backward_keeps_a_step_row_and_unit(kind: Kind) -> None:
    def kept(time: int) -> int:
        """Counts by tracing the numbers that forward hands to backward in lists."""
        values = kind.problem("float32", time=time)
        forward = tf.function(lambda *v: kind.ours(*v)[0]).get_concrete_function(*values)
        graph = forward.graph
        with graph.as_default():
            (gradients,) = tf.gradients([graph.outputs[0]], [graph.inputs[2 + kind.states]])
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
        # Whatever backward reads in lists comes from forward's loop.
        return len(lists)

    assert kept(TIME) == kind.lists
