"""`FiniteCheck` on a model whose own training step uses two optimizers, each for its own weights.

The oracle is Keras's `fit` without the callback.
"""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from finite_check_fits import ByOperations
from stack_marks import extended, quick_rows

from tfwd.callbacks import FiniteCheck

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(24, 5)).astype("float32")
REAL = GENERATOR.normal(size=(24, 2)).astype("float32")


class Adversarial(keras.Model):
    """A generator and a discriminator, which train in turn."""

    def __init__(self) -> None:
        super().__init__()
        dense = keras.layers.Dense
        self.generator = keras.Sequential([keras.Input((5,)), dense(6, "tanh"), dense(2)])
        self.discriminator = keras.Sequential([keras.Input((2,)), dense(3, "relu"), dense(1)])

    def compile(self, first: Any, second: Any, **options: Any) -> None:
        super().compile(**options)
        self.first, self.second = first, second

    def call(self, x: Any, training: Any = None) -> Any:
        return self.generator(x, training=training)

    def train_step(self, data: Any) -> Any:
        x, real = data
        with tf.GradientTape() as tape:
            made = tf.reduce_mean(self.discriminator(self.generator(x, training=True)))
            loss = made - tf.reduce_mean(self.discriminator(real))
        weights = self.discriminator.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            fooled = -tf.reduce_mean(self.discriminator(self.generator(x, training=True)))
        weights = self.generator.trainable_weights
        self.first.apply_gradients(zip(tape.gradient(fooled, weights), weights, strict=True))
        return {"loss": loss}


def of_keras() -> tuple[Any, Any]:
    # With an average, an optimizer overwrites each weight that it was built for.
    average = {"use_ema": True, "ema_overwrite_frequency": 2}
    return keras.optimizers.Adam(0.01, **average), keras.optimizers.SGD(0.01, momentum=0.9)


def train(
    x: np.ndarray,
    real: np.ndarray,
    callbacks: Any,
    optimizers: Callable[[], tuple[Any, Any]] = of_keras,
    **options: Any,
) -> list[np.ndarray]:
    """Returns the weights and the variables of both optimizers."""
    keras.utils.set_random_seed(3)
    model = Adversarial()
    model.compile(*optimizers(), **options)
    model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, real, batch_size=4, verbose=0, shuffle=False, callbacks=callbacks)
    slots = [
        variable
        for optimizer in (model.first, model.second)
        for variable in (
            optimizer.variables() if callable(optimizer.variables) else optimizer.variables
        )
    ]
    return [np.asarray(variable) for variable in (*model.weights, *slots)]


@extended
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_each_optimizer_has_the_slots_of_its_own_weights(options: dict[str, Any]) -> None:
    plain = train(X, REAL, [], **options)
    checked = train(X, REAL, [FiniteCheck()], **options)
    assert [value.shape for value in checked] == [value.shape for value in plain]
    for one, other in zip(checked, plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@quick_rows("options0")
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_a_bad_batch_changes_neither_optimizer(options: dict[str, Any]) -> None:
    bad = X.copy()
    bad[8:12, 0] = np.nan
    skipped = train(bad, REAL, [FiniteCheck("skip")], **options)
    rows = np.r_[0:8, 12:24]
    without = train(X[rows], REAL[rows], [], **options)
    for one, other in zip(skipped, without, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@quick_rows("options1")
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}])
def test_a_bad_first_batch_with_optimizers_that_assign_by_operations(
    options: dict[str, Any],
) -> None:
    """Checks slots that the bad step itself creates."""
    options["optimizers"] = lambda: (ByOperations(), ByOperations())
    bad = X.copy()
    bad[:4, 0] = np.nan
    skipped = train(bad, REAL, [FiniteCheck("skip")], **options)
    without = train(X[4:], REAL[4:], [], **options)
    for one, other in zip(skipped, without, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
