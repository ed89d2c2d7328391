"""Why it does not help to leave out more steps."""

from __future__ import annotations

from collections.abc import Sequence

from tfwd.numerics.report import Report


def why_in_vain(reports: Sequence[Report], left_out: int) -> str:
    """What the last report and those of so many steps before it have in common, if anything.

    A step that is left out changes no weight. So what is not finite in each batch stays so.
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
