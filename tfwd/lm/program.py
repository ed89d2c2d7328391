"""The language model as a program of `tfwd.runs`."""

from __future__ import annotations

import os
from typing import Any

import ml_collections

from tfwd.lm.config import SCHEMA
from tfwd.lm.data.corpus import Corpus, read_corpus
from tfwd.lm.data.vocabulary import Vocabulary
from tfwd.lm.losses import PERPLEXITY
from tfwd.runs.errors import UserError
from tfwd.runs.program_base import Program
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.storage.trained_model import TrainedModel
from tfwd.runs.storage.trained_model import load as load_saved
from tfwd.runs.training.display import Display
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.training.trainer import Trainer
from tfwd.runs.workers.worker_group import Workers

# The methods import slow modules, which `--help` does not need.


class LanguageModelProgram(Program):
    """Runs of the language model: `tfwd-train`, and the trials of `tfwd-tune`."""

    command = "tfwd-train"
    config_module = "tfwd.lm.config"
    schema = SCHEMA
    score = PERPLEXITY
    data_keys = ("data.path", "data.level", "data.min_count")
    vocabulary_file = "vocabulary.json"
    model_name = "language model"

    def read_data(self, config: ml_collections.ConfigDict) -> Corpus:
        return read_corpus(config.data)

    def load_vocabulary(
        self, path: str | os.PathLike[str], config: ml_collections.ConfigDict | None = None
    ) -> Vocabulary:
        vocabulary = Vocabulary.load(path)
        if config is not None and vocabulary.level != config.data.level:
            raise UserError(
                f"{path} belongs to another run: its level is {vocabulary.level}, and the run's "
                f"level is {config.data.level}"
            )
        return vocabulary

    def make_model(self, config: ml_collections.ConfigDict, vocabulary: Vocabulary) -> Any:
        from tfwd.lm.model import make_model

        return make_model(config, len(vocabulary))

    def named_weights(self, model: Any) -> dict[str, Any]:
        from tfwd.lm.model import named_weights

        return named_weights(model)

    def make_trainer(
        self,
        config: ml_collections.ConfigDict,
        data: Corpus,
        folder: RunFolder,
        display: Display,
        stop: StopRequest,
        workers: Workers,
    ) -> Trainer:
        from tfwd.lm.trainer import Trainer

        return Trainer(config, len(data.vocabulary), data.texts, folder, display, stop, workers)

    def finish(self, trainer: Any, data: Corpus) -> dict[str, Any]:
        from tfwd.lm.final_report import write_report

        return write_report(trainer, data)

    def tables(self, summary: dict[str, Any]) -> list[Any]:
        from tfwd.lm.final_report import facts, table

        return [table(summary), facts(summary)]

    def show(self, summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
        from tfwd.lm.final_report import show

        show(summary, folder, display)


PROGRAM = LanguageModelProgram()


def load(workdir: str | os.PathLike[str], checkpoint: str = "best") -> TrainedModel:
    """Reads a trained language model; see `tfwd.runs.storage.trained_model.load`."""
    return load_saved(PROGRAM, workdir, checkpoint)
