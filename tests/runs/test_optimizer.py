"""The optimizer that a config names."""

import keras
import pytest

from tfwd.optimizers import DecoupledWeightDecay, NonMonotonicASGD
from tfwd.runs.errors import UserError
from tfwd.runs.training.optimizer import find_averaging, find_weight_decay, make_optimizer


def test_any_optimizer_of_keras():
    made = make_optimizer("RMSprop", 0.5, kwargs={"rho": 0.75})
    assert type(made) is keras.optimizers.RMSprop
    assert (made.rho, float(made.learning_rate.numpy())) == (0.75, 0.5)
    assert find_averaging(made) is find_weight_decay(made) is None


@pytest.mark.parametrize("name", ["AdamW", "sgd", "muon"])
def test_decay_is_in_place_of_the_optimizers_own(name):
    if not hasattr(keras.optimizers, "Muon") and name == "muon":
        pytest.skip("of later releases of Keras")
    bare, made = make_optimizer(name, 0.5), make_optimizer(name, 0.5, weight_decay=0.25)
    assert not bare.weight_decay
    assert made.__class__ is DecoupledWeightDecay and type(made.optimizer) is type(bare)
    assert (made.weight_decay, made.scale, made.include) == (0.25, "learning_rate", None)


def test_all_options_together():
    made = make_optimizer(
        "sgd",
        0.5,
        weight_decay=0.25,
        decay_scale="absolute",
        decay_include="a b/.*",
        decay_exclude="c",
        decay_multipliers="a=2 .*=0.5",
        decay_sparse="rows",
        decay_unused=True,
        non_monotone_interval=3,
        dtype_policy="mixed_float16",
    )
    assert isinstance(made, keras.optimizers.LossScaleOptimizer)
    asgd, decay = find_averaging(made), find_weight_decay(made)
    assert isinstance(asgd, NonMonotonicASGD) and asgd.non_monotone_interval == 3
    assert asgd.optimizer is decay
    assert (decay.scale, decay.include, decay.exclude) == ("absolute", ["a", "b/.*"], ["c"])
    assert decay.multipliers == {"a": 2.0, ".*": 0.5}
    assert (decay.sparse, decay.decay_unused) == ("rows", True)


def test_errors():
    with pytest.raises(UserError, match=r"optimizer\.name='sdg'.*sgd"):
        make_optimizer("sdg", 0.1)
    with pytest.raises(UserError, match="momentun"):
        make_optimizer("sgd", 0.1, kwargs={"momentun": 0.9})


@pytest.mark.parametrize("key", ["include", "exclude", "multipliers"])
def test_rules_without_a_decay_are_an_error(key):
    with pytest.raises(UserError, match=f"decay_{key}=.*give optimizer.weight_decay too"):
        make_optimizer(
            "adam", 0.1, **{f"decay_{key}": "bias=0" if key == "multipliers" else "bias"}
        )
