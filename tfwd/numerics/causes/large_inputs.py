"""Finds data that are far larger than the usual inputs of layers."""

from __future__ import annotations

from tfwd import _keras
from tfwd.numerics.causes.evidence import Evidence

UNSCALED = 100.0  # the inputs of layers are usually about 1


def large_inputs(evidence: Evidence, prefix: str) -> str:
    """Returns sentences about data with this prefix that are far larger than 1.

    Inputs that do not reach the first non-finite tensor are left out.
    """
    embeds = any(
        "Embedding" in type(one).__name__ for one in _keras.layers.all_layers(evidence.model)
    )
    classes = "sparse" in evidence.loss.lower()
    return "".join(
        f" '{one.frame.name}' reaches {one.detail.summary.abs_max:.3g}."
        for one in evidence.of("data")
        if "float" in one.frame.dtype or not (embeds if one.frame.name[:1] == "x" else classes)
        if one.frame.name.startswith(prefix) and one.detail.summary.abs_max > UNSCALED
        if one.frame.name[:1] != "x" or evidence.reaches(one.frame.name)
    )
