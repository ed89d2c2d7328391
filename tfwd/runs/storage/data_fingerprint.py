"""Fingerprint of a run's data. A run resumes only with the same data."""

from __future__ import annotations

import hashlib

import numpy as np


def fingerprint(texts: dict[str, np.ndarray]) -> str:
    """Returns a short hash of texts of token ids.

    A run resumes only with data of the same hash.
    """
    digest = hashlib.sha256()
    for name in sorted(texts):
        ids = np.ascontiguousarray(texts[name], "<i4")
        digest.update(f"{name} {len(ids)};".encode() + ids.tobytes())
    return digest.hexdigest()[:16]
