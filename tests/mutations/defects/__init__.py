"""The defects to plant, each with the tests that must find it. One module for each topic."""

from __future__ import annotations

from mutations.defects import (
    draws,
    finite_checks,
    flattened_images,
    in_place,
    layers,
    loading,
    optimizers,
    programs,
    transformer,
    workers,
)
from mutations.defects.defect import Defect

TOPICS = (
    draws,
    finite_checks,
    flattened_images,
    in_place,
    layers,
    loading,
    optimizers,
    programs,
    transformer,
    workers,
)
DEFECTS: list[Defect] = [defect for topic in TOPICS for defect in topic.DEFECTS]
