"""The learning rate by step and by layer, against closed forms."""

import numpy as np
import pytest
import tensorflow as tf
from finetune_tools import make_config
from stack_marks import quick_rows

from tfwd import _keras
from tfwd.finetune import learning_rate_schedule
from tfwd.finetune.model import classifier_of, make_model, named_weights
from tfwd.finetune.program import PROGRAM
from tfwd.finetune.training_step import make_step
from tfwd.runs.training.step_variables import StepVariables


@pytest.mark.parametrize(("steps", "warmup"), [(10, 0), (10, 1), (10, 4), (7, 6), (1, 0)])
@pytest.mark.parametrize("linear", [True, False])
def test_factor(steps, warmup, linear):
    for k in range(steps + 3):
        if k < warmup:
            expected = (k + 1) / warmup
        else:
            expected = max(0, (steps - k) / (steps - warmup)) if linear else 1
        found = float(
            learning_rate_schedule.factor(tf.constant(k, tf.int64), steps, warmup, linear)
        )
        assert found == pytest.approx(expected, abs=1e-6)
        assert k >= steps or found > 0


def test_warmup_steps():
    found = [learning_rate_schedule.warmup_steps(n, 0.1) for n in (0, 1, 4, 10, 16, 100)]
    assert found == [0, 0, 0, 1, 2, 10]
    assert learning_rate_schedule.warmup_steps(10, 0.99) == 9


def test_layer_factors():
    names = ["encoder/embeddings/words/embeddings", "encoder/embeddings/LayerNorm/beta"]
    names += [f"encoder/stack/layer_{i}/output/kernel" for i in range(12)]
    names += ["encoder/pooler/dense/bias", "head/kernel"]
    found = list(learning_rate_schedule.layer_factors(names, 12, 0.9).values())
    np.testing.assert_allclose(found, 0.9 ** np.array([13, 13, *range(12, 0, -1), 0, 0]))


@pytest.fixture(scope="module")
def vocabulary(data, pretrained):
    return PROGRAM.read_data(make_config(data, pretrained)).vocabulary


@quick_rows("adam")
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_each_weight_is_updated_at_its_layers_rate(data, pretrained, vocabulary, name):
    """Checks two steps in NumPy: decay, then the optimizer's step, at rate_v."""
    config = make_config(data, pretrained, optimizer__name=name, optimizer__layer_decay=0.5)
    config.optimizer.update({"weight_decay": 0.1, "learning_rate": 0.01, "schedule": "constant"})
    config.optimizer.update({"decay_exclude": "bias", "warmup": 0.0})
    model = make_model(config, vocabulary)
    weights = named_weights(model)
    generator = np.random.default_rng(0)
    for variable in weights.values():
        variable.assign(generator.normal(size=variable.shape))
    step = make_step(config, model, StepVariables([], 0.01), epoch_steps=10)
    trained = {id(v): n for n, v in weights.items()}
    names = [trained[id(v)] for v in model.trainable_variables]
    depths = {"encoder/embeddings": 3, "encoder/stack/layer_0": 2, "encoder/stack/layer_1": 1}
    before = {n: weights[n].numpy().astype(np.float64) for n in names}
    gradients = [
        [generator.normal(size=weights[n].shape).astype("float32") for n in names] for _ in range(2)
    ]

    @tf.function
    def apply(*given):
        step.apply(given, model.trainable_variables)

    for given in gradients:
        apply(*map(tf.constant, given))
    for place, n in enumerate(names):
        depth = next((d for start, d in depths.items() if n.startswith(start)), 0)
        rate, w = 0.01 * 0.5**depth, before[n]
        first, second = 0.0, 0.0
        for t, given in enumerate(gradients, 1):
            g = given[place].astype(np.float64)
            if "bias" not in n:
                w = w - 0.1 * rate * w
            if name == "sgd":
                w = w - rate * g
            else:
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
                size = np.sqrt(second / (1 - 0.999**t)) + 1e-7 / np.sqrt(1 - 0.999**t)
                w = w - rate * first / (1 - 0.9**t) / size
        np.testing.assert_allclose(weights[n].numpy(), w, rtol=1e-5, atol=1e-6, err_msg=n)
    assert _keras.wrapped_optimizers.leaves(step.optimizer)[0].learning_rate == np.float32(0.01)


def test_rates_of_the_first_steps(data, pretrained, vocabulary):
    config = make_config(data, pretrained, training__epochs=5, optimizer__warmup=0.2)
    step = make_step(config, make_model(config, vocabulary), StepVariables([], 0.5), epoch_steps=4)
    found = []
    for number in range(21):
        step.state.step.assign(number)
        found.append(float(step.rate()))
    expected = [0.125, 0.25, 0.375, 0.5, *(0.5 * (20 - k) / 16 for k in range(4, 21))]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    config.optimizer.schedule_epochs = 10
    step = make_step(config, make_model(config, vocabulary), StepVariables([], 0.5), epoch_steps=4)
    assert (step.steps, step.warmup) == (40, 8)
    assert classifier_of(step.model) is step.model
