"""Tensors that backward stores: it draws the same masks again, and the two draws stay separate."""

import gc
import weakref
from collections.abc import Iterable

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from tfwd import _keras, layers
from tfwd import parametrizations as P
from tfwd._graph import recomputed_weights

pytestmark = pytest.mark.usefixtures("all_large")

N = 32  # a weight of the stack is N x N; no other tensor in it has this shape
SEED = tf.constant([3, 4])
X = tf.random.stateless_normal([2, 6], [3, 2])


def stack(recomputed: bool, depth: int = 3, kind: str = "dense") -> keras.Sequential:
    def layer(index: int) -> keras.Layer:
        if kind == "rnn":
            inner = keras.layers.SimpleRNN(N, return_sequences=True)
        else:
            inner = keras.layers.Dense(N, activation="tanh", use_bias=False)
        if kind == "mixout":  # whose references are held in another dtype than they are used in
            options = {"reference_dtype": "bfloat16", "seed": index, "recompute": recomputed}
            return layers.Mixout(inner, 0.5, **options)
        each = kind == "per example"
        options = {"seed": index, "recompute": recomputed, "per_example": each}
        return layers.WeightDropout(inner, 0.5, **options)

    model = keras.Sequential([layer(i) for i in range(depth)])
    model.build((4, 3, N) if kind == "rnn" else (4, N))
    return model


def inputs(kind: str = "dense") -> tf.Tensor:
    shape = [4, 3, N] if kind == "rnn" else [4, N]
    return tf.random.stateless_normal(shape, [1, 2])


def _source(tensor: tf.Tensor) -> str:
    """Returns the type of the operation that made the tensor, past identities."""
    passing = ("Identity", "IdentityN", "StatelessWhile")  # a loop hands its constants on
    while tensor.op.type in passing and tensor.value_index < len(tensor.op.inputs):
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor.op.type


def _kept(model: keras.Model, x: tf.Tensor) -> list[tf.Tensor]:
    """Returns the tensors that forward hands to backward, with the tape outside."""
    concrete = tf.function(lambda x: model(x, training=True)).get_concrete_function(x)
    forward, _ = concrete._delayed_rewrite_functions.forward_backward()
    return list(forward.graph.outputs)[1:]


_RAW = {"ReadVariableOp", "Placeholder"}


@pytest.mark.parametrize("kind", ["dense", "rnn", "mixout"])
def test_no_effective_weight_and_no_mask_is_kept_for_backward(kind: str) -> None:
    """Checks that forward hands raw weights and inputs to backward, and no drawn tensor."""

    def drawn(recomputed: bool) -> list[str]:
        kept = _kept(stack(recomputed, kind=kind), inputs(kind))
        of_weights = [t for t in kept if t.shape == [N, N]]
        return [_source(t) for t in of_weights if _source(t) not in _RAW]

    assert drawn(recomputed=True) == []
    assert len(drawn(recomputed=False)) >= 3  # so that this test can see them


@pytest.mark.parametrize("kind", ["dense", "mixout"])
def test_nothing_that_grows_with_the_weights_but_the_weights_is_kept(kind: str) -> None:
    """Checks tensors of every shape, since a mask may be flat or packed."""
    large = [
        t for t in _kept(stack(True, kind=kind), inputs()) if t.shape.num_elements() >= N * N // 32
    ]
    assert {_source(t) for t in large if t.shape != [4, N]} <= _RAW


def test_eager_mode_keeps_no_effective_weight() -> None:
    """Counts the tensors that tapes hold, except variables: no weight, no mask, no bits."""
    depth, passes = 3, 4

    def held(recomputed: bool, kind: str = "dense") -> list[tuple[int, ...]]:
        model, x = stack(recomputed, depth, kind), tf.ones([2, N])
        model(x, training=True)
        before, tapes = set(_buffers()), []
        for _ in range(passes):
            with tf.GradientTape() as tape:
                y = model(x, training=True)
            tapes.append((tape, y))
        variables = [_keras.variables.tf_variable(w) for w in model.trainable_weights]
        own = {_buffer(tf.convert_to_tensor(variable)) for variable in variables}
        found = [shape for buffer, shape in _buffers().items() if buffer not in before | own]
        assert tape.gradient(y, variables[0]).shape == [N, N]
        # What a layer hands to the next one is held: the test sees what a tape holds.
        assert found.count((2, N)) >= depth * passes
        return [shape for shape in found if shape != (2, N)]

    assert held(recomputed=True) == []
    assert held(recomputed=False).count((N, N)) >= depth * passes
    # No kernel of an example is held either, whatever the layer recomputes.
    assert held(True, "per example") == held(False, "per example") == []


