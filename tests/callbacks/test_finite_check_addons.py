"""`FiniteCheck` with the legacy optimizers of Keras 2 and with those of tensorflow-addons."""

import keras
import numpy as np
import pytest

addons = pytest.importorskip("tensorflow_addons")
from addons_optimizers_table import AVERAGES

from tfwd.callbacks import FiniteCheck


def model_of(optimizer):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.layers.Input((5,)), keras.layers.Dense(2, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(optimizer, "mse")
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 5)).astype("f"), rng.normal(size=(64, 1)).astype("f")


def state(optimizer):
    """Returns the arrays of an optimizer and of the optimizer inside, by TensorFlow's own list."""
    held = [optimizer, *([optimizer._optimizer] if hasattr(optimizer, "_optimizer") else [])]
    return [v.numpy() for one in held for v in one.variables()]


@pytest.mark.parametrize("average", sorted(AVERAGES))
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_skipped_step_changes_no_optimizer_inside(average, kind):
    """Compares with plain Keras, which does not get the bad batch."""
    momentum = {"momentum": 0.9} if kind == "SGD" else {}

    def optimizer():
        return AVERAGES[average](getattr(keras.optimizers.legacy, kind)(0.02, **momentum))

    x, y = data()
    good = np.r_[0:16, 24:64]
    plain = model_of(optimizer())
    plain.fit(x[good], y[good], batch_size=8, shuffle=False, verbose=0)
    x[17, 0] = np.nan
    checked = model_of(optimizer())
    check = FiniteCheck("skip")
    with pytest.warns(UserWarning, match="skipped a step"):
        checked.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[check])
    assert [report.step for report in check.reports] == [3]
    ours = [*state(checked.optimizer), *checked.get_weights()]
    theirs = [*state(plain.optimizer), *plain.get_weights()]
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_a_restore_halves_the_rate_before_its_decay(decay):
    x, y = data()
    model = model_of(keras.optimizers.legacy.SGD(0.02, decay=decay))
    model.fit(x, y, batch_size=8, verbose=0)
    x[17, 0] = np.nan
    batches = [(x[:8], y[:8])] * 8 + [(x[16:24], y[16:24])] + [(x[:8], y[:8])] * 7
    with pytest.warns(UserWarning, match="restored"):
        model.fit(
            iter(batches),
            steps_per_epoch=8,
            epochs=2,
            verbose=0,
            callbacks=[FiniteCheck("restore")],
        )
    assert float(model.optimizer.learning_rate) == pytest.approx(0.01)
    # 16 steps before the restore, and 7 steps after it.
    assert int(model.optimizer.iterations.numpy()) == 23


@pytest.mark.parametrize("normalization", ["WeightNormalization", "SpectralNormalization"])
def test_weights_that_the_first_forward_pass_changes(normalization):
    """Lookahead copies the weights when it is built. Keras builds it after the forward pass."""
    wrapper = getattr(addons.layers, normalization)
    options = {"data_init": False} if normalization == "WeightNormalization" else {}
    x, y = data()
    losses = []
    for callbacks in ([], [FiniteCheck()]):
        keras.utils.set_random_seed(1)
        hidden = wrapper(keras.layers.Dense(5, "tanh"), **options)
        model = keras.Sequential([keras.layers.Input((5,)), hidden, keras.layers.Dense(1)])
        average = addons.optimizers.Lookahead(keras.optimizers.legacy.Adam(0.05), sync_period=3)
        model.compile(average, "mse", run_eagerly=True)
        fitted = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
        )
        losses.append(fitted.history["loss"])
    assert losses[0] == losses[1]
