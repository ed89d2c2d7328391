"""Updates that are not finite because the sum of accumulated gradients overflows.

The gradient of the kernel is the label in each step, because the inputs are 1.
"""

import keras
import numpy as np
import pytest
from non_finite_reports import layers, names, report_of
from stack_marks import needs_keras3, quick_rows

pytestmark = needs_keras3("gradient_accumulation_steps")
SUM = "a sum of gradients that overflows"


def product(y, p):
    return y * p


def report_for(labels, dtype="float32", optimizer="SGD", **options):
    """Returns the report of a fit with a label for each step. The learning rate is small."""
    model = keras.Sequential(
        [
            layers.Input((2,), dtype=dtype),
            layers.Dense(1, use_bias=False, dtype=dtype, kernel_initializer="zeros", name="dense"),
        ]
    )
    rate = 1e-7 if dtype == "float16" else 1e-38
    optimizer = getattr(keras.optimizers, optimizer)(rate, **options)
    x, y = np.ones((8 * len(labels), 2), dtype), np.repeat(labels, 8)[:, None].astype(dtype)
    return report_of(model, x, y, product, optimizer)


CLIPS = {"no clipping": {}, **{name: {name: 1.0} for name in ("clipvalue", "global_clipnorm")}}


@quick_rows("float16-*-clipvalue", "float32-*-no clipping")
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(
    ("dtype", "size", "limit"), [("float32", 2.5e38, "3.4e+38"), ("float16", 4e4, "6.55e+04")]
)
def test_the_sum_that_the_optimizer_stores(dtype, size, limit, clip):
    """The sum of two gradients is infinite in the second step, before Keras clips."""
    report = report_for([size] * 3, dtype, gradient_accumulation_steps=3, **CLIPS[clip])
    assert (report.step, names(report)) == (2, [SUM])
    (cause,) = report.causes
    assert "gradient_accumulation_steps=3" in cause.evidence
    assert f"reaches {size:.3g} in this step" in cause.evidence
    assert f"the sum of the earlier steps reaches {size:.3g}" in cause.evidence
    assert f"The new sum exceeds {limit}, the largest {dtype}" in cause.evidence
    assert "fewer gradient_accumulation_steps" in cause.advice
    assert ("float32 weights" in cause.advice) == (dtype == "float16")
    for word in ("clipvalue=", "clipnorm=", "epsilon", "learning rate"):
        assert word not in cause.advice


@quick_rows("SGD")
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_the_sum_in_the_step_of_the_update(optimizer):
    """The optimizer does not store the third sum: a weight or a momentum is not finite."""
    report = report_for([1.5e38] * 3, optimizer=optimizer, gradient_accumulation_steps=3)
    assert (report.step, names(report)) == (3, [SUM])
    assert "The new sum may exceed 3.4e+38" in report.causes[0].evidence


def test_a_sum_that_does_not_overflow():
    """The average of the gradients is 1e20. Adam's square of the average is infinite."""
    report = report_for([1e20] * 3, optimizer="Adam", gradient_accumulation_steps=3)
    assert (report.step, names(report)) == (3, ["a gradient whose square overflows"])
