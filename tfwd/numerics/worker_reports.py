"""The one report of several workers, each of which sees its own part of a batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable

from tfwd.numerics.checked_tensors import KINDS
from tfwd.numerics.report import Report


def earliest(report: Report, gather: Callable[[bytes], list[bytes]]) -> Report:
    """Returns the worker's report in which the first non-finite tensor comes earliest.

    All workers must call it, and get the same report.

    Args:
        report: Report of this worker. It is returned if no worker found a non-finite tensor.
        gather: Function that returns the bytes of each worker, by the worker's number.
    """
    content = pickle.dumps(report) if report.first is not None else b""
    reports: list[Report] = []
    for worker, found in enumerate(gather(content)):
        if found:
            reports.append(pickle.loads(found))
            reports[-1].worker = worker
    # The sum of the gradients carries a NaN of one worker to all.
    return min(reports, key=_kind_of_first, default=report)


def _kind_of_first(report: Report) -> int:
    return KINDS.index(report.first.frame.kind) if report.first is not None else len(KINDS)
