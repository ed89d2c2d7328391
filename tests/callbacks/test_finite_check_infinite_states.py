"""`FiniteCheck` on layers with a state that is infinite on purpose."""

import warnings

import keras
import numpy as np
import pytest
from planted_nan_models import state

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


class Lowest(keras.layers.Layer):
    """A layer with a state that begins with one number, and that each step sets to another."""

    def __init__(self, first, later, **options):
        super().__init__(**options)
        self.first, self.later = first, later

    def build(self, shape):
        first = keras.initializers.Constant(self.first)
        self.low = self.add_weight(name="low", shape=(), initializer=first, trainable=False)

    def call(self, x, training=False):
        if training:
            self.low.assign(self.later)
        return x


def fitted(first, later, *callbacks, bad=None):
    """Fits a model for 4 epochs of 3 batches. One batch is NaN, or absent without a callback."""
    keras.utils.set_random_seed(1)
    layers = [Lowest(first, later, name="kept"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    batches = [(X * (np.nan if i == bad else 1), X[:, :1]) for i in range(12)]
    if callbacks:
        given = (batch for batch in batches)
        options = {"steps_per_epoch": 3, "epochs": 4, "shuffle": False, "verbose": 0}
        model.fit(given, **options, callbacks=list(callbacks))
    else:
        for i, (x, y) in enumerate(batches):
            if i != bad:
                model.train_on_batch(x, y)
    return model


def trained(model):
    """Returns the trained weights and the optimizer's variables, without metrics."""
    return [*state(model)[: len(model.weights)], model.optimizer.iterations.numpy()]


@pytest.mark.parametrize("action", ["skip", "restore"])
@pytest.mark.parametrize("exclude", ["kept", "low", "kept/low"])
def test_a_state_that_is_excluded(action, exclude):
    check = FiniteCheck(action, factor=1.0, exclude=exclude)
    with pytest.warns(UserWarning, match="skipped a step|restored the end"):
        ours = fitted(np.inf, np.inf, check, bad=9)  # the first batch of an epoch
    assert [report.step for report in check.reports] == [10]
    for one, other in zip(trained(ours), trained(fitted(np.inf, np.inf, bad=9)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_report_offers_to_exclude_an_infinite_state():
    with pytest.raises(NonFiniteError, match=r"exclude=\['(kept/)?low'\]"):
        fitted(-np.inf, -np.inf, FiniteCheck())
    with pytest.raises(NonFiniteError) as caught:
        fitted(np.nan, 0.0, FiniteCheck())
    assert "exclude" not in str(caught.value)


def test_restore_with_a_state_that_becomes_infinite():
    with pytest.warns(UserWarning, match="restored the end of the last epoch"):
        ours = fitted(0.0, -np.inf, FiniteCheck("restore", factor=1.0), bad=9)
    for one, other in zip(trained(ours), trained(fitted(0.0, -np.inf, bad=9)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_no_restore_of_a_state_that_is_nan():
    with warnings.catch_warnings(), pytest.raises(NonFiniteError) as caught:
        warnings.simplefilter("ignore")
        fitted(0.0, np.nan, FiniteCheck("restore"), bad=9)
    assert "No epoch of this run has ended with finite weights" in caught.value.report.note
    assert "low' is not finite" in caught.value.report.note


def test_an_infinite_state_is_not_said_to_be_lost():
    with pytest.raises(NonFiniteError) as caught:
        fitted(0.0, np.inf, FiniteCheck(), bad=4)
    assert "The weights have their values from before the step." in caught.value.report.note


@pytest.mark.parametrize("exclude", ["kept", "inner/kept", "inner"])
def test_the_path_of_a_layer_in_a_nested_model(exclude):
    """Checks that a layer's path leaves out its weights, whose paths lack the inner model."""
    inputs = keras.Input((3,))
    inner = keras.Sequential([keras.Input((3,)), Lowest(np.inf, np.inf, name="kept")], name="inner")
    model = keras.Model(inputs, keras.layers.Dense(1)(inner(inputs)))
    model.compile("sgd", "mse")
    check = FiniteCheck("skip", exclude=exclude)
    model.fit(X, X[:, :1], verbose=0, callbacks=[check])
    assert check.skipped == 0 and int(model.optimizer.iterations) == 1


@pytest.mark.parametrize("scale", [1e19, 3e18, 1.0])
def test_a_finite_step_beside_a_variance_that_became_infinite(scale):
    """The first batch makes the moving variance infinite, which no training step reads.

    The outputs of later batches are too large for the check in one pass.
    """
    x = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
    x *= np.repeat(np.float32([1e20, scale, scale, scale]), 8)[:, np.newaxis]
    results = []
    for check in (None, FiniteCheck("skip")):
        keras.utils.set_random_seed(1)
        norm, last = keras.layers.BatchNormalization(name="n"), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((6,)), norm, last])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(x, np.ones((32, 1)), callbacks=[check] if check else [], **fit)
        assert not np.isfinite(model.get_layer("n").get_weights()[3]).all()
        results.append(model.get_layer("n").get_weights()[:2] + last.get_weights())
    assert not check.reports
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
