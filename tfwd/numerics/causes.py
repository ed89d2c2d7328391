"""Likely causes of a step that is not finite, told by what was found. See `docs/non_finite.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tfwd.numerics import (
    computed_causes,
    division_causes,
    given_causes,
    loss_causes,
    overflow_causes,
    recurrent_causes,
    softmax_causes,
)
from tfwd.numerics.evidence import Evidence
from tfwd.numerics.report import Cause

Rule = Callable[[Evidence], Iterator[Cause]]

STATE, BLOW_UP = "a state that grows from step to step", "gradients that blow up"

GIVEN: list[Rule] = [
    given_causes.data,
    given_causes.weights,
    given_causes.arguments,
    given_causes.labels,
]
COMPUTED: list[Rule] = [
    recurrent_causes.over_time,
    softmax_causes.all_masked,
    division_causes.nothing_left,
    computed_causes.normalization,
    overflow_causes.half_precision,
    overflow_causes.blow_up,
    loss_causes.added,
    loss_causes.loss,
    computed_causes.backward,
    computed_causes.update,
]


def likely(evidence: Evidence) -> list[Cause]:
    """The causes that fit, the best supported first."""
    if all(one.is_finite for one in evidence.found):
        return []
    # What is wrong before the model computes anything explains the rest, as does a learning rate
    # where all else is finite.
    for rules in (GIVEN, [given_causes.learning_rate]):
        found = [cause for rule in rules for cause in rule(evidence)]
        alone = rules is GIVEN or evidence.first.frame.kind == "learning rate"
        if found and alone:
            return found
    causes = [cause for rule in COMPUTED for cause in rule(evidence)]
    if not evidence.is_first and any(cause.name == STATE for cause in causes):
        # The weights were trained until the state grew: a lower rate or clipping comes first.
        causes.sort(key=lambda cause: cause.name != BLOW_UP)
    causes += given_causes.learning_rate(evidence)
    return causes or list(computed_causes.domain(evidence))
