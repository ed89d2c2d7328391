"""Reads a trained model from its run folder. Does not change the folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from tfwd.runs.errors import UserError
from tfwd.runs.program_base import Program
from tfwd.runs.storage.run_folder import RunFolder

CHECKPOINTS = ("best", "last")


class TrainedModel(NamedTuple):
    """Trained model with its vocabulary, configuration and progress.

    Attributes:
        model: the model with the weights of the checkpoint.
        vocabulary: the model's vocabulary.
        config: the run's configuration.
        progress: dict. The run's progress at the checkpoint, as in `state.Progress`.
    """

    model: Any
    vocabulary: Any
    config: ml_collections.ConfigDict
    progress: dict[str, Any]


def load(
    program: Program,
    workdir: str | os.PathLike[str],
    checkpoint: str = "best",
    say: Callable[[str], object] = lambda line: print(line, file=sys.stderr),
) -> TrainedModel:
    """Reads a model with its vocabulary and configuration.

    Args:
        program: the program of the run.
        workdir: path of the run folder.
        checkpoint: "best" reads the weights with the lowest validation loss. "last" reads the
            newest weights.
        say: called with a line for a damaged checkpoint. The previous checkpoint is used instead.

    Returns:
        The trained model, as `TrainedModel`.

    Raises:
        UserError: there is no run, or no complete checkpoint, or the checkpoint has another
            vocabulary or shape, or weights that are not finite.
    """
    if checkpoint not in CHECKPOINTS:
        raise UserError(f"--checkpoint={checkpoint}: give {' or '.join(CHECKPOINTS)}")
    folder = RunFolder(workdir, program)
    if not folder.config.exists():
        raise UserError(
            f"there is no run in {folder.path}: it has no {folder.config.name}; give the --workdir "
            "of a run"
        )
    config = program.schema.load(folder.config, to_train=False)
    vocabulary = program.load_vocabulary(folder.vocabulary, config)
    model = program.make_model(config, vocabulary)
    if checkpoint == "best":
        progress = folder.restore_best(model, say=say)
    else:
        progress = folder.checkpoints.restore({"model": model}, say=say)
    if progress is None:
        other = "; try --checkpoint=last" if checkpoint == "best" else ""
        raise UserError(f"the run in {folder.path} has no {checkpoint} checkpoint yet{other}")
    if progress.get("vocabulary") not in (None, "", vocabulary.fingerprint()):
        raise UserError(
            f"{folder.vocabulary} is not the vocabulary that the {checkpoint} checkpoint was "
            "trained with, although it has the same size; restore the right file"
        )
    for name, variable in program.named_weights(model).items():
        if not np.isfinite(np.asarray(variable.numpy(), np.float32)).all():
            raise UserError(
                f"the {checkpoint} checkpoint of step {progress['step']} in {folder.path} has "
                f"weights that are not finite, in {name}: it cannot be used; train the model again"
            )
    return TrainedModel(model, vocabulary, config, progress)
