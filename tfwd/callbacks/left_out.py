"""Hint for a report after several skipped steps."""

from __future__ import annotations

from collections.abc import Sequence

from tfwd.numerics.report import Report


def why_in_vain(reports: Sequence[Report], left_out: int) -> str:
    """Returns what the last report and the reports before it have in common, or "".

    A skipped step changes no weight. A cause that is in each batch therefore remains.
    """
    last = reports[-left_out - 1 :]
    where = last[-1].where
    if left_out < 1 or any(report.where != where for report in last):
        return ""
    if where.startswith("data "):
        return f"Each began in {where}: look whether all batches are so, and mend the data."
    return (
        f"Each began in {where}: a step that is left out changes no weight, so to leave out more "
        "does not help."
    )
