"""`UserError`, for what a user of the programs got wrong, and suggestions of near names.

The programs print it as a single line, ``error: <message>``, and end with exit code 1. Anything
else that is raised is a fault of the code and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfwd.numerics.report import Report
    from tfwd.runs.program import Failure


class UserError(Exception):
    """A problem with what the user gave: a flag, a config value, a text or a run's folder.

    The message is one line that says what was wrong, where, the value, and what would be right.

    Example:

    >>> from tfwd.runs.errors import UserError
    >>> raise UserError("data.level='words': give word or char")
    Traceback (most recent call last):
    ...
    tfwd.runs.errors.UserError: data.level='words': give word or char
    """


class Diverged(UserError):
    """A run met a number that is not finite, and ends.

    Attributes:
        short: when and where, as "diverged at step 7 in layer lstm_1".
        report: what was found, or `None` if no step but a weight was not finite.
    """

    def __init__(self, failure: Failure, report: Report | None, kept: str):
        where, found = (report.where, report.what) if report else (failure.weight, failure.found)
        self.short = f"diverged at step {failure.step} in {where}"
        self.report = report
        causes = [] if report is None else [cause.name for cause in report.causes]
        likely = f"; likely cause: {' or '.join(causes)}" if causes else ""
        super().__init__(
            f"{self.short}: {found} (loss {failure.loss:.4g}, gradient norm "
            f"{failure.gradient_norm:.4g}, learning rate {failure.learning_rate:.4g}){likely}; "
            f"{kept}"
        )


def suggest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Returns the names closest to `name`, best first, for an error message.

    Args:
        name: what was given.
        names: what there is.
        count: at most so many.

    Returns:
        The names that are similar to `name`; an empty list when none is.

    Example:

    >>> suggest("momentun", ["momentum", "nesterov"])
    ['momentum']
    """
    scored = []
    for candidate in names:
        matcher = difflib.SequenceMatcher(None, name.lower(), candidate.lower(), autojunk=False)
        scored.append((matcher.ratio(), candidate))
    best = max(scored, default=(0.0, ""))[0]
    # Near in themselves, and not far behind the best: dotted keys are all somewhat alike.
    close = [pair for pair in scored if pair[0] >= max(0.6, best - 0.15)]
    return [name for _, name in sorted(close, key=lambda pair: -pair[0])[:count]]
