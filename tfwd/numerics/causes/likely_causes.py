"""Finds the likely causes of a step that is not finite. See `docs/non_finite.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tfwd.numerics.bad_step_report import Cause
from tfwd.numerics.causes import (
    accumulated_gradients,
    division,
    layers,
    losses,
    overflow,
    recurrent,
    softmax,
    squared_gradients,
    step_inputs,
    updates,
)
from tfwd.numerics.causes.evidence import Evidence

Rule = Callable[[Evidence], Iterator[Cause]]

STATE, EXPLODING = "a state that grows from step to step", "exploding gradients"

GIVEN: list[Rule] = [
    step_inputs.data,
    step_inputs.inputs_of_first_layer,
    step_inputs.empty,
    step_inputs.weights,
    step_inputs.arguments,
    step_inputs.labels,
]
COMPUTED: list[Rule] = [
    recurrent.growing_state,
    softmax.all_masked,
    division.zero_by_zero,
    layers.normalization,
    overflow.half_precision,
    overflow.exploding_gradients,
    losses.added,
    losses.loss_function,
    layers.backward,
    accumulated_gradients.accumulated_gradients,
    squared_gradients.squared_gradients,
    updates.update,
]


def likely_causes(evidence: Evidence) -> list[Cause]:
    """Returns the causes that fit the evidence, the best supported first."""
    if all(one.is_finite for one in evidence.found):
        return []
    # A problem before the model computes anything explains the rest. A learning rate explains the
    # rest if everything else is finite.
    for rules in (GIVEN, [step_inputs.learning_rate]):
        found = [cause for rule in rules for cause in rule(evidence)]
        alone = rules is GIVEN or evidence.first.frame.kind == "learning rate"
        if found and alone:
            return found
    causes = [cause for rule in COMPUTED for cause in rule(evidence)]
    if not evidence.is_first and any(cause.name == STATE for cause in causes):
        # Training changed the weights until the state grew. Advice on gradients comes first.
        causes.sort(key=lambda cause: cause.name != EXPLODING)
    causes += step_inputs.learning_rate(evidence)
    return causes or list(layers.domain(evidence))
