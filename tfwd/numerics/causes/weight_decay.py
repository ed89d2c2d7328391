"""Finds optimizers whose own weight decay makes weights grow in each update."""

from __future__ import annotations

from numbers import Real

import keras

from tfwd import _keras
from tfwd._keras import wrapped_optimizers
from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.leaf_optimizers import leaf_optimizers

SMALLER = "use a smaller weight_decay or learning rate, so that their product is far below 1"


def growing_decay(evidence: Evidence) -> str:
    """Returns the factor of a weight decay that makes weights grow, as text; "" without one.

    Keras's optimizers multiply each weight by 1 minus learning rate times weight decay. The model
    must have its state from before the step.
    """
    if not isinstance(evidence.model, keras.Model):
        return ""
    for leaf in leaf_optimizers(evidence.model):
        decay = wrapped_optimizers.own_decays(leaf).get("weight_decay")
        if not _keras.is_of_keras(type(leaf)) or wrapped_optimizers.is_legacy(leaf):
            continue
        if not isinstance(decay, Real):
            continue
        rate = float(wrapped_optimizers.learning_rate(leaf))
        factor = 1 - rate * float(decay)
        if factor < -1:
            return (
                f" The learning rate is {rate:.3g} and the weight_decay is {float(decay):.3g}. The "
                "optimizer multiplies the weights that it decays by 1 - learning rate * "
                f"weight_decay in each update. This factor is {factor:.4g}. It is below -1, so "
                "these weights grow in each update."
            )
    return ""