def _buffers() -> dict[int, tuple[int, ...]]:
    """Returns addresses and shapes of eager tensors with at least one bit per weight entry."""
    gc.collect()
    eager = type(tf.zeros([]))
    tensors = [t for t in gc.get_objects() if isinstance(t, eager) and t.dtype != tf.resource]
    large = [t for t in tensors if t.shape.num_elements() * t.dtype.size * 8 >= N * N]
    return {_buffer(t): tuple(t.shape) for t in large}


def _buffer(tensor: tf.Tensor) -> int:
    return tensor._numpy_internal().__array_interface__["data"][0]


def test_a_tape_that_is_dropped_frees_everything() -> None:
    layer = layers.WeightDropout(keras.layers.Dense(3), 0.5, seed=1)
    x = tf.ones([1, 4])
    layer(x, training=True)
    with tf.GradientTape() as tape:
        y = layer(x, training=True)
    watcher = weakref.ref(tape)
    del tape, y
    gc.collect()
    assert watcher() is None


def _optimized_draws(model: keras.Model, x: tf.Tensor) -> int:
    """Counts the masks that an optimized training step draws."""
    weights = [_keras.variables.tf_variable(w) for w in model.trainable_weights]

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x, training=True)))
        return tape.gradient(loss, weights)

    context.enable_graph_collection()
    try:
        step(x)
        found = context.context().export_run_metadata()
    finally:
        context.disable_graph_collection()
    graph = max(found.function_graphs, key=lambda g: len(g.post_optimization_graph.node))
    called = [node.attr["f"].func.name for node in graph.post_optimization_graph.node]
    return sum("_dropout_" in name for name in called)


def test_the_optimized_step_draws_in_forward_and_again_in_backward() -> None:
    """Checks that the optimizer does not merge the draws, which would keep the first alive."""
    x = inputs()
    assert _optimized_draws(stack(False), x) > 0
    # Of each layer forward's, backward's for the weight's gradient, and, save for the first
    # layer, backward's for the input's.
    assert _optimized_draws(stack(True), x) == 3 + 3 + 2


def test_forward_draws_depend_on_the_input_and_backward_draws_on_the_gradient() -> None:
    model, x = stack(True), inputs()
    weights = [_keras.variables.tf_variable(w) for w in model.trainable_weights]
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        fed = tf.compat.v1.placeholder(tf.float32, x.shape)
        with tf.GradientTape() as tape:
            y = model(fed, training=True)
        before = set(graph.get_operations())
        upstream = tf.compat.v1.placeholder(tf.float32, y.shape)
        tape.gradient(y, weights, output_gradients=upstream)
    forward = _seeds(before)
    assert len(forward) == 3
    assert all(_depends(op, fed.op) for op in forward)
    calls = [op for op in set(graph.get_operations()) - before if "PartitionedCall" in op.type]
    assert len(calls) == 3
    for call in calls:
        backward = _seeds(_body(call))
        inner = backward[0].graph
        assert len(backward) == 2
        assert all(_depends(op, inner.inputs[0].op) for op in backward)
        assert _depends(call, upstream.op)


def _seeds(operations: Iterable[tf.Operation]) -> list[tf.Operation]:
    """Returns the seeds of the calls that draw masks."""
    calls = [op for op in operations if "PartitionedCall" in op.type]
    whole = [op for op in calls if op.outputs and op.outputs[0].shape == [N * N]]
    drawing = [op for op in whole if any(inner.type == "Less" for inner in _body(op))]
    return [next(t.op for t in op.inputs if t.shape == [2]) for op in drawing]


def _body(call: tf.Operation) -> list[tf.Operation]:
    return call.graph._get_function(call.get_attr("f").name).graph.get_operations()


def _depends(op: tf.Operation, source: tf.Operation) -> bool:
    """Checks for a data dependency; a control dependency does not prevent merging."""
    seen, todo = set(), [op]
    while todo:
        current = todo.pop()
        if current is source:
            return True
        if current not in seen:
            seen.add(current)
            todo += [t.op for t in current.inputs]
    return False


