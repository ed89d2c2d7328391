"""Finds how a model's optimizers clip gradients, and returns advice on clipping."""

from __future__ import annotations

import keras

from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.leaf_optimizers import leaf_optimizers

ARGUMENTS = ("global_clipnorm", "clipnorm", "clipvalue")


def clipping(evidence: Evidence) -> list[str]:
    """Returns the argument by which each optimizer of the model clips; "" if it does not clip."""
    if not isinstance(evidence.model, keras.Model):
        return []
    return [
        next((name for name in ARGUMENTS if getattr(leaf, name, None)), "")
        for leaf in leaf_optimizers(evidence.model)
    ]


def or_clip(evidence: Evidence) -> str:
    """Returns advice on clipping that ends a list; "" if all optimizers clip already."""
    found = clipping(evidence)
    if found and all(found):
        return ""
    return ", or clip gradients (global_clipnorm=1.0 of any Keras optimizer)"
