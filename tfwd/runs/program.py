"""What a program gives to `tfwd.runs`: its configuration, its data, its model and its trainer.

A program subclasses `Program`. The rest (the folder, checkpoints, going on after a stop, the log,
the display, the best weights, sweeps) is the same for all programs.
"""

from __future__ import annotations

import abc
import os
from typing import TYPE_CHECKING, Any

import ml_collections

from tfwd.runs.interfaces import Data, Score
from tfwd.runs.settings.config import Schema

if TYPE_CHECKING:
    from tfwd.runs.storage.folder import RunFolder
    from tfwd.runs.training.display import Display
    from tfwd.runs.training.signals import StopRequest
    from tfwd.runs.training.trainer import Trainer


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
