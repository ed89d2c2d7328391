"""Checks of finite values: which layer, which direction, why, and before the update.

`tfwd.callbacks.FiniteCheck` does it in `fit`. What is here is for other places:

- `Probes`: looks at a model's tensors in a training loop of one's own.
- `unused`: the weights that no gradient reaches.
- `summarize`: counts of NaN, +Inf and -Inf in a tensor, and how large the rest is.
- `Report`, `NonFiniteError`: what a bad step is reported as.
"""

from tfwd.finite import Summary, summarize
from tfwd.numerics.probes import Probes
from tfwd.numerics.report import Cause, NonFiniteError, Report
from tfwd.numerics.unused import unused

__all__ = ["Cause", "NonFiniteError", "Probes", "Report", "Summary", "summarize", "unused"]
