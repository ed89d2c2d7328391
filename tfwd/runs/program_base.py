"""Base class of the programs: configuration, data, model and trainer of a run.

A program subclasses `Program`. All programs share the rest: folder, checkpoints, resuming, logs,
display, best weights and sweeps.
"""

from __future__ import annotations

import abc
import os
from typing import TYPE_CHECKING, Any

import ml_collections

from tfwd.runs.interfaces import Data, Score
from tfwd.runs.settings.config import Schema

if TYPE_CHECKING:
    from tfwd.runs.storage.run_folder import RunFolder
    from tfwd.runs.training.display import Display
    from tfwd.runs.training.stop_signals import StopRequest
    from tfwd.runs.training.trainer import Trainer
    from tfwd.runs.workers.worker_group import Workers


class Program(abc.ABC):
    """Base class of a training program, such as a language model or a classifier.

    Attributes:
        command: str. The console script that trains, for messages and files.
        config_module: str. The module with `default_config`, which config files import.
        schema: `Schema` of the configuration. It has `seed`, and the keys of
            `tfwd.runs.settings.config_keys`.
        score: `Score`. How losses are shown.
        data_keys: the config keys that `read_data` depends on.
        vocabulary_file: str. The name of the vocabulary's file in a run folder.
        model_name: str. The model's name in messages and weight files, such as "language model".
        entries: str. The plural noun for a vocabulary's entries, for messages.
        counted: str. The text for the size of a vocabulary, with a placeholder for the number.
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
            UserError: the data is missing or cannot be read.
        """

    @abc.abstractmethod
    def load_vocabulary(
        self, path: str | os.PathLike[str], config: ml_collections.ConfigDict | None = None
    ) -> Any:
        """Reads the file that `Vocabulary.save` wrote.

        Args:
            path: the file.
            config: the run's configuration. If given, the vocabulary must agree with it.

        Raises:
            UserError: the file is missing, damaged, or from another run.
        """

    @abc.abstractmethod
    def make_model(self, config: ml_collections.ConfigDict, vocabulary: Any) -> Any:
        """Returns a new model with initial weights, for the vocabulary of `Data.vocabulary`."""

    @abc.abstractmethod
    def named_weights(self, model: Any) -> dict[str, Any]:
        """Returns the model's variables, by names that are the same in Keras 2 and Keras 3."""

    @abc.abstractmethod
    def make_trainer(
        self,
        config: ml_collections.ConfigDict,
        data: Any,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        workers: Workers,
    ) -> Trainer:
        """Returns the trainer of a run. The trainer resumes from the folder's last checkpoint.

        Raises:
            UserError: the data does not fit the configuration, or the folder holds another run.
        """

    @abc.abstractmethod
    def finish(self, trainer: Any, data: Any) -> dict[str, Any]:
        """Evaluates the best weights, writes the report and returns the report's summary.

        `report/summary.json` is written last. It has "step", the total number of steps.
        """

    @abc.abstractmethod
    def tables(self, summary: dict[str, Any]) -> list[Any]:
        """Returns a summary as tables for rich. Raises an exception if the summary is malformed."""

    @abc.abstractmethod
    def show(self, summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
        """Prints the summary of a finished run, and the path of the rest of the report."""
