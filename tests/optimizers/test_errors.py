"""Errors, which are raised before anything is changed."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers_table import MUON_HAS_TWO_DECAYS, make
from optimizer_tools import model, tf_variable, values, variables
from stack_marks import IS_KERAS_2

from tfwd._keras import wrapped_optimizers
from tfwd.optimizers import DecoupledWeightDecay
from tfwd.optimizers.addons import AdamW

LossScale = keras.optimizers.LossScaleOptimizer


@pytest.mark.parametrize(
    "inner",
    [
        lambda: keras.optimizers.AdamW(),
        lambda: keras.optimizers.SGD(weight_decay=0.1),
        lambda: LossScale(keras.optimizers.AdamW()),
        lambda: DecoupledWeightDecay(make("SGD"), 0.1),
        lambda: LossScale(DecoupledWeightDecay(make("SGD"), 0.1)),
        lambda: AdamW(0.1),
    ],
)
def test_what_decays_already_is_refused(inner):
    with pytest.raises(ValueError, match="already decays weights .*weight_decay"):
        DecoupledWeightDecay(inner(), 0.1)


@pytest.mark.skipif(not MUON_HAS_TWO_DECAYS, reason="later releases of Keras have it")
def test_the_other_decay_of_muon_is_noticed():
    with pytest.raises(ValueError, match=r"Muon .*\(adam_weight_decay=0.004\)"):
        DecoupledWeightDecay(keras.optimizers.Muon(weight_decay=0.0), 0.1)


@pytest.mark.skipif(not MUON_HAS_TWO_DECAYS, reason="later releases of Keras have it")
def test_both_decays_of_muon_are_named_at_once():
    words = r"set its weight_decay and its adam_weight_decay to 0|adam_weight_decay and its weight_"
    with pytest.raises(ValueError, match=words) as raised:
        DecoupledWeightDecay(keras.optimizers.Muon(), 0.1)
    assert " weight_decay=" in str(raised.value).replace("(", " ")
    assert "adam_weight_decay=" in str(raised.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"include": "kernels"},
        {"exclude": ["bias", "gamma"]},
        {"multipliers": {"bias": 2, "ernel": 1}},
    ],
)
def test_a_pattern_that_matches_nothing_lists_the_paths(arguments):
    """Checks a pattern that matches nothing. The variables are known at build; nothing is built."""
    optimizer, weights = DecoupledWeightDecay(make("Adam"), 0.1, **arguments), variables()
    old = values(weights)
    (kind,) = arguments
    with pytest.raises(
        ValueError, match=f"{kind} pattern .* matches no variable; .*: kernel, bias"
    ):
        optimizer.apply([tf.zeros([3, 2]), tf.zeros([2])], weights)
    assert not optimizer.built and not optimizer.optimizer.built
    np.testing.assert_array_equal(weights[0].numpy(), old[0])
    with pytest.raises(ValueError, match="matches no variable"):
        optimizer.decay_table(weights)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1: expected a finite number"),
        ({"weight_decay": float("nan")}, ValueError, "weight_decay=nan"),
        ({"weight_decay": None}, TypeError, "weight_decay=None: expected a number, a schedule"),
        ({"weight_decay": True}, TypeError, "weight_decay=True"),
        (
            {"scale": "lr"},
            ValueError,
            "scale='lr': expected one of absolute, learning_rate, schedule",
        ),
        ({"sparse": "row"}, ValueError, "sparse='row': expected one of table, rows"),
        ({"include": []}, ValueError, "pass None for all variables"),
        ({"include": "("}, ValueError, r"include pattern '\(' is not a regular expression"),
        ({"exclude": [3]}, ValueError, "exclude pattern 3 is not a regular expression"),
        (
            {"multipliers": {"a": -1}},
            ValueError,
            r"multipliers\['a'\]=-1: expected a finite number",
        ),
        ({"multipliers": {"a": float("inf")}}, ValueError, r"multipliers\['a'\]=inf"),
        ({"optimizer": 3}, TypeError, "needs an optimizer of keras.optimizers, but 3 is a"),
        ({"optimizer": keras.optimizers.SGD}, TypeError, "needs an optimizer"),
    ],
)
def test_arguments(arguments, error, words):
    with pytest.raises(error, match=words) as caught:
        DecoupledWeightDecay(**{"optimizer": "sgd", "weight_decay": 0.1, **arguments})
    assert "\n" not in str(caught.value)


def test_an_optimizer_with_updates_of_its_own_is_refused():
    def update(self, *args):
        pass

    method = "_internal_apply_gradients" if IS_KERAS_2 else "_backend_update_step"
    Own = type("Own", (keras.optimizers.SGD,), {method: update})
    with pytest.raises(TypeError, match="cannot follow the updates of Own"):
        DecoupledWeightDecay(Own(), 0.1)


def test_a_subclass_with_an_update_step_of_its_own_is_not():
    class Sign(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate=None):
            rate = tf.cast(wrapped_optimizers.learning_rate(self), variable.dtype)
            variable.assign_sub(rate * tf.sign(gradient))

    weight = keras.Variable([4.0])
    DecoupledWeightDecay(Sign(1.0), 0.25).apply([tf.constant([7.0])], [weight])
    assert float(weight[0]) == 2.0


def test_weight_decay_cannot_be_assigned_nor_exclusions_be_named_keras_way():
    optimizer = DecoupledWeightDecay("sgd", 0.1)
    with pytest.raises(AttributeError, match="pass a schedule, a function or a tf.Variable"):
        optimizer.weight_decay = 0.2
    with pytest.raises(ValueError, match="exclude="):
        optimizer.exclude_from_weight_decay(var_names=["bias"])


def test_the_wrapped_optimizer_by_itself_does_not_decay():
    """Checks that two wrappers around one optimizer do not affect each other or the optimizer."""
    inner, weights = make("SGD", 0.0), variables()
    optimizer = DecoupledWeightDecay(inner, 0.5)
    other = DecoupledWeightDecay(inner, 0.25)
    zeros = [tf.zeros_like(tf_variable(v)) for v in weights]
    old = weights[0].numpy()
    optimizer.apply(zeros, weights)
    inner.apply(zeros, weights)
    np.testing.assert_allclose(weights[0].numpy(), old * 0.5)
    other.apply(zeros, weights)
    np.testing.assert_allclose(weights[0].numpy(), old * 0.5 * 0.75)
    assert not {"update_step", "_apply_weight_decay"} & set(vars(inner))


def test_after_an_error_in_a_step_nothing_is_left_behind():
    class Broken(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate=None):
            raise RuntimeError("broken")

    inner = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        DecoupledWeightDecay(inner, 0.5).apply([tf.zeros([1])], [keras.Variable([1.0])])
    assert not {"update_step", "_apply_weight_decay"} & set(vars(inner))


def test_a_model_without_weights():
    net = keras.Sequential([keras.Input((3,)), keras.layers.Activation("relu")])
    optimizer = DecoupledWeightDecay("sgd", 0.1)
    assert list(optimizer.decay_table(net)) == []
    optimizer.build(net.trainable_variables)
    decayed = DecoupledWeightDecay("sgd", 0.1, include="kernel")
    if IS_KERAS_2:
        with pytest.raises(ValueError, match="matches no variable; there are no variables"):
            decayed.build([])
        return
    # Keras 3 builds with no variables when it reads a file: patterns wait for the variables.
    decayed.build([])
    with pytest.raises(ValueError, match="'kernel'.*matches no"):
        decayed.build([keras.Variable([1.0], name="bias")])


def test_the_table_says_why():
    optimizer = DecoupledWeightDecay(
        make("SGD", 0.5),
        0.1,
        scale="learning_rate",
        include=[".*kernel", "hidden/bias"],
        exclude="out/.*",
        multipliers={"hidden/bias": 3},
    )
    rows = optimizer.decay_table(model())
    top = "" if IS_KERAS_2 else "m/"  # Keras 2 names variables without the model
    assert [(row.path, row.reason) for row in rows] == [
        (f"{top}hidden/kernel", "include '.*kernel'"),
        (f"{top}hidden/bias", "include 'hidden/bias', multiplier 3 from 'hidden/bias'"),
        (f"{top}out/kernel", "exclude 'out/.*'"),
        (f"{top}out/bias", "exclude 'out/.*'"),
    ]
    np.testing.assert_allclose([row.decay for row in rows], [0.05, 0.15, 0, 0], rtol=1e-6)
    assert [row.multiplier for row in rows] == [1, 3, 0, 0]
    assert rows[0].shape == (4, 3)
    assert f"{top}hidden/bias" in str(rows) and len(str(rows).splitlines()) == 5


@pytest.mark.parametrize(
    ("argument", "value", "right"),
    [
        ("include", 3, "a regular expression, a list of regular expressions, or None"),
        ("exclude", {"bias": True}, "a regular expression, a list of regular expressions, or None"),
        ("multipliers", ["embedding"], "a dict from regular expressions to factors"),
        ("multipliers", "embedding", "a dict from regular expressions to factors"),
    ],
)
def test_a_wrong_pattern_is_an_error(argument: str, value: Any, right: str) -> None:
    with pytest.raises(TypeError, match=f"{argument}=.*: expected {right}"):
        DecoupledWeightDecay("sgd", 0.1, **{argument: value})


@pytest.mark.parametrize("value", [[0.1, 0.5], [0.1], 1])
def test_a_variable_that_is_no_scalar_of_a_floating_dtype_is_an_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"shape \(.*\) and dtype .*: expected a scalar of a"):
        DecoupledWeightDecay("sgd", tf.Variable(value))


def test_numbers_of_numpy_are_numbers() -> None:
    multipliers = {"kernel": np.float32(0.5)}
    optimizer = DecoupledWeightDecay("sgd", np.float32(0.25), multipliers=multipliers)
    assert optimizer.get_config()["weight_decay"] == 0.25
    assert optimizer.get_config()["multipliers"] == {"kernel": 0.5}
    assert {type(x) for x in (optimizer.weight_decay, *optimizer.multipliers.values())} == {float}
