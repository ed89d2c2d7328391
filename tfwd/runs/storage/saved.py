"""Reads a trained model from the folder of its run; nothing in the folder is changed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from tfwd.runs.errors import UserError
from tfwd.runs.program import Program
from tfwd.runs.storage.folder import RunFolder

CHECKPOINTS = ("best", "last")


class Saved(NamedTuple):
    """What is in a run's folder.

    Attributes:
        model: with the checkpoint's weights.
        vocabulary: the model's.
        config: the run's.
        progress: where the run stood at the checkpoint, as `state.Progress` has it.
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
) -> Saved:
    """Reads a model with its vocabulary and configuration.

    Args:
        program: the one whose run it is.
        workdir: the run's folder.
        checkpoint: "best" is the weights with the lowest validation loss, "last" the newest.
        say: called with a line for a checkpoint that is damaged; the one before it is used.

    Returns:
        What was read.

    Raises:
        UserError: there is no run, no checkpoint yet, no checkpoint that is whole, or the
            checkpoint is of another vocabulary or shape, or has weights that are not finite.
    """
    if checkpoint not in CHECKPOINTS:
        raise UserError(f"--checkpoint={checkpoint}: give {' or '.join(CHECKPOINTS)}")
    folder = RunFolder(workdir, program)
    if not folder.config.exists():
        raise UserError(f"there is no run in {folder.path}: it has no {folder.config.name}")
    config = program.schema.load(folder.config, to_train=False)
    vocabulary = program.load_vocabulary(folder.vocabulary, config)
    model = program.make_model(config, vocabulary)
    if checkpoint == "best":
        progress = folder.restore_best(model, say=say)
    else:
        progress = folder.checkpoints.restore({"model": model}, say=say)
    if progress is None:
        other = "; --checkpoint=last may have one" if checkpoint == "best" else ""
        raise UserError(f"the run in {folder.path} has no {checkpoint} checkpoint yet{other}")
    if progress.get("vocabulary") not in (None, "", vocabulary.fingerprint()):
        raise UserError(
            f"{folder.vocabulary} is not the vocabulary that the {checkpoint} checkpoint was "
            "trained with, although it is as large; put the right file back"
        )
    for name, variable in program.named_weights(model).items():
        if not np.isfinite(np.asarray(variable.numpy(), np.float32)).all():
            raise UserError(
                f"the {checkpoint} checkpoint of step {progress['step']} in {folder.path} has "
                f"weights that are not finite, in {name}: it cannot be used; train it again"
            )
    return Saved(model, vocabulary, config, progress)
