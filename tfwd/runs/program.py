"""What a program gives to `tfwd.runs`: its configuration, its data, its model and its trainer.

A program subclasses `Program`. The rest (the folder, checkpoints, going on after a stop, the log,
the display, the best weights, sweeps) is the same for all programs.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ml_collections

from tfwd.runs.settings.config import Schema

if TYPE_CHECKING:
    from tfwd.numerics.report import Report
    from tfwd.optimizers import NonMonotonicASGD
    from tfwd.runs.storage.folder import RunFolder
    from tfwd.runs.training.display import Display
    from tfwd.runs.training.signals import StopRequest
    from tfwd.runs.training.trainer import Trainer


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


class Program(abc.ABC):
    """A kind of training run.

    Attributes:
        command: the console script that trains, for messages and files.
        config_module: has `default_config`, with which a config file begins.
        schema: of the configuration. There are the keys of `tfwd.runs.settings.keys`, and `seed`.
        score: how losses are shown.
        data_keys: the config keys that `read_data` depends on.
        vocabulary_file: its name in a run's folder.
        model_name: what messages and files of weights call the model, as "language model".
        entries: what a vocabulary has, for messages.
        counted: how much is in a vocabulary, in words, with a place for the number.
    """

    command: str
    config_module: str
    schema: Schema
    score: Score
    data_keys: tuple[str, ...]
    vocabulary_file: str
    model_name: str
    entries: str = "tokens"
    counted: str = "vocabulary of {:,}"

    @abc.abstractmethod
    def read_data(self, config: ml_collections.ConfigDict) -> Data:
        """Reads the data that a configuration names.

        Raises:
            UserError: it is missing or cannot be read.
        """

    @abc.abstractmethod
    def load_vocabulary(
        self, path: str | os.PathLike[str], config: ml_collections.ConfigDict | None = None
    ) -> Any:
        """Reads what `Vocabulary.save` wrote.

        Args:
            path: the file.
            config: of the run, if the vocabulary is to be held against it.

        Raises:
            UserError: the file is missing, damaged, or of another run.
        """

    @abc.abstractmethod
    def make_model(self, config: ml_collections.ConfigDict, vocabulary: Any) -> Any:
        """A new model, with its weights made, for what `Data.vocabulary` is."""

    @abc.abstractmethod
    def named_weights(self, model: Any) -> dict[str, Any]:
        """The model's variables, by names that are the same on both Kerases."""

    @abc.abstractmethod
    def make_trainer(
        self,
        config: ml_collections.ConfigDict,
        data: Any,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
    ) -> Trainer:
        """The trainer of a run, which goes on with what the folder holds.

        Raises:
            UserError: the data does not fit the configuration, or the folder another run.
        """

    @abc.abstractmethod
    def finish(self, trainer: Any, data: Any) -> dict[str, Any]:
        """Evaluates the best weights and writes the report; returns its summary.

        The summary is written to `report/summary.json` last, and has "step", the steps in all.
        """

    @abc.abstractmethod
    def tables(self, summary: dict[str, Any]) -> list[Any]:
        """A summary as rich prints it. Any exception says that it is no summary."""

    @abc.abstractmethod
    def show(self, summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
        """Prints the summary of a finished run, and where the rest of the report is."""
