"""Accuracy, macro F1 and loss of a classifier, from its confusion matrix."""

from __future__ import annotations

import numpy as np

from tfwd.runs.interfaces import Score

LOSS = Score("loss", lambda nats: nats, unit="text")


def confusion(labels: np.ndarray, found: np.ndarray, classes: int) -> np.ndarray:
    """Counts predicted labels per true label: int64 `[classes, classes]`, the true label first.

    Example:
    >>> confusion(np.array([0, 0, 1]), np.array([0, 1, 1]), 2).tolist()
    [[1, 1], [0, 1]]
    """
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (labels, found), 1)
    return table


def accuracy(table: np.ndarray) -> float:
    """Returns the share of correct predictions: the sum of the diagonal over the sum of all."""
    return float(np.trace(table) / table.sum())


def macro_f1(table: np.ndarray) -> float:
    """Returns the mean of the classes' F1; each class counts once.

    Formula: for class c, `F1 = 2 t / (2 t + p + n)` with t correct texts, p texts of other classes
    predicted as c, and n texts of c predicted as others. Classes that neither occur nor are
    predicted are ignored, as in scikit-learn.

    Example:
    >>> round(macro_f1(np.array([[3, 1], [2, 4]])), 4)
    0.697
    """
    right = np.diag(table).astype(np.float64)
    both = table.sum(0) + table.sum(1)
    return float((2 * right[both > 0] / both[both > 0]).mean())


def majority(labels: np.ndarray) -> float:
    """Returns the accuracy of a classifier that always predicts the most frequent class."""
    return float(np.max(np.bincount(labels)) / len(labels))
