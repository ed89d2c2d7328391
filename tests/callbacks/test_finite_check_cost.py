"""Cost of `FiniteCheck` in a step, counted in operations: no time is measured."""

from collections import Counter

import keras
import numpy as np
import pytest
from finite_check_fits import fit, make, same
from planted_nan_models import data, state
from stack_marks import quick_rows

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
