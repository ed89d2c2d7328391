"""Interfaces and records that the folder, the loop and the program of a run share.

The modules of `tfwd.runs` import these in place of each other, so that imports run one way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ml_collections

from tfwd.runs.settings.config import Schema

if TYPE_CHECKING:
    from tfwd.numerics.report import Report
    from tfwd.optimizers import NonMonotonicASGD


class Score(NamedTuple):
    """The number that a loss is shown as, in tables, logs and plots.

    Attributes:
        name: as in "valid perplexity".
        of_loss: a function that rises with the loss, so that lower is better.
        unit: what a loss is the mean over, and what a speed counts.
    """

    name: str
    of_loss: Callable[[float], float]
    unit: str


class Vocabulary(Protocol):
    """What makes numbers of the data; a run keeps it in its folder and goes on with no other."""

    def __len__(self) -> int: ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file."""

    def fingerprint(self) -> str:
        """A short hash of it."""


class Data(Protocol):
    """What a run trains on.

    Attributes:
        name: what reports call it.
        vocabulary: of its training part.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Any: ...

    @property
    def size(self) -> str:
        """How much there is to train on, in words."""

    def fingerprint(self) -> str:
        """A short hash of it: a run goes on with the data that it began with."""


class Failure(NamedTuple):
    """A step that was not finite, or left a weight that is not.

    Attributes:
        step: its number, from 1.
        loss, gradient_norm, learning_rate: the step's.
        weight: which weight, as "weight lstm/kernel", if that is what is known.
        found: what is the matter with it.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    weight: str = ""
    found: str = ""


class Step(Protocol):
    """A training step of a program.

    Attributes:
        optimizer: what it updates with.
        averaging: the optimizer's `NonMonotonicASGD`, or `None`.
        unused: the paths of the weights that no gradient reaches; known once it is traced.
    """

    optimizer: Any
    averaging: NonMonotonicASGD | None
    unused: list[str]

    def __call__(self, *batch: Any) -> None:
        """Makes the step, unless a number in it is not finite: then, and from then on, nothing."""

    def trace(self) -> None:
        """Traces the step, which the first call does otherwise."""

    def failure(self) -> Failure | None:
        """The first step that was not finite, if there was one. Waits for the device."""

    def diagnose(self, *batch: Any) -> Report:
        """Looks closely at that step, on its batch, and changes nothing."""

    def go_on(self) -> None:
        """Makes steps again, as if that one had been made."""


class Loss(Protocol):
    """What an evaluation found."""

    @property
    def nats(self) -> float:
        """The mean loss."""


class StoredProgram(Protocol):
    """Parts of a program that its run folder uses; `program.Program` has them."""

    schema: Schema
    vocabulary_file: str
    model_name: str
    entries: str

    def load_vocabulary(
        self, path: str | os.PathLike[str], config: ml_collections.ConfigDict | None = None
    ) -> Any:
        """Reads the file that `Vocabulary.save` wrote."""

    def named_weights(self, model: Any) -> dict[str, Any]:
        """Returns the model's variables, by names that are the same in Keras 2 and Keras 3."""
