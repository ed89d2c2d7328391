"""Writes TensorBoard's HParams tab: the space once, and the values and result of each run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorboard.plugins.hparams import api
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.summary import session_end_pb

from tfwd.runs.errors import as_user_error
from tfwd.runs.interfaces import Score
from tfwd.runs.settings.validators import shown
from tfwd.runs.sweeps.trial_run import Result
from tfwd.tuning.search_space import Choice, Float, Spec

EPOCHS = "sweep/epochs"


def write_space(folder: Path, space: Mapping[str, Spec], score: Score) -> None:
    """Writes the space and the metrics. TensorBoard needs them once per sweep folder."""
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    metrics = [
        api.Metric(_tag(score), display_name=f"best validation {score.name}"),
        api.Metric(EPOCHS, display_name="epochs"),
    ]
    with tf.summary.create_file_writer(str(folder)).as_default():
        api.hparams_config([api.HParam(key, _domain(spec)) for key, spec in space.items()], metrics)


def write(
    folder: Path, trial_id: str, values: Mapping[str, Any], result: Result | None, score: Score
) -> None:
    """Writes the values and the result of a run; the result is None for a failed run.

    Raises:
        UserError: the file cannot be written.
    """
    with as_user_error(f"cannot write {folder}", OSError, tf.errors.OpError):
        _write(folder, trial_id, values, result, score)


def _write(
    folder: Path, trial_id: str, values: Mapping[str, Any], result: Result | None, score: Score
) -> None:
    writer = tf.summary.create_file_writer(str(folder), filename_suffix=".hparams")
    with writer.as_default():
        api.hparams({key: _plain(value) for key, value in values.items()}, trial_id=trial_id)
        if result is not None:
            tf.summary.scalar(_tag(score), score.of_loss(result.loss), step=result.epochs)
            tf.summary.scalar(EPOCHS, result.epochs, step=result.epochs)
        status = Status.Value("STATUS_SUCCESS" if result else "STATUS_FAILURE")
        end = session_end_pb(status).SerializeToString()
        tf.summary.experimental.write_raw_pb(end, step=0)
    writer.close()


def _tag(score: Score) -> str:
    return f"sweep/valid_{score.name}"


def _domain(spec: Spec) -> Any:
    if isinstance(spec, Choice):
        values = [_plain(value) for value in spec.values]
        if len({type(value) for value in values}) > 1:  # TensorBoard takes values of one type only
            values = [shown(value) for value in values]
        return api.Discrete(values)
    if isinstance(spec, Float):
        if spec.values is not None:
            return api.Discrete(list(spec.values))
        return api.RealInterval(float(spec.low), float(spec.high))
    return api.IntInterval(spec.low, spec.high)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else shown(value)
