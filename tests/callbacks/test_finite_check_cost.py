"""Cost of `FiniteCheck` in a step, counted in operations: no time is measured."""

from collections import Counter

import keras
import numpy as np
import pytest
from finite_check_fits import fit, make, same
from planted_nan_models import data, state
from stack_marks import IS_KERAS_2, quick_rows
from tensorflow.python.framework import op_callbacks

from tfwd.callbacks import FiniteCheck

LAYERS = 20


def operations(function):
    """Counts the operations of each kind in the graphs of a traced function."""
    found: list[Counter] = []
    for concrete in function._list_all_concrete_functions_for_serialization():
        graph = concrete.graph.as_graph_def()
        nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
        found.append(Counter(node.op for node in nodes))
    return found[-1]


def test_a_checked_step_adds_one_operation_a_tensor():
    layers = [keras.layers.Dense(6, activation="relu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("sgd", "mse", jit_compile=False)
    x, _ = data(2)
    check = FiniteCheck()
    fit(model, x, x, check)
    (function,) = check._check._function._by_spec.values()
    found = operations(function)
    # Inputs, labels, inputs of each relu, loss, gradients of the weights, learning rate.
    tensors = 2 + LAYERS + 1 + 2 * LAYERS + 1
    assert found["L2Loss"] == tensors
    assert found["Sqrt"] <= 3  # of all at once


@quick_rows("graph")
@pytest.mark.parametrize("mode", ["graph", "eager"])
def test_steps_without_a_check_equal_keras(mode):
    x, y = data(5)
    plain, checked = make(mode=mode), make(mode=mode)
    keras.utils.set_random_seed(4)
    fit(plain, x, y)
    own_calls = []

    class Counts(keras.callbacks.Callback):
        """A counter around the model's own training function, before the check replaces it."""

        def on_train_begin(self, logs=None):
            own = self.model.train_function
            self.model.train_function = lambda iterator: (own_calls.append(1), own(iterator))[1]

    keras.utils.set_random_seed(4)
    check = FiniteCheck(every_n_steps=2)
    fit(checked, x, y, Counts(), check)
    assert len(own_calls) == 2  # steps 2 and 4 of 5
    assert check._plain is None
    same(state(checked), state(plain), mode)
    assert np.isfinite(state(checked)[0]).all()


class OfSteps(keras.callbacks.Callback):
    """The operations of each kind that run in each step, in eager mode."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def count(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        self.counts[-1][op_type] += 1

    def on_train_batch_begin(self, batch, logs=None):
        self.counts.append(Counter())

    def on_train_batch_end(self, batch, logs=None):
        self.counts.append(Counter())  # what runs between steps


@pytest.mark.parametrize("every", [2, 3])
def test_the_operations_of_each_step(every):
    """Checks that a step without a check runs exactly the operations of Keras's step."""
    x, y = data(6)
    found = []
    for check in (None, FiniteCheck(every_n_steps=every)):
        model, counts = make(mode="eager", optimizer="sgd"), OfSteps()
        counts.counts.append(Counter())  # what runs before the first step
        op_callbacks.add_op_callback(counts.count)
        try:
            fit(model, x, y, counts, *([check] if check else []))
        finally:
            op_callbacks.remove_op_callback(counts.count)
        found.append([counts.counts[i] for i in range(1, 13, 2)])
    more = [sum((ours - theirs).values()) for theirs, ours in zip(*found, strict=True)]
    least = [sum((theirs - ours).values()) for theirs, ours in zip(*found, strict=True)]
    reads = 2 if IS_KERAS_2 else 0  # of `steps_per_execution`, which is a variable there
    # (The first step also creates variables.)
    for step in range(1, 6):
        if step % every:
            assert (more[step], least[step]) == (reads, 0)
        else:
            assert more[step] > 50
