"""`FiniteCheck` on an optimizer whose variables are not finite before the training."""

import keras
import numpy as np
import pytest

import tfwd
from tfwd.callbacks import FiniteCheck

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def poisoned(optimizer, **options):
    """Returns a model with good weights whose optimizer has NaN from an earlier training."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", **options)
    weights = model.get_weights()
    labels = Y.copy()
    labels[3] = np.nan
    model.fit(X, labels, batch_size=8, verbose=0)
    model.set_weights(weights)
    return model, weights


OPTIMIZERS = {
    "adam": lambda: "adam",
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
    "decayed": lambda: tfwd.optimizers.DecoupledWeightDecay(
        keras.optimizers.RMSprop(0.01), weight_decay=0.01
    ),
}
OPTIONS = {"graph": {}, "xla": {"jit_compile": True}, "eager": {"run_eagerly": True}}


@pytest.mark.parametrize("action", ["raise", "skip", "restore"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("adam", "graph"), ("momentum", "xla"), ("momentum", "eager"), ("decayed", "graph")],
)
def test_variables_of_the_optimizer_that_are_not_finite(action, name, mode):
    model, weights = poisoned(OPTIMIZERS[name](), **OPTIONS[mode])
    with pytest.raises(tfwd.numerics.NonFiniteError) as caught:
        model.fit(X, Y, batch_size=32, verbose=0, callbacks=[FiniteCheck(action)])
    text = str(caught.value)
    assert "weights that are not finite already" in text
    assert "set_weights() of a model does not change them" in text
    assert "other code has changed them" not in text
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_advice_works():
    model, _ = poisoned("adam")
    model.compile("adam", "mse")
    history = model.fit(X, Y, epochs=2, verbose=0, callbacks=[FiniteCheck()]).history["loss"]
    assert history[1] < history[0]


@pytest.mark.parametrize("options", [{}, {"every_n_steps": 2}])
@pytest.mark.parametrize("is_first", [False, True])
def test_tensorboard_of_keras(options, is_first, tmp_path):
    """Keras 2 reads the traced training function to write its graph."""
    histories = []
    for checks in ([], [FiniteCheck(**options)]):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        board = keras.callbacks.TensorBoard(tmp_path / str(len(checks)))
        callbacks = [board, *checks] if is_first else [*checks, board]
        for _ in range(2):
            found = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        histories.append(found.history["loss"])
    assert histories[0] == histories[1]
    assert list(tmp_path.glob("1/train/events*"))
