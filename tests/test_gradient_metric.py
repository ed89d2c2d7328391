"""The metric `GradientSquaredMean`: its mean over steps, its dtype, config and errors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfwd import gradients, metrics


def moments(*values: float, batch_size: int = 2) -> gradients.Moments:
    squares = [tf.constant([[values[0], values[1]]]), tf.constant([values[2]])]
    return gradients.Moments(squares, squares, ["dense"] * 2, batch_size)


def make() -> metrics.GradientSquaredMean:
    return metrics.GradientSquaredMean([("dense/kernel", 2), ("dense/bias", 1)], name="squares")


def test_every_example_of_every_step_counts_once() -> None:
    metric = make()
    assert float(metric.result()) == 0
    metric.update_state(moments(1, 3, 8, batch_size=1))
    metric.update_state(moments(5, 7, 0, batch_size=3))
    by_variable = {path: float(value) for path, value in metric.by_variable().items()}
    assert by_variable == {"dense/kernel": 5.0, "dense/bias": 2.0}
    assert float(metric.result()) == pytest.approx(4.0)
    metric.reset_state()
    metric.update_state(moments(1, 1, 4))
    assert float(metric.result()) == pytest.approx(2.0)


def test_sums_of_a_narrow_metric_are_wide() -> None:
    metric = metrics.GradientSquaredMean([("kernel", 2), ("bias", 1)], dtype="float16")
    metric.update_state(moments(1e-9, 3e-9, 8e-9))  # float16 ends at 6e-8
    assert float(metric.result()) == pytest.approx(4e-9, rel=1e-5)


def test_sums_of_a_double_metric_are_double() -> None:
    metric = metrics.GradientSquaredMean([("kernel", 2), ("bias", 1)], dtype="float64")
    for _ in range(3):
        metric.update_state(moments(1, 0, 1, batch_size=2**24 + 1))  # float32 has no such number
    assert float(metric.examples) == 3 * (2**24 + 1)
    assert float(metric.result()) == pytest.approx(2 / 3, rel=1e-15)


def test_config_and_state_survive() -> None:
    metric = make()
    metric.update_state(moments(1, 3, 8))
    config = keras.saving.serialize_keras_object(metric)
    twin = keras.saving.deserialize_keras_object(config)
    for variable, value in zip(twin.variables, metric.variables, strict=True):
        variable.assign(value)
    assert twin.name == "squares"
    assert float(twin.result()) == float(metric.result())
    twin.update_state(moments(0, 0, 0))
    assert float(twin.result()) == pytest.approx(float(metric.result()) / 2)


def test_in_a_traced_step_of_a_model() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    metric = metrics.GradientSquaredMean(model.trainable_variables)
    x, y = tf.random.normal([5, 3]), tf.random.normal([5, 2])

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        metric.update_state(gradients.moments(model, x, y, "mse"))

    step(x, y)
    found = gradients.moments(model, x, y, "mse").mean_square
    entries = np.concatenate([np.ravel(s) for s in found])
    assert float(metric.result()) == pytest.approx(entries.mean(), rel=1e-5)


def test_wrong_moments_and_no_variables() -> None:
    with pytest.raises(ValueError, match="metric 'squares' was made for 2 weights"):
        make().update_state(moments(1, 2, 3)._replace(mean_square=[tf.zeros([3])]))
    with pytest.raises(ValueError, match=r"'squares' expects .*moments, got list"):
        make().update_state([tf.zeros([1, 2])])
    with pytest.raises(ValueError, match="model.trainable_variables"):
        metrics.GradientSquaredMean([])


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_in_compile_it_says_what_to_do(options: dict, weighted: bool) -> None:
    """Checks the error in `compile`, where Keras passes targets, outputs and sample weights."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    metric = metrics.GradientSquaredMean(model.trainable_variables)
    lists = {"weighted_metrics" if weighted else "metrics": [metric]}
    model.compile("sgd", "mse", **lists, **options)
    words = r"fit\(callbacks=\[tfwd.callbacks.GradientSquaredMean\(\)\]\)"
    with pytest.raises(ValueError, match=words):
        model.fit(np.ones((2, 3)), np.ones((2, 2)), verbose=0, sample_weight=np.ones(2))


def test_the_weight_of_a_step_by_position_and_by_name() -> None:
    by_position, by_name = make(), make()
    by_position.update_state(moments(1, 2, 3), 0.5)
    by_name.update_state(moments(1, 2, 3), sample_weight=0.5)
    assert float(by_position.examples) == float(by_name.examples) > 0
