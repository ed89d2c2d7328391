"""Checks of finite values: which layer, which direction, why, and before the update.

`tfwd.callbacks.FiniteCheck` does it in `fit`. What is here is for other places:

- `summarize`: counts of NaN, +Inf and -Inf in a tensor, and how large the rest is.
- `Report`, `NonFiniteError`: what a bad step is reported as.
"""

from tfwd.finite import Summary, summarize
from tfwd.numerics.report import Cause, NonFiniteError, Report

__all__ = ["Cause", "NonFiniteError", "Report", "Summary", "summarize"]
