"""The wrapper: one draw for each call, seeds, zero rates, patterns and schedules."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from parametrizations_table import ALL
from stack_marks import quick_rows

from tfwd import _keras, layers
from tfwd import parametrizations as P

X = tf.random.stateless_normal([4, 5], [1, 2])
SEQUENCE = tf.random.stateless_normal([2, 6, 3], [1, 2])


def operations(function, *arguments) -> Counter[tuple[str, tf.DType | None]]:
    """Counts a function's operations of each kind, including its branches and loops.

    A kind is a type and its dtype, or None for a type without a dtype.
    """
    graph = tf.function(function).get_concrete_function(*arguments).graph
    nodes = [op.node_def for op in graph.get_operations()]
    for definition in graph.as_graph_def().library.function:
        nodes += definition.node_def
    types = [(node.op, node.attr["T"].type or node.attr["dtype"].type) for node in nodes]
    return Counter((op, tf.as_dtype(number) if number else None) for op, number in types)


def random_operations(function, *arguments) -> list[str]:
    return sorted({op for op, _ in operations(function, *arguments) if "Random" in op})


def nonzero(layer: keras.Layer) -> None:
    for weight in layer.weights:
        weight.assign(np.linspace(0.5, 1.5, int(np.prod(weight.shape))).reshape(weight.shape))


@quick_rows("False-LSTM", "False-GRU", "True-SimpleRNN")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
@pytest.mark.parametrize("unroll", [False, True])
def test_one_mask_for_the_batch_and_all_time_steps(kind: str, unroll: bool) -> None:
    """Checks that one mask serves the batch and all time steps.

    The first step is equal between calls, since its state is zero. With equal inputs the change
    from step to step is the same for each batch entry.
    """
    rnn = getattr(keras.layers, kind)(8, return_sequences=True, unroll=unroll)
    wrapped = layers.WeightDropout(rnn, 0.5, seed=1)
    one, two = (wrapped(SEQUENCE, training=True).numpy() for _ in range(2))
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert all(not np.array_equal(one[:, t], two[:, t]) for t in range(1, 6))
    same = wrapped(tf.repeat(SEQUENCE[:1], 3, axis=0), training=True)
    np.testing.assert_allclose(same[0], same[1], rtol=1e-6)
    # Step by step with the effective kernel, so that another mask at each step would show.
    call = wrapped.calls
    plain = type(rnn)(8, return_sequences=True)
    plain.build(SEQUENCE.shape)
    values = wrapped.effective_weights(call)
    weights = [values.get(_keras.variables.name(w), w) for w in wrapped.weights]
    plain.set_weights([np.asarray(w) for w in weights])
    np.testing.assert_allclose(wrapped(SEQUENCE, training=True), plain(SEQUENCE), atol=1e-6)


def test_a_layer_called_twice_in_a_step_draws_twice() -> None:
    wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5, seed=1)

    @tf.function
    def step() -> tuple[tf.Tensor, tf.Tensor]:
        return wrapped(X, training=True), wrapped(X, training=True)

    one, two = step()
    assert not np.array_equal(one, two)
    assert wrapped.calls == 2
    for call, found in enumerate((one, two)):
        kernel = wrapped.effective_weights(call)["kernel"]
        np.testing.assert_allclose(found, X @ kernel, rtol=1e-5, atol=1e-6)


def test_evaluation_counts_no_call() -> None:
    wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5, seed=1)
    for training in (False, None, True, False, True):
        wrapped(X, training=training)
    assert wrapped.calls == 2


def test_seeds_go_by_position_and_not_by_name() -> None:
    def kernel(name: str, before: int) -> np.ndarray:
        for _ in range(before):
            keras.layers.Dense(1)
        inner = keras.layers.Dense(50, name=name, use_bias=False)
        wrapped = layers.WeightDropout(inner, 0.5, seed=9)
        wrapped.build((None, 40))
        nonzero(wrapped)
        return wrapped.effective_weights(0)["kernel"].numpy()

    np.testing.assert_array_equal(kernel(None, 0), kernel("another", 3))


def test_two_weights_of_one_shape_are_dropped_independently() -> None:
    model = keras.Sequential([keras.layers.Dense(30, use_bias=False) for _ in range(2)])
    wrapped = layers.WeightDropout(model, 0.5, seed=1)
    wrapped.build((None, 30))
    nonzero(wrapped)
    one, two = (w.numpy() == 0 for w in wrapped.effective_weights(0).values())
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / 30


def test_the_directions_of_a_bidirectional_layer_differ_from_one_seed() -> None:
    inner = keras.layers.Bidirectional(keras.layers.LSTM(8))
    wrapped = layers.WeightDropout(inner, 0.5, seed=1)
    wrapped.build(SEQUENCE.shape)
    nonzero(wrapped)
    forward, backward = (w.numpy() == 0 for w in wrapped.effective_weights(0).values())
    assert abs(forward.mean() - 0.5) < 5 * 0.5 / 16
    assert abs(backward.mean() - 0.5) < 5 * 0.5 / 16
    assert abs(np.corrcoef(forward.ravel(), backward.ravel())[0, 1]) < 5 / 16


ZEROS = [
    lambda: layers.WeightDropout(keras.layers.Dense(3), 0.0),
    lambda: layers.WeightDropout(keras.layers.LSTM(3), 0),
    lambda: layers.WeightDropout(keras.layers.GRU(3), 0),
    lambda: layers.VariationalNoise(keras.layers.Dense(3), 0.0),
    lambda: layers.VariationalNoise(keras.layers.Dense(3), 0.0, start_call=2),
    lambda: layers.WeightDropLSTM(3, weight_dropout=0.0),
    lambda: layers.DropoutEmbedding(7, 3, 0.0),
    lambda: layers.LockedDropout(0.0),
]


@quick_rows("bool-*", "tensor-<lambda>0", "tensor-<lambda>6")
@pytest.mark.parametrize("make", ZEROS)
@pytest.mark.parametrize("flag", ["bool", "tensor"])
def test_zero_draws_nothing_and_changes_no_bit(make, flag: str) -> None:
    layer = make()
    x = SEQUENCE
    if isinstance(layer, keras.layers.Embedding):
        x = tf.constant([[1, 2]])
    elif getattr(layer, "layer", None) is not None and isinstance(layer.layer, keras.layers.Dense):
        x = X
    evaluated = layer(x)
    if flag == "bool":
        # The operations of evaluation, so that the results are equal on every processor. What
        # counts the training calls comes on top.
        trained = operations(lambda x: layer(x, training=True), x)
        more = trained - operations(lambda x: layer(x, training=False), x)
        whole = {("NoOp", None)}
        whole |= {(op, dtype) for op, dtype in more if dtype and not dtype.is_floating}
        assert set(more) <= whole
        np.testing.assert_array_equal(layer(x, training=True), evaluated)
    else:
        signature = tf.TensorSpec([], tf.bool)
        function = lambda x, training: layer(x, training=training)  # noqa: E731
        assert random_operations(function, x, signature) == []
        found = tf.function(function)(x, tf.constant(True))
        expected = tf.function(lambda x: layer(x, training=False))(x)
        np.testing.assert_array_equal(found, expected)


def test_evaluation_draws_nothing() -> None:
    wrapped = layers.WeightDropout(keras.layers.LSTM(3), 0.5)
    wrapped(SEQUENCE)
    assert random_operations(lambda x: wrapped(x, training=False), SEQUENCE) == []
    assert random_operations(lambda x: wrapped(x, training=True), SEQUENCE) != []


@quick_rows("Dropout(rate=0.5*", "Mixout(rate=0.25*", "WeightNorm(axis=0*", "*'deviation')")
@pytest.mark.parametrize("p", ALL, ids=repr)
def test_every_parametrization_in_a_layer_and_in_its_file(p: P.Parametrization, tmp_path) -> None:
    wrapped = layers.Parametrized(keras.layers.Dense(3), {"kernel": p}, seed=1)
    model = keras.Sequential([keras.Input([5]), wrapped])
    nonzero(wrapped)
    plain = keras.layers.Dense(3)
    plain.build([4, 5])
    step = tf.function(lambda: model(X, training=True))
    for call in range(4):
        plain.set_weights([wrapped.effective_weights(call)["kernel"], wrapped.get_weights()[1]])
        found = step() if call % 2 else model(X, training=True)
        np.testing.assert_allclose(found, plain(X), rtol=1e-5, atol=1e-5)
    model.save(tmp_path / "model.keras")
    (again,) = keras.models.load_model(tmp_path / "model.keras").layers[-1:]
    expected = wrapped.effective_weights(4)["kernel"]
    np.testing.assert_array_equal(again.effective_weights(4)["kernel"], expected)


def test_one_parametrization_is_for_the_default_weights() -> None:
    lstm = keras.layers.Bidirectional(keras.layers.LSTM(4))
    wrapped = layers.Parametrized(lstm, P.Dropout(0.5), seed=1)
    wrapped(SEQUENCE, training=True)
    effective = wrapped.effective_weights(0)
    assert [name.rpartition("/")[2] for name in effective] == ["recurrent_kernel"] * 2
    assert all(0.2 < np.mean(value == 0.0) < 0.8 for value in effective.values())
    again = layers.Parametrized.from_config(wrapped.get_config())
    again(SEQUENCE)
    again.set_weights(wrapped.get_weights())
    for found, value in zip(again.effective_weights(0).values(), effective.values(), strict=True):
        np.testing.assert_array_equal(found, value)
    assert again.weight_patterns is None


def test_the_first_pattern_that_matches_counts() -> None:
    wrapped = layers.Parametrized(
        keras.layers.Dense(30), {"kernel": P.Dropout(0.5), ".*": P.GaussianNoise(0.1)}, seed=1
    )
    wrapped.build((None, 30))
    values = wrapped.effective_weights(0)
    assert list(values) == ["kernel", "bias"]
    assert (values["kernel"].numpy() == 0).mean() > 0.3
    assert (values["bias"].numpy() != 0).all()


def test_a_rate_may_be_a_schedule_of_the_calls() -> None:
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.0, 0.5])
    wrapped = layers.WeightDropout(keras.layers.Dense(5), schedule, seed=1)
    function = tf.function(lambda: wrapped(X, training=True))
    evaluated = wrapped(X)
    np.testing.assert_allclose(function(), evaluated, rtol=1e-6)
    assert not np.allclose(function(), evaluated)
    again = type(wrapped).from_config(wrapped.get_config())
    assert isinstance(again.rate, keras.optimizers.schedules.PiecewiseConstantDecay)


def test_deterministic_parametrizations_act_in_evaluation_too() -> None:
    wrapped = layers.Parametrized(keras.layers.Dense(4, use_bias=False), {"kernel": P.WeightNorm()})
    y = wrapped(tf.eye(5))
    np.testing.assert_allclose(np.linalg.norm(y, axis=0), np.ones(4), rtol=1e-5)
    np.testing.assert_allclose(y, wrapped(tf.eye(5), training=True), rtol=1e-6)
    with pytest.raises(ValueError, match="'kernel' in evaluation"):
        wrapped.unwrapped()


def test_a_retraced_function_continues_the_draws() -> None:
    def outputs(sizes: list[int]) -> list[np.ndarray]:
        wrapped = layers.WeightDropout(keras.layers.Dense(5), 0.5, seed=1)
        wrapped.build((None, 5))
        nonzero(wrapped)
        function = tf.function(lambda x: wrapped(x, training=True), reduce_retracing=False)
        return [function(X[:size]).numpy()[:1] for size in sizes]

    # A new size is a new trace.
    for one, other in zip(outputs([4, 4, 4, 4]), outputs([4, 3, 2, 4]), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
