"""Fine-tuning as a program of `tfwd.runs`."""

from __future__ import annotations

import os
from typing import Any

import ml_collections

from tfwd.finetune.config import SCHEMA
from tfwd.finetune.data.corpus import Corpus, read_corpus
from tfwd.finetune.data.vocabulary import Vocabulary
from tfwd.finetune.scores import LOSS
from tfwd.runs.program_base import Program
from tfwd.runs.storage.run_folder import RunFolder
from tfwd.runs.storage.trained_model import TrainedModel
from tfwd.runs.storage.trained_model import load as load_saved
from tfwd.runs.training.display import Display
from tfwd.runs.training.stop_signals import StopRequest
from tfwd.runs.training.trainer import Trainer
from tfwd.runs.workers.worker_group import Workers

# The methods import slow modules, which `--help` does not need.


class FineTuningProgram(Program):
    """Runs of a classifier: `tfwd-finetune`, and the trials of `tfwd-tune --program=finetune`."""

    command = "tfwd-finetune"
    config_module = "tfwd.finetune.config"
    schema = SCHEMA
    score = LOSS
    data_keys = (
        "data.path",
        "data.text",
        "data.label",
        "data.train_examples",
        "data.valid_share",
        "data.max_length",
        "model.pretrained",
    )
    vocabulary_file = "classes.json"
    model_name = "text classifier"
    entries = "classes"
    counted = "{:,} classes"

    def read_data(self, config: ml_collections.ConfigDict) -> Corpus:
        return read_corpus(config)

    def load_vocabulary(
        self, path: str | os.PathLike[str], config: ml_collections.ConfigDict | None = None
    ) -> Vocabulary:
        return Vocabulary.load(path)

    def make_model(self, config: ml_collections.ConfigDict, vocabulary: Vocabulary) -> Any:
        from tfwd.finetune.model import make_model

        return make_model(config, vocabulary)

    def named_weights(self, model: Any) -> dict[str, Any]:
        from tfwd.finetune.model import named_weights

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
        from tfwd.finetune.trainer import Trainer

        return Trainer(config, data, folder, display, stop, workers)

    def finish(self, trainer: Any, data: Corpus) -> dict[str, Any]:
        from tfwd.finetune.final_report import write_report

        return write_report(trainer, data)

    def tables(self, summary: dict[str, Any]) -> list[Any]:
        from tfwd.finetune.final_report import facts, table

        return [table(summary), facts(summary)]

    def show(self, summary: dict[str, Any], folder: RunFolder, display: Display) -> None:
        from tfwd.finetune.final_report import show

        show(summary, folder, display)


PROGRAM = FineTuningProgram()


def load(workdir: str | os.PathLike[str], checkpoint: str = "best") -> TrainedModel:
    """Reads a trained classifier; see `tfwd.runs.storage.trained_model.load`."""
    return load_saved(PROGRAM, workdir, checkpoint)
