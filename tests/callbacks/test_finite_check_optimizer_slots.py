"""`FiniteCheck` on an optimizer whose variables are not finite before the training."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import IS_KERAS_2

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
    assert "other code since then" not in " ".join(text.split())
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


class OwnStep(keras.Model):
    """A model with a custom `train_step`."""

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def averaged(kind):
    """Returns an optimizer whose best loss is infinite at first."""
    of_kind = keras.optimizers.legacy if kind == "legacy" else keras.optimizers
    return tfwd.optimizers.NonMonotonicASGD(of_kind.SGD(0.05), 1)


@pytest.mark.parametrize("mode", OPTIONS)
@pytest.mark.parametrize("kind", ["own step", *(["legacy"] if IS_KERAS_2 else [])])
def test_a_best_loss_that_is_infinite_before_the_first_evaluation(kind, mode):
    """The oracle is the same training without the callback, or without the batch that is NaN."""
    results = []
    for action in (None, "raise", "skip"):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = (OwnStep if kind == "own step" else keras.Model)(
            inputs, keras.layers.Dense(1)(keras.layers.Dense(3, "tanh")(inputs))
        )
        model.compile(averaged(kind), "mse", **OPTIONS[mode])
        x, y = X, Y
        if action == "skip":
            x = np.concatenate([X[:8], np.full((8, 4), np.nan, "float32"), X[8:]])
            y = np.concatenate([Y[:8], Y[:8], Y[8:]])
        check = FiniteCheck(action or "raise")
        callbacks = [tfwd.optimizers.NonMonotonicASGDCallback(), *([check] if action else [])]
        options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(x, y, validation_data=(X, Y), callbacks=callbacks, **options)
        assert check.skipped == (3 if action == "skip" else 0)
        results.append(model.get_weights())
    for result in results[1:]:
        for one, other in zip(result, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
