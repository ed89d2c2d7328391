"""Addresses of the workers, from `TF_CONFIG` or from Slurm's variables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from tfwd.runs.errors import UserError

STRATEGIES = ("auto", "one", "mirrored", "multi_worker")
_ADDRESS = re.compile(r"([^/\s]+):(\d{1,5})")
_EXAMPLE = (
    'JSON such as {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", '
    '"index": 0}}'
)


class Cluster(NamedTuple):
    """Workers that train one model.

    Attributes:
        addresses: the workers' addresses, "host:port". The chief is the first.
        number: int. The number of this process among the addresses.
    """

    addresses: tuple[str, ...]
    number: int

    @property
    def tf_config(self) -> str:
        """Returns the value of `TF_CONFIG` for this process."""
        task = {"type": "worker", "index": self.number}
        return json.dumps({"cluster": {"worker": list(self.addresses)}, "task": task})


def find_cluster(strategy: str, environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Returns the cluster of this process, or `None` if the process trains alone.

    Args:
        strategy: str. "one" ignores the environment. "auto" reads `TF_CONFIG`. "multi_worker" reads
            `TF_CONFIG` or, without it, Slurm's variables.
        environment: the environment's variables.

    Raises:
        UserError: `TF_CONFIG` is malformed, or there are no workers.

    Example:
    >>> text = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> find_cluster("auto", {"TF_CONFIG": text})
    Cluster(addresses=('a:1', 'b:1'), number=1)
    """
    if strategy == "one":
        return None
    text = environment.get("TF_CONFIG", "").strip()
    if text:
        return _from_tf_config(text)
    if strategy == "auto":
        return None
    if "SLURM_STEP_ID" in environment or "SLURM_STEPID" in environment:
        return _from_slurm()
    raise UserError(
        "--strategy=multi_worker: the environment has neither TF_CONFIG nor the variables of a "
        "Slurm step; set TF_CONFIG, or start processes on this machine with --workers=2"
    )


def _from_tf_config(text: str) -> Cluster | None:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UserError(f"TF_CONFIG is not JSON ({error}): give {_EXAMPLE}") from error
    jobs = found.get("cluster") if isinstance(found, dict) else None
    if isinstance(found, dict) and not jobs:  # a machine that trains alone
        return None
    task = found.get("task") if isinstance(found, dict) else None
    if not isinstance(jobs, dict) or not isinstance(task, dict):
        raise UserError(f"TF_CONFIG has no cluster and task: give {_EXAMPLE}")
    other = sorted(set(jobs) - {"chief", "worker"})
    if other:
        raise UserError(
            f"TF_CONFIG has the job {other[0]!r}: tfwd has only the jobs worker and chief; remove "
            "the other jobs"
        )
    chiefs, workers = (_addresses(name, jobs.get(name, [])) for name in ("chief", "worker"))
    addresses = (*chiefs, *workers)
    twice = sorted({each for each in addresses if addresses.count(each) > 1})
    if twice:
        raise UserError(
            f"TF_CONFIG names the address {twice[0]} twice: give each worker its own address"
        )
    kind, index = task.get("type"), task.get("index")
    if kind not in ("chief", "worker"):
        raise UserError(f"TF_CONFIG has the task type {kind!r}: give worker or chief")
    tasks = chiefs if kind == "chief" else workers
    if isinstance(index, str):
        raise UserError(f"TF_CONFIG has the index {index!r}: give a number, without quotes")
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(tasks):
        valid = f"; give 0 to {len(tasks) - 1}" if tasks else ""
        raise UserError(
            f"TF_CONFIG gives this process the index {index!r} of the job {kind!r}, outside the "
            f"cluster: the job has {len(tasks)} addresses{valid}"
        )
    if len(addresses) == 1:
        return None
    return Cluster(addresses, index if kind == "chief" else len(chiefs) + index)


def _addresses(job: str, given: Any) -> tuple[str, ...]:
    if not isinstance(given, list):
        raise UserError(f"TF_CONFIG: the job {job!r} is not a list of addresses; give {_EXAMPLE}")
    for address in given:
        match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise UserError(f"TF_CONFIG: {address!r} is not an address; give host:port")
    return tuple(given)


def _from_slurm() -> Cluster | None:
    """Returns the cluster of a Slurm step, as TensorFlow's resolver finds it."""
    import tensorflow as tf

    try:
        # By default, the resolver looks for GPUs with nvidia-smi, and sets CUDA_VISIBLE_DEVICES.
        # Slurm does this itself (--gpus-per-task). The resolver also requires a GPU for each task
        # of a node.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=1024, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = tuple(resolver.cluster_spec().as_dict()["worker"])
        _, index = resolver.get_task_info()
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"--strategy=multi_worker: TensorFlow cannot read Slurm's variables ({reason}); start "
            "the program with srun, or set TF_CONFIG"
        ) from error
    return Cluster(addresses, int(index)) if len(addresses) > 1 else None
