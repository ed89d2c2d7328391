"""Scores and log-probabilities against brute force over texts."""

import numpy as np
import pytest

from tfwd.finetune import scores
from tfwd.finetune.evaluation import log_probabilities


def brute_force(labels, found, classes):
    pairs = list(zip(labels, found, strict=True))
    ones = []
    for c in range(classes):
        right = sum(1 for a, b in pairs if a == b == c)
        wrongly = sum(1 for a, b in pairs if b == c != a)
        missed = sum(1 for a, b in pairs if a == c != b)
        if right + wrongly + missed:
            precision = right / (right + wrongly) if right + wrongly else 0.0
            recall = right / (right + missed) if right + missed else 0.0
            both = precision + recall
            ones.append(2 * precision * recall / both if both else 0.0)
    return sum(a == b for a, b in pairs) / len(pairs), sum(ones) / len(ones)


@pytest.mark.parametrize("seed", range(6))
def test_scores(seed):
    generator = np.random.default_rng(seed)
    classes = 2 + seed
    labels = generator.integers(0, classes - seed % 2, 50)  # a class that does not occur
    found = np.where(generator.random(50) < 0.5, labels, generator.integers(0, classes, 50))
    table = scores.confusion(labels, found, classes)
    assert table.sum() == 50 and table[0, 1] == sum((labels == 0) & (found == 1))
    accuracy, macro_f1 = brute_force(labels.tolist(), found.tolist(), classes)
    assert scores.accuracy(table) == pytest.approx(accuracy, abs=1e-12)
    assert scores.macro_f1(table) == pytest.approx(macro_f1, abs=1e-12)
    most = max(list(labels).count(c) for c in range(classes))
    assert scores.majority(labels) == most / 50


def test_a_class_that_is_nowhere_is_left_out():
    table = scores.confusion(np.array([0, 1]), np.array([0, 1]), 5)
    assert scores.macro_f1(table) == 1.0


def test_log_probabilities_of_large_logits():
    found = log_probabilities(np.array([[1e4, 1e4 + np.log(3.0)], [-1e4, 0.0]]))
    np.testing.assert_allclose(np.exp(found), [[0.25, 0.75], [0.0, 1.0]], atol=1e-9)
