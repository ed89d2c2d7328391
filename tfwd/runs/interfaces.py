"""Interfaces and records that a run's folder, loop and program share.

The modules of `tfwd.runs` import these instead of each other, so that imports run one way.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ml_collections

from tfwd.runs.settings.config import Schema

if TYPE_CHECKING:
    from tfwd.numerics.bad_step_report import Report
    from tfwd.optimizers import NonMonotonicASGD
    from tfwd.runs.workers.worker_group import Workers


class Score(NamedTuple):
    """Name, scale and unit in which tables, logs and plots show a loss.

    Attributes:
        name: str. The name, such as "perplexity" in "valid perplexity".
        of_loss: function that converts a loss to the shown number. The number rises with the loss,
            so lower is better.
        unit: str. The unit of a mean loss and of a speed, such as "token" or "text".
    """

    name: str
    of_loss: Callable[[float], float]
    unit: str


class Vocabulary(Protocol):
    """Conversion of a program's data to numbers. The run folder stores it."""

    def __len__(self) -> int: ...

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the vocabulary to a file."""

    def fingerprint(self) -> str:
        """Returns a short hash of the vocabulary."""


class Data(Protocol):
    """Data that a run trains on.

    Attributes:
        name: str. The name in reports.
        vocabulary: `Vocabulary`. The vocabulary of the training part.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Any: ...

    @property
    def size(self) -> str:
        """Returns the amount of training data as text, such as "1,000 tokens"."""

    def fingerprint(self) -> str:
        """Returns a short hash of the data. A run resumes only with the same data."""


class Failure(NamedTuple):
    """Record of a step that was not finite, or that made a weight not finite.

    Attributes:
        step: int. The step's number, from 1.
        loss, gradient_norm, learning_rate: float. The numbers of the step.
        weight: str. The weight that is not finite, such as "weight lstm/kernel"; "" if the step is
            not finite.
        found: str. The problem of the weight.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    weight: str = ""
    found: str = ""


class Step(Protocol):
    """Training step of a program.

    Attributes:
        optimizer: the optimizer that makes the updates.
        averaging: the optimizer's `NonMonotonicASGD`, or `None`.
        unused: list of str. Paths of the weights that no gradient reaches, known after tracing.
        workers: the `Workers` that divide each batch. The step sums their gradients and votes.
    """

    workers: Workers
    optimizer: Any
    averaging: NonMonotonicASGD | None
    unused: list[str]

    def __call__(self, *batch: Any, update: bool = True) -> None:
        """Makes the step if it is finite. After a step that is not finite, makes no more steps.

        Args:
            *batch: the batch.
            update: bool. False only accumulates the gradient. The trainer passes `update` only if
                `optimizer.steps_per_update` is above 1.
        """

    def trace(self) -> None:
        """Traces the step. Without this call, the first step traces."""

    def failure(self) -> Failure | None:
        """Returns the first step that was not finite, or `None`. Waits for the device."""

    def diagnose(self, *batch: Any) -> Report:
        """Examines the failed step on its batch. Changes no state of the run."""

    def resume_after_failure(self) -> None:
        """Enables the next steps. The failed step counts as made."""


class EvaluationResult(Protocol):
    """Result of an evaluation."""

    @property
    def nats(self) -> float:
        """Returns the mean loss."""


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
