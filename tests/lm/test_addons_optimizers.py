"""Optimizers of tensorflow-addons in tfwd-train, by names such as `tfa.LAMB`."""

import numpy as np
import pytest
import tensorflow as tf
from stack_marks import needs_addons
from tables_by_make_target import with_slow_rest
from training_loop_runs import StopAfter, log, make_config, write_text

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd.lm.commands.train import train
from tfwd.lm.model import LanguageModel
from tfwd.lm.training_step import TrainStep
from tfwd.runs.errors import UserError
from tfwd.runs.training import optimizer as optimizers
from tfwd.runs.training.optimizer import find_weight_decay, make_optimizer
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.training.stop_signals import Stopped, StopRequest

INPUTS = tf.constant([[1, 2, 3, 1], [5, 6, 2, 2]], tf.int32)
TARGETS = tf.constant([[2, 3, 1, 0], [6, 2, 2, 4]], tf.int32)
RATE, DECAY = 0.125, 0.25
# An optimizer by layers, one without a rate, and one that updates rows.
KINDS = ("tfa.LAMB", "tfa.LazyAdam")
WITH_RATE = [name for name in optimizers.ADDONS if name != "tfa.COCOB"]


def make(optimizer, policy="float32"):
    model = LanguageModel(7, 4, (6, 4), seed=3, dtype_policy=policy)
    return TrainStep(model, optimizer, StepVariables(model.zero_state(2), RATE))


def weights(step):
    return [variable.numpy() for variable in step.model.trainable_variables]


def gradients(model):
    with tf.GradientTape() as tape:
        logits = model(INPUTS, training=False).logits
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(TARGETS, logits)
        loss = tf.reduce_mean(loss)
    variables = [_keras.variables.tf_variable(v) for v in model.trainable_variables]
    return [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]


def bare(name, rate=RATE):
    import tensorflow_addons

    kind = getattr(tensorflow_addons.optimizers, name.removeprefix("tfa."))
    return kind() if name == "tfa.COCOB" else kind(learning_rate=rate)


@needs_addons
@pytest.mark.parametrize("name", with_slow_rest(optimizers.ADDONS, KINDS))
def test_steps_equal_the_optimizers_own(name):
    step, own = make(make_optimizer(name, RATE)), bare(name)
    start = step.state.carried
    twins = [tf.Variable(v) for v in step.model.trainable_variables]
    for _ in range(3):
        for variable in (v for pair in start for v in pair):
            variable.assign(tf.zeros_like(variable))
        own.apply_gradients(zip(gradients(step.model), twins, strict=True))
        step(INPUTS, TARGETS)
        for ours, theirs in zip(weights(step), twins, strict=True):
            np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-5, atol=1e-6)
    assert step.failure() is None and int(step.optimizer.iterations.numpy()) == 3


@needs_addons
@pytest.mark.parametrize("name", with_slow_rest(optimizers.ADDONS, KINDS))
def test_decoupled_decay_comes_before_the_step(name):
    scale = "absolute" if name == "tfa.COCOB" else "learning_rate"
    made = make_optimizer(
        name, RATE, weight_decay=DECAY, decay_scale=scale, decay_exclude="decoder/bias"
    )
    step, own = make(made), bare(name)
    factor = DECAY if scale == "absolute" else DECAY * RATE
    twins = [tf.Variable(v) for v in step.model.trainable_variables]
    found = gradients(step.model)
    own._create_all_weights(twins)  # some of them remember the first weights
    for variable, twin in zip(step.model.trainable_variables, twins, strict=True):
        if not _keras.variables.path(variable).endswith("decoder/bias"):
            twin.assign_sub(factor * twin)
    own.apply_gradients(zip(found, twins, strict=True))
    step(INPUTS, TARGETS)
    for ours, theirs in zip(weights(step), twins, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=2e-5, atol=1e-6)
    assert find_weight_decay(step.optimizer).weight_decay == DECAY


