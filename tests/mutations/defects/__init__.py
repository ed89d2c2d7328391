"""The defects to plant, each with the tests that must find it. One module for each topic."""

from __future__ import annotations

from mutations.defects import (
    draws,
    finite_checks,
    in_place,
    layers,
    optimizers,
    pretrained,
    programs,
    workers,
)
from mutations.defects.defect import Defect

TOPICS = (draws, finite_checks, in_place, layers, optimizers, pretrained, programs, workers)
DEFECTS: list[Defect] = [defect for topic in TOPICS for defect in topic.DEFECTS]
