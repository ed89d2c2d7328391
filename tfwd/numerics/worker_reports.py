"""Selects one report of several workers, each of which sees only its part of a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from tfwd.numerics.bad_step_report import Report
from tfwd.numerics.checked_tensors import KINDS


def earliest(report: Report, gather: Callable[[bytes], list[bytes]]) -> Report:
    """Returns the report of the worker whose first non-finite tensor was computed earliest.

    All workers must call this function. All get the same report.

    Args:
        report: Report of this worker. It is returned if no worker found a non-finite tensor.
        gather: Function that sends the bytes of this worker, and returns the bytes of all workers,
            in the order of their numbers.
    """
    content = pickle.dumps(report) if report.first is not None else b""
    reports: list[Report] = []
    for worker, found in enumerate(gather(content)):
        if found:
            reports.append(pickle.loads(found))
            reports[-1].worker = worker
    # A NaN of one worker reaches all workers through the sum of the gradients.
    return min(reports, key=_kind_of_first, default=report)


def _kind_of_first(report: Report) -> int:
    return KINDS.index(report.first.frame.kind) if report.first is not None else len(KINDS)