def _kept_of(function, *weights: tf.Tensor) -> set[str]:
    """Returns the types of operations that a function of two effective weights keeps."""
    shape = weights[0].shape

    def call(x: tf.Tensor, v: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        def draw(training, tensors, seeds):
            pairs = zip(tensors[1:], seeds, strict=True)
            return [w * tf.random.stateless_uniform(shape, seed) for w, seed in pairs]

        def run(training, tensors, seeds, drawn):
            return [function(tensors[0], *drawn)]

        return recomputed_weights.call(draw, run, True, [x, v, w], [SEED, SEED + 1])[0]

    concrete = tf.function(call).get_concrete_function(X[:, :5], *weights)
    forward, _ = concrete._delayed_rewrite_functions.forward_backward()
    kept = list(forward.graph.outputs)[1:]
    return {_source(t) for t in kept if t.shape == shape} - _RAW - {"Const"}


ROOT = tf.random.stateless_normal([5, 5], [5, 6])


def _swapped(x: tf.Tensor, v: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    axes = tf.constant([1, 0])
    return tf.tanh(x @ tf.transpose(v, axes)) @ tf.transpose(w, axes)


def _triangular(x: tf.Tensor, v: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    below = tf.range(5)[:, None] > tf.range(5)
    return tf.tanh(x @ tf.where(below, v, 0.0)) @ (w * tf.ones([5, 5]) + tf.eye(5))


@pytest.mark.parametrize("function", [_swapped, _triangular])
def test_what_follows_from_weights_and_constants_is_made_again(function) -> None:
    assert _kept_of(function, ROOT, ROOT) == set()


def test_a_gradient_by_hand_may_use_a_tape() -> None:
    """Checks that a tape follows the stand-in of the weight as it would follow the weight."""

    @tf.custom_gradient
    def product(x: tf.Tensor, w: tf.Tensor) -> tuple:
        def backward(upstream: tf.Tensor) -> list:
            with tf.GradientTape() as tape:
                tape.watch([x, w])
                y = x @ w
            return tape.gradient(y, [x, w], output_gradients=upstream)

        return x @ w, backward

    class ByHand(keras.layers.Dense):
        def call(self, inputs):
            return product(inputs, tf.convert_to_tensor(self.kernel))

    layer = layers.WeightDropout(ByHand(3), 0.5, seed=1)
    x = tf.ones([2, 3])
    layer(x)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = layer(x, training=True)
        return tape.gradient(y, _keras.variables.tf_variable(layer.weights[0]))

    (effective,) = layer.effective_weights(0).values()
    np.testing.assert_array_equal(step(), 4.0 * (effective.numpy() != 0.0))


@pytest.mark.parametrize("kind", ["dense", "rnn", "mixout"])
def test_the_weights_of_a_model_are_drawn_as_its_layers_are_reached(kind: str) -> None:
    """Checks one wrapper around a model: no draw comes before the product of the layer before."""
    plain = [keras.layers.Dense(N, use_bias=False) for _ in range(3)]
    if kind == "rnn":
        plain = [keras.layers.SimpleRNN(N, return_sequences=True) for _ in range(3)]
    chosen = P.Mixout(0.5) if kind == "mixout" else P.Dropout(0.5)
    model = layers.Parametrized(keras.Sequential(plain), {".*kernel": chosen}, seed=1)
    model(inputs(kind))
    graph = tf.function(lambda x: model(x, training=True)).get_concrete_function(inputs(kind)).graph

    uses = ("While", "StatelessWhile") if kind == "rnn" else ("MatMul",)
    steps = [op for op in graph.get_operations() if op.type in uses]
    assert len(steps) == 3

    def before(operation: tf.Operation) -> set[str]:
        seen: set[str] = set()
        stack = [operation]
        while stack:
            present = stack.pop()
            if present.name not in seen:
                seen.add(present.name)
                stack += [tensor.op for tensor in present.inputs] + list(present.control_inputs)
        return seen

    for number, step in enumerate(steps):
        weights = [tensor.op for tensor in step.inputs if tensor.shape == [N, N]]
        drawn = [before(op) for op in weights if "PartitionedCall" in {o.type for o in _above(op)}]
        assert drawn
        for found in drawn:
            assert {s.name for s in steps} & found == {s.name for s in steps[:number]}


def _above(operation: tf.Operation) -> list[tf.Operation]:
    """Returns an operation and the makers of its inputs, past operations that only pass on."""
    found = [operation]
    while found[-1].type in ("Identity", "IdentityN", "Transpose", "Cast", "Reshape"):
        found.append(found[-1].inputs[0].op)
    return found
