"""`FiniteCheck` on weights in float16, where the square of a gradient overflows at 256."""

import keras
import numpy as np
import pytest
from stack_marks import IS_KERAS_2

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "RMSprop": lambda: keras.optimizers.RMSprop(1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(1e-3),
    "global_clipnorm": lambda: keras.optimizers.SGD(1e-3, global_clipnorm=1.0),
}


def make(optimizer):
    keras.utils.set_random_seed(1)
    half = {"dtype": "float16"}
    model = keras.Sequential(
        [keras.Input((4,), **half), keras.layers.Dense(3, **half), keras.layers.Dense(1, **half)]
    )
    model.compile(OPTIMIZERS[optimizer](), "mae", jit_compile=False)
    return model


def state(model):
    variables = model.optimizer.variables
    return [*model.get_weights(), *map(np.asarray, variables() if IS_KERAS_2 else variables)]


def data():
    rng = np.random.default_rng(0)
    return 1000 * rng.normal(size=(8, 4)).astype("float16"), rng.normal(size=(8, 1)).astype("f")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_that_overflows_is_not_made(optimizer):
    x, y = data()
    plain = make(optimizer)
    plain.fit(x, y, verbose=0)
    assert not all(np.isfinite(value).all() for value in state(plain))
    model = make(optimizer)
    before = model.get_weights()
    with pytest.raises(NonFiniteError) as caught:
        model.fit(x, y, verbose=0, callbacks=[FiniteCheck()])
    assert caught.value.report.step == 1 and caught.value.report.first.frame.kind == "update"
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert all(np.isfinite(value).all() for value in state(model))
