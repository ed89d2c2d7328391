"""Facts about the loss of one output, and what the rules find about it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from tfwd.numerics.causes.evidence import Evidence
from tfwd.numerics.causes.loss_rows import bad_rows, is_nan
from tfwd.numerics.causes.losses_by_output import keras_name
from tfwd.numerics.causes.losses_of_other_numbers import is_finite_for_small_labels
from tfwd.numerics.tensor_measurements import Measurement


class Loss:
    """Facts about the loss of one output.

    Attributes:
        evidence: The evidence, with one output.
        bad: Booleans along the batch, from `bad_rows`.
        is_own: bool. True if the training step computes the loss without `compute_loss`.
        is_nan: bool. False for an infinite loss.
        of_keras: str. Name of Keras's loss; "" for another function.
        squares: bool. True if the name says that the loss squares its inputs, or is linear.
        is_entropy: bool. True if the name says that the loss is a cross-entropy.
        is_logits: bool. True if the name says that the loss takes logits.
    """

    def __init__(self, evidence: Evidence):
        self.evidence = evidence
        self.bad = bad_rows(evidence)
        self.is_own = not evidence.predictions
        self.is_nan = is_nan(evidence)
        self.of_keras = keras_name(evidence)
        named = f"{evidence.loss} {self.of_keras}".lower()
        self.squares = any(word in named for word in ("squared", "absolute", "huber", "cosh"))
        self.is_entropy = "crossentropy" in named
        self.is_logits = "logits" in named

    @functools.cached_property
    def labels_are_too_large(self) -> bool:
        """Returns True if the loss is finite for small labels."""
        return is_finite_for_small_labels(self.evidence)

    @functools.cached_property
    def inputs(self) -> Sequence[Measurement]:
        """Returns the predictions. For a custom training step: all calls of the last layer."""
        if not self.is_own:
            return self.evidence.predictions
        outputs = self.evidence.outputs_before
        return [one for one in outputs if one.frame.name == outputs[-1].frame.name]


@dataclasses.dataclass
class Findings:
    """Signs and advice about a loss.

    Attributes:
        signs: list of str. Unusual properties, one phrase each.
        advice: list of str. Phrases.
        by: str. What explains the loss completely: "exponential", "numbers", "rows" or "labels".
            Default "", for no such explanation.
        reaches_ends: bool. True if an input of the loss is exactly 0 or 1.
        labels_are_large: bool. True if the square of a label is infinite.
    """

    signs: list[str] = dataclasses.field(default_factory=list)
    advice: list[str] = dataclasses.field(default_factory=list)
    by: str = ""
    reaches_ends: bool = False
    labels_are_large: bool = False
