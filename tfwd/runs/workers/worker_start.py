"""Runs a program's work in this process, or in the processes of several workers."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from tfwd.runs.errors import UserError
from tfwd.runs.workers import connection, local_workers
from tfwd.runs.workers.worker_addresses import find_cluster

if TYPE_CHECKING:
    from tfwd.runs.workers.worker_group import Workers


def run_with_workers(
    values: flags.FlagValues, command: str, work: Callable[[Workers], int], resume: str
) -> int:
    """Runs `work` in this process, or in the processes that `--workers` asks for.

    Args:
        values: the parsed flags.
        command: str. The console script, such as "tfwd-train".
        work: function of the `Workers` that returns an exit code. It imports TensorFlow.
        resume: str. The hint to print if a worker is lost.

    Raises:
        UserError: the workers' addresses are wrong, or flags contradict each other.
    """
    for name in ("start_timeout", "heartbeat_timeout"):
        if not math.isfinite(getattr(values, name)):
            raise UserError(f"--{name}={getattr(values, name)}: give a number of seconds")
    strategy = values.strategy
    if local_workers.is_started_here():
        local_workers.end_with_parent()
        strategy = "auto"
    else:
        gpus = _gpus() if strategy == "mirrored" else []
        count = _processes(values, gpus)
        if count > 1:
            return local_workers.run(command, sys.argv[1:], count, gpus)
    # With a single GPU, a single process trains.
    cluster = None if strategy == "mirrored" else find_cluster(strategy)
    from tfwd.runs.workers.worker_group import Workers

    if cluster is None:
        return work(Workers())
    workers = Workers(connection.connect(cluster, values.start_timeout, values.heartbeat_timeout))
    with connection.ends_if_lost(resume):
        code = work(workers)
        workers.wait()
        return code


def _processes(values: flags.FlagValues, gpus: list[str]) -> int:
    if values.strategy == "mirrored":
        if values.workers not in (1, len(gpus)):
            raise UserError(
                f"--workers={values.workers} with --strategy=mirrored: this machine has "
                f"{len(gpus)} GPUs, and each GPU gets a worker; leave --workers out"
            )
        return len(gpus)
    if values.workers > 1 and values.strategy != "auto":
        raise UserError(
            f"--workers={values.workers} with --strategy={values.strategy}: --workers starts the "
            "processes of this machine itself; leave --strategy out"
        )
    if values.workers > 1 and find_cluster("auto") is not None:
        raise UserError(
            f"--workers={values.workers}: TF_CONFIG already names the workers; leave --workers out"
        )
    return values.workers


def _gpus() -> list[str]:
    """Returns the GPUs that TensorFlow can use, as `CUDA_VISIBLE_DEVICES` names them."""
    import tensorflow as tf

    count = len(tf.config.list_physical_devices("GPU"))
    if not count:
        raise UserError(
            "--strategy=mirrored: TensorFlow finds no GPU on this machine; start processes on the "
            "CPU with --workers=2"
        )
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return visible[:count] or [str(number) for number in range(count)]
