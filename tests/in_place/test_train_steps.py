"""`fit` with custom steps, and with models that pass no training flag."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from in_place_tools import (
    DENSE,
    EXAMPLES,
    LABELS,
    Adversarial,
    Autoencoder,
    added,
    made,
    variables,
)
from stack_marks import quick_rows

import tfwd
from tfwd import _keras
from tfwd import parametrizations as P


def test_fit_with_a_step_of_its_own() -> None:
    model = made(Autoencoder)
    model.compile("adam")
    kind, optimizer = type(model), model.optimizer
    model.fit(EXAMPLES, batch_size=8, verbose=0)  # its training function exists already
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    assert type(model) is kind and model.optimizer is optimizer
    assert model.greet() == "a method of its own"
    model.fit(EXAMPLES, batch_size=8, epochs=2, verbose=0)
    # Each step calls the encoder and the decoder, which count separately.
    assert added(model).calls == 8
    tfwd.unwrap(model)
    model.fit(EXAMPLES, batch_size=8, verbose=0)


class NoFlag(keras.Model):
    """A model whose `call` has no training argument."""

    def __init__(self) -> None:
        super().__init__()
        # Keras 3 takes the flag of such a layer, False by default, for the layers after it.
        self.first, self.dropout, self.last = DENSE(8), keras.layers.Dropout(0.0), DENSE(1)

    def call(self, x: Any) -> Any:
        return self.last(self.dropout(self.first(x)))


@quick_rows("True")
@pytest.mark.parametrize("checked", [False, True])
def test_fit_of_a_model_without_a_training_argument(checked: bool) -> None:
    """Compares one update with the plain model's update at the effective weights."""
    model, plain = made(NoFlag), made(NoFlag)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    one = added(model)
    values = [np.asarray(v) for v in one.effective_weights(0).values()]
    raw = model.get_weights()
    start = [values[0], raw[1], values[1], raw[3]]
    plain.set_weights(start)
    callbacks = [tfwd.callbacks.FiniteCheck()] if checked else []
    for trained in (model, plain):
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        trained.fit(EXAMPLES, LABELS, batch_size=16, verbose=0, callbacks=callbacks)
    factors = [2.0 * (values[0] != 0), 1.0, 2.0 * (values[1] != 0), 1.0]
    moved = zip(model.get_weights(), raw, plain.get_weights(), start, factors, strict=True)
    for after, before, plain_after, plain_before, factor in moved:
        change = (plain_after - plain_before) * factor
        np.testing.assert_allclose(after - before, change, rtol=1e-3, atol=1e-6)
    model.evaluate(EXAMPLES, LABELS, verbose=0)
    model.predict(EXAMPLES, verbose=0)
    assert one.calls == 1


def test_dropout_in_a_model_without_a_training_argument() -> None:
    class Dropped(NoFlag):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = keras.layers.Dropout(0.5)

        def call(self, x: Any) -> Any:
            self.kept = self.dropout(tf.ones_like(x))
            return super().call(x)

    model = made(Dropped)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, in_place=True)
    model.compile("sgd", "mse", run_eagerly=True)
    model.fit(EXAMPLES, LABELS, batch_size=16, verbose=0)
    assert 0 < np.count_nonzero(model.kept) < EXAMPLES.size
    model.evaluate(EXAMPLES, LABELS, batch_size=16, verbose=0)
    assert np.count_nonzero(model.kept) == EXAMPLES.size


class Unflagged(Autoencoder):
    """Its step calls its parts without a training flag, or with False."""

    flag: dict[str, bool]

    def train_step(self, data: Any) -> dict[str, Any]:
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            hidden = self.parts["in"](x, **self.flag)[:, :2]
            loss = tf.reduce_mean((self.parts["out"](hidden, **self.flag) - x) ** 2)
        gradients = tape.gradient(loss, variables(self))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_a_step_that_passes_no_flag() -> None:
    model = made(Unflagged)
    model.flag = {}
    model.compile("sgd")
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.fit(EXAMPLES, batch_size=8, verbose=0)
    assert added(model).calls == 4


def test_a_step_without_a_training_call_warns() -> None:
    model = made(Unflagged)
    model.flag = {"training": False}
    model.compile("sgd")
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    with pytest.warns(UserWarning, match="makes no training call.*pass training=True"):
        model.fit(EXAMPLES, batch_size=8, verbose=0)
    assert added(model).calls == 0


def test_parts_of_a_model_that_its_step_calls() -> None:
    model = made(Adversarial, EXAMPLES[:, :4])
    model.compile("sgd")
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    model.fit(EXAMPLES, batch_size=8, verbose=0)
    assert added(model).calls == 6  # the generator once a step, and the critic twice
    one = added(model)
    names = [name for name in one.effective_weights(6) if name.endswith("kernel")]
    weight = one.effective_weights(6)[names[0]]
    x = EXAMPLES[:, :4]
    bias = model.generator.layers[-1].bias
    expected = x @ weight.numpy() + np.asarray(_keras.variables.value(bias))
    np.testing.assert_allclose(model.generator(x, training=True), expected, rtol=1e-5, atol=1e-5)


def test_the_frozen_part_of_a_model_is_called_in_evaluation() -> None:
    class Teacher(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = DENSE(4), DENSE(4)

        def call(self, x: Any, training: Any = None) -> Any:
            return self.teacher(x), self.student(x)

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Teacher()
            self.last = keras.Sequential([keras.Input((4,)), DENSE(2)])

        def call(self, x: Any, training: Any = None) -> Any:
            return self.last(self.inner(x, training=False)[0], training=training)

    model, plain = made(Outer), made(Outer)
    tfwd.parametrize(model, {".*kernel": P.Dropout(0.5)}, seed=1, in_place=True)
    np.testing.assert_array_equal(
        model.inner(EXAMPLES, training=False)[0], plain.inner(EXAMPLES, training=False)[0]
    )
    names = {
        t.name: v
        for (t, _), v in zip(
            added(model).targeted, added(model).effective_weights(0).values(), strict=True
        )
    }
    last = next(value for name, value in names.items() if value.shape == (4, 2))
    hidden = plain.inner(EXAMPLES, training=False)[0]
    np.testing.assert_allclose(model(EXAMPLES, training=True), hidden @ last, rtol=1e-5, atol=1e-5)
