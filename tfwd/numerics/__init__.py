"""Checks that training steps are finite, and finds the layer, the direction and the cause.

`tfwd.callbacks.FiniteCheck` does this in `fit`. This package is for other uses:

- `Probes`: checks a model's tensors in a custom training loop.
- `unused`: finds the weights that no gradient reaches.
- `summarize`: counts NaN, +Inf and -Inf in a tensor, and measures the other elements.
- `Report`, `NonFiniteError`: the report and the exception for a bad step.
"""

from tfwd.finite import Summary, summarize
from tfwd.numerics.bad_step_report import NonFiniteError, Report
from tfwd.numerics.probes import Probes
from tfwd.numerics.unused_weights import unused

__all__ = ["NonFiniteError", "Probes", "Report", "Summary", "summarize", "unused"]
