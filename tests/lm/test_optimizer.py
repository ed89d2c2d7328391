"""The optimizer that a config names."""

import keras
import pytest

from tfwd.lm.errors import UserError
from tfwd.lm.optimizer import make_optimizer


def test_any_optimizer_of_keras():
    made = make_optimizer("AdamW", 0.5, weight_decay=0.25, kwargs={"beta_1": 0.75})
    assert isinstance(made, keras.optimizers.AdamW)
    assert (made.weight_decay, made.beta_1, float(made.learning_rate.numpy())) == (0.25, 0.75, 0.5)
    assert make_optimizer("sgd", 0.5).weight_decay is None


def test_errors():
    with pytest.raises(UserError, match=r"optimizer\.name='sdg'.*sgd"):
        make_optimizer("sdg", 0.1)
    with pytest.raises(UserError, match="momentun"):
        make_optimizer("sgd", 0.1, kwargs={"momentun": 0.9})
