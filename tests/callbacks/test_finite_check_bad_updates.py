"""`FiniteCheck` on finite gradients whose update is not finite: an overflow, or a division by 0."""

import keras
import numpy as np
import pytest
from stack_marks import IS_KERAS_2

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

# In float16, the square of a gradient overflows at 256.
OF_LARGE_GRADIENTS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "global_clipnorm": lambda: keras.optimizers.SGD(1e-3, global_clipnorm=1.0),
}


# Averages that are 1 in the dtype of the weights. Their corrections divide by 1 - 1.
OF_AVERAGES = {
    "bfloat16": ("bfloat16", keras.optimizers.Nadam),
    "float32": ("float32", lambda: keras.optimizers.Adam(beta_1=1 - 1e-9)),
}


def make(optimizer, dtype="float16"):
    keras.utils.set_random_seed(1)
    kind = {"dtype": dtype}
    model = keras.Sequential(
        [keras.Input((4,), **kind), keras.layers.Dense(3, **kind), keras.layers.Dense(1, **kind)]
    )
    model.compile(optimizer, "mae", jit_compile=False)
    return model


def state(model):
    variables = model.optimizer.variables
    return [*model.get_weights(), *map(np.asarray, variables() if IS_KERAS_2 else variables)]


def data():
    rng = np.random.default_rng(0)
    return 1000 * rng.normal(size=(8, 4)).astype("float16"), rng.normal(size=(8, 1)).astype("f")


def are_finite(values):
    return all(np.isfinite(np.asarray(value, "float64")).all() for value in values)


def check_first_update(make_model, x, y):
    """Checks that plain training makes bad weights, and that `FiniteCheck` keeps the good ones."""
    plain = make_model()
    plain.fit(x, y, verbose=0)
    assert not are_finite(state(plain))
    model = make_model()
    before = model.get_weights()
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, y, verbose=0, callbacks=[FiniteCheck()])
    assert caught.value.report.step == 1 and caught.value.report.first.frame.kind == "update"
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert are_finite(state(model))


@pytest.mark.parametrize("name", OF_LARGE_GRADIENTS)
def test_an_update_that_overflows_is_not_made(name):
    check_first_update(lambda: make(OF_LARGE_GRADIENTS[name]()), *data())


@pytest.mark.parametrize("name", OF_AVERAGES)
def test_an_update_that_divides_by_0_is_not_made(name):
    dtype, optimizer = OF_AVERAGES[name]
    x, y = data()
    check_first_update(lambda: make(optimizer(), dtype), x.astype("float32") / 1000, y)
