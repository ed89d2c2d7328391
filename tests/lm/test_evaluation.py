"""Evaluation against the plain mean."""

import numpy as np
import pytest
from stack_marks import extended

from tfwd.lm.data import text_windows
from tfwd.lm.evaluation import Evaluation, Evaluator, evaluate
from tfwd.lm.losses import perplexity
from tfwd.lm.model import LanguageModel
from tfwd.runs.errors import UserError


def test_evaluation_counts_every_token_once():
    model = LanguageModel(7, 4, (6, 4), seed=3, weight_dropout=0.5)
    ids = np.random.default_rng(0).integers(0, 7, 41)
    columns = text_windows.columns(ids, 2)
    logits = model(columns[:, :-1], training=False).logits.numpy().astype(np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    nats = -np.take_along_axis(logits, columns[:, 1:, None], axis=-1)
    for window in (4, 19, 100):  # windows of 19 = 4 + 4 + 4 + 4 + 3 steps, and one
        found = evaluate(model, ids, batch_size=2, window=window)
        assert found.tokens == 38
        assert found.nats == pytest.approx(nats.mean(), abs=1e-6)
    assert found.perplexity == pytest.approx(np.exp(nats.mean()), rel=1e-6)
    assert found.bits == pytest.approx(nats.mean() / np.log(2), rel=1e-6)


def test_evaluation_ends_when_asked():
    evaluator = Evaluator(LanguageModel(7, 4, (4,)), 1)
    asked = []
    columns = text_windows.columns(np.arange(50) % 7, 1)
    assert evaluator(columns, 7, stop=lambda: asked.append(1) or len(asked) == 3) is None
    assert len(asked) == 3


@extended
def test_windows_of_all_lengths_trace_once():
    evaluator = Evaluator(LanguageModel(7, 4, (4,)), 2)
    columns = text_windows.columns(np.arange(200) % 7, 2)
    for window in (3, 7, 50):
        evaluator(columns, window)
    assert evaluator.function.experimental_get_tracing_count() == 1


def test_a_text_that_is_too_short():
    with pytest.raises(UserError, match=r"the other text has 3 tokens.*largest batch size.* 1"):
        evaluate(LanguageModel(7, 4, (4,)), np.arange(3), 2, 5, what="the other text")


def test_perplexity_of_a_loss_that_exploded():
    assert perplexity(1e9) == np.inf and Evaluation(np.nan, 1).perplexity == np.inf
