"""Losses that are infinite only because of sample weights, class weights or loss_weights.

All predictions are 6 and all labels are 8, so each mean squared error is 4 without weights.
"""

import keras
import numpy as np
import pytest
from non_finite_reports import layers
from stack_marks import quick_rows

from tfwd.callbacks import FiniteCheck
from tfwd.numerics import NonFiniteError

X, Y = np.ones((8, 6), "float32"), np.full((8, 1), 8.0, "float32")
HUGE = 3e38  # 4 times this number exceeds float32, whose largest number is 3.4e38


def head(name):
    return layers.Dense(1, kernel_initializer="ones", name=name)


def weights_with(value, row=2):
    weights = np.ones(8, "float32")
    weights[row] = value
    return weights


def report_of_fit(model, y=Y, loss="mse", loss_weights=None, **fitted):
    model.compile("sgd", loss, loss_weights=loss_weights)
    with pytest.raises(NonFiniteError) as caught:
        model.fit(X, y, shuffle=False, verbose=0, callbacks=[FiniteCheck()], **fitted)
    return caught.value.report


def two_heads(named):
    inputs = layers.Input((6,))
    outputs = {name: head(name)(inputs) for name in "ab"}
    return keras.Model(inputs, outputs if named else list(outputs.values()))


def for_heads(a, b, named):
    return {"a": a, "b": b} if named else [a, b]


@quick_rows("loss_weights-True", "sample_weight-False")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["loss_weights", "sample_weight"])
def test_the_output_whose_weight_makes_its_loss_infinite(kind, named):
    if kind == "loss_weights":
        given = {"loss_weights": for_heads(1.0, HUGE, named)}
    else:
        given = {"sample_weight": for_heads(weights_with(1.0), weights_with(HUGE), named)}
    losses, labels = (for_heads(one, one, named) for one in ("mse", Y))
    report = report_of_fit(two_heads(named), labels, losses, **given)
    assert report.sentence.startswith("loss 'mse' of output 'b': +Inf, step 1")
    assert report.first.frame.outputs == ("b",)
    assert all("'a'" not in cause.evidence for cause in report.causes)
