"""Flags of programs that can run on several workers."""

from __future__ import annotations

from absl import flags

from tfwd.runs.workers.worker_addresses import STRATEGIES


def define(values: flags.FlagValues) -> None:
    """Defines the flags."""
    flags.DEFINE_enum(
        "strategy",
        "auto",
        STRATEGIES,
        "one: a single process. mirrored: a process for each GPU of this machine. multi_worker: "
        "the workers of TF_CONFIG or of a Slurm step. auto: multi_worker if TF_CONFIG is set, "
        "otherwise one",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "workers",
        1,
        "number of processes to start on this machine; they train or evaluate one model",
        lower_bound=1,
        upper_bound=1024,
        flag_values=values,
    )
    flags.DEFINE_float(
        "start_timeout",
        300.0,
        "seconds to wait for all workers; their connection may take the same time again",
        lower_bound=1.0,
        upper_bound=86400.0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "heartbeat_timeout",
        60.0,
        "approximate seconds after which a silent worker counts as lost",
        lower_bound=5.0,
        upper_bound=86400.0,
        flag_values=values,
    )