@needs_addons
@pytest.mark.parametrize("name", with_slow_rest(WITH_RATE, KINDS))
def test_the_rate_of_the_run_is_the_optimizers(name):
    decay = DECAY * (WITH_RATE.index(name) % 2)
    step = make(make_optimizer(name, RATE, weight_decay=decay))
    step(INPUTS, TARGETS)
    step.state.learning_rate.assign(RATE / 4)
    step(INPUTS, TARGETS)
    assert float(step.optimizer.learning_rate) == RATE / 4


@needs_addons
@pytest.mark.parametrize("name", ["tfa.LAMB", "tfa.COCOB"])
def test_half_precision_scales_the_loss(name):
    plain, half = (
        make(make_optimizer(name, RATE, dtype_policy=policy), policy)
        for policy in ("float32", "mixed_float16")
    )
    assert _keras_training.scales_loss(half.optimizer) and not _keras_training.scales_loss(
        plain.optimizer
    )
    for _ in range(2):
        plain(INPUTS, TARGETS)
        half(INPUTS, TARGETS)
    for one, other in zip(weights(plain), weights(half), strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)
    assert float(half.state.gradient_norm) == pytest.approx(
        float(plain.state.gradient_norm), rel=0.02
    )


@needs_addons
@pytest.mark.parametrize("name", ["tfa.LAMB", "tfa.COCOB"])
@pytest.mark.slow
def test_a_stopped_run_resumes_with_the_same_results(name, tmp_path):
    text = write_text(tmp_path / "text.txt")
    changes = {
        "optimizer__name": name,
        "optimizer__weight_decay": 0.01,
        "optimizer__decay_scale": "absolute",
    }
    train(make_config(text, **changes), str(tmp_path / "whole"), StopRequest())
    with pytest.raises(Stopped):
        train(make_config(text, **changes), str(tmp_path / "part"), StopAfter(20))
    train(make_config(text, **changes), str(tmp_path / "part"), StopRequest())
    whole = log(tmp_path / "whole")
    assert whole == log(tmp_path / "part")
    losses = [record["loss"] for record in whole if record["kind"] == "valid"]
    assert len(losses) == 2 and losses[1] != losses[0]


@needs_addons
def test_arguments_of_an_optimizer():
    made = make_optimizer("TFA.conditionalgradient", 0.5, kwargs={"lambda_": 2.0, "ord": "fro"})
    assert float(made.get_config()["lambda_"]) == 2.0
    assert set(optimizers.allowed_arguments("tfa.ConditionalGradient")) >= {
        "lambda_",
        "ord",
        "epsilon",
    }
    with pytest.raises(UserError, match="lamda"):
        make_optimizer("tfa.ConditionalGradient", 0.5, kwargs={"lamda": 2.0})


def test_without_tensorflow_addons_the_extra_and_the_nearest_are_named(monkeypatch):
    there = [name for name in _keras_training.optimizer_names() if not name.startswith("tfa.")]
    monkeypatch.setattr(
        _keras_training, "optimizer_names", lambda: [*there, *({"Lamb"} - {*there})]
    )
    for name, nearest in {
        "tfa.LAMB": "Lamb",
        "tfa.lazyadam": "Adam",
        "tfa.RectifiedAdam": "Adam or AdamW",
        "tfa.AdaBelief": "Adam or AdamW",
        "tfa.Yogi": "Adam or AdamW",
        "tfa.NovoGrad": "Adam or AdamW",
        "tfa.COCOB": "Adam",
        "tfa.ConditionalGradient": "SGD",
    }.items():
        words = rf"pip install '\.\[addons\]'.*the most similar optimizer here is {nearest}\)"
        with pytest.raises(UserError, match=words):
            make_optimizer(name, 0.1)
    with pytest.raises(UserError, match=r"rmsprop$"):  # nothing is known of this one
        make_optimizer("tfa.Unheard", 0.1)
