"""Finds the classes whose sample weights Keras computed from `class_weight`."""

from __future__ import annotations

import numpy as np

from tfwd.numerics.causes.evidence import Evidence


def weighted_classes(evidence: Evidence, name: str, chosen: np.ndarray) -> str:
    """Returns the classes with the chosen sample weights, if the weights follow from the labels.

    Args:
        evidence: The evidence.
        name: str. The name of an array of the batch.
        chosen: Booleans of the shape of the sample weights, with at least one True.

    Returns:
        The classes as text. "" if the array has no sample weights, or if the chosen weights are not
        the weights of all examples of some classes. A single example of a class is not enough.
    """
    weights, labels = evidence.data.get(name), evidence.data.get("y")
    if not name.startswith("sample_weight") or weights is None or labels is None:
        return ""
    if labels.ndim == 2 and labels.shape[1] > 1:
        labels = labels.argmax(1)
    labels, weights, chosen = labels.ravel(), weights.ravel(), chosen.ravel()
    if labels.shape != weights.shape or (labels != np.floor(labels)).any():
        return ""
    classes, counts = np.unique(labels[chosen], return_counts=True)
    if counts.min() < 2:
        return ""
    if (np.isin(labels, classes) != chosen).any():
        return ""
    if any(len(np.unique(weights[labels == one])) > 1 for one in np.unique(labels)):
        return ""
    return ", ".join(str(int(one)) for one in classes[:5])
