"""`FiniteCheck` with optimizers that update with the gradients of several steps.

The gradient of the kernel is the label in each step. The oracle is a plain fit of Keras.
"""

import keras
import numpy as np
import pytest
from stack_marks import needs_keras3, quick_rows

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

pytestmark = needs_keras3("gradient_accumulation_steps")
layers, optimizers = keras.layers, keras.optimizers
STEPS, ROWS = 3, 4
OPTIMIZERS = {
    "Adam": lambda: optimizers.Adam(0.1, gradient_accumulation_steps=STEPS),
    "momentum": lambda: optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=1.0, gradient_accumulation_steps=STEPS
    ),
    "RMSprop": lambda: optimizers.RMSprop(0.1, gradient_accumulation_steps=STEPS),
}
MODES = {"graph": {}, "eager": {"run_eagerly": True}, "XLA": {"jit_compile": True}}


def model_of(optimizer, mode):
    dense = layers.Dense(1, use_bias=False, kernel_initializer="ones", name="dense")
    model = keras.Sequential([keras.Input((2,)), dense])
    options = {"jit_compile": False, **MODES[mode]}
    model.compile(OPTIMIZERS[optimizer](), lambda y, p: y * p, **options)
    return model


def fit(model, labels, *callbacks):
    x, y = np.ones((ROWS * len(labels), 2)), np.repeat(labels, ROWS)[:, None].astype("float32")
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=list(callbacks))
    return [np.array(v) for v in (*model.weights, *model.optimizer.variables)]


@quick_rows("Adam-graph", "momentum-XLA")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_large_gradient_of_an_earlier_step(optimizer, mode):
    """Each gradient is finite, but the square of the mean is infinite in the third step."""
    plain = model_of(optimizer, mode)
    assert not all(np.isfinite(value).all() for value in fit(plain, [0.5, 1e22, 0.5]))
    model = model_of(optimizer, mode)
    with pytest.raises(NonFiniteError) as caught:
        fit(model, [0.5, 1e22, 0.5], FiniteCheck())
    assert caught.value.report.step == 3
    expected = fit(model_of(optimizer, mode), [0.5, 1e22])
    found = [np.array(v) for v in (*model.weights, *model.optimizer.variables)]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@quick_rows("Adam-graph", "RMSprop-eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bad_batch_between_accumulated_ones(optimizer, mode):
    """The skipped step does not count as one of the three."""
    labels = [0.5, -1.0, 2.0, 0.25, 1.0, -0.5, 1.5]
    expected = fit(model_of(optimizer, mode), labels)
    for position in (1, 3):
        given = [*labels[:position], np.nan, *labels[position:]]
        check = FiniteCheck("skip")
        with pytest.warns(UserWarning, match="skipped a step"):
            found = fit(model_of(optimizer, mode), given, check)
        assert check.skipped == 1
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
