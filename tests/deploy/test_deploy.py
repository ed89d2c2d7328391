"""The files in `deploy/`: the shell in them runs with programs in place of the cluster's own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from setuptools import find_packages
from stack_marks import once

pytestmark = once

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"

# Shows TF_CONFIG and the arguments of a worker, and ends with the code of its index.
PROGRAM = """#!/bin/sh
printf '%s\\t%s\\t' "$TF_CONFIG" "$0" >> "$SHOWN"
printf '[%s]' "$@" >> "$SHOWN"; echo >> "$SHOWN"
index=${TF_CONFIG##*index\\": }; index=${index%%\\}*}
set -- $CODES
[ $# -gt "$index" ] || exit 0
shift "$index"; exit "$1"
"""
# Starts as many tasks as there are hosts, and ends with the largest of their codes.
SRUN = """#!/bin/sh
echo "$1" > "$OPTIONS"; shift
worst=0; SLURM_PROCID=0
for host in $HOSTS; do
  export SLURM_PROCID
  "$@"; code=$?
  [ $code -le $worst ] || worst=$code
  SLURM_PROCID=$((SLURM_PROCID + 1))
done
exit $worst
"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") [ "$3" = "node[1-3]" ] && for host in $HOSTS; do echo "$host"; done;;
  *) echo "$*" >> "$REQUEUED";;
esac
"""


@pytest.fixture
def documents() -> dict[str, Any]:
    """Returns the objects of the manifest for Kubernetes, by their kinds."""
    text = (DEPLOY / "kubernetes.yaml").read_text("utf-8")
    return {each["kind"]: each for each in yaml.safe_load_all(text)}


@pytest.fixture
def commands(tmp_path: Path) -> dict[str, str]:
    """Returns an environment in which the commands of a cluster are the ones of this file."""
    folder = tmp_path / "bin"
    folder.mkdir()
    contents = {"tfwd-train": PROGRAM, "tfwd-finetune": PROGRAM, "srun": SRUN}
    for name, content in {**contents, "scontrol": SCONTROL}.items():
        (folder / name).write_text(content, encoding="utf-8")
        (folder / name).chmod(0o755)
    paths = {name: str(tmp_path / name.lower()) for name in ("SHOWN", "OPTIONS", "REQUEUED")}
    return {"PATH": f"{folder}:{os.environ['PATH']}", "CODES": "", **paths}


def shown(commands: dict[str, str]) -> list[tuple[Any, str, str]]:
    """Returns TF_CONFIG, the program and the arguments of each worker that ran."""
    lines = Path(commands["SHOWN"]).read_text("utf-8").splitlines()
    parts = [line.split("\t") for line in lines]
    return [(json.loads(config), Path(name).name, rest) for config, name, rest in parts]


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def config(addresses: list[str], index: int) -> dict[str, Any]:
    return {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}


def test_the_parts_of_the_manifest_name_each_other(documents: dict[str, Any]) -> None:
    job, service = documents["Job"], documents["Service"]
    claim = documents["PersistentVolumeClaim"]
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert spec["completionMode"] == "Indexed"
    workers = {each["name"]: each["value"] for each in container["env"]}["WORKERS"]
    assert spec["completions"] == spec["parallelism"] == int(workers)
    assert [each["port"] for each in service["spec"]["ports"]] == [
        each["containerPort"] for each in container["ports"]
    ]
    (volume,), (mount,) = pod["volumes"], container["volumeMounts"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mount["name"] == volume["name"]
    (workdir,) = [each for each in container["args"] if each.startswith("--workdir=")]
    assert workdir.partition("=")[2].startswith(f"{mount['mountPath']}/")


def test_a_lost_worker_restarts_and_does_not_count(documents: dict[str, Any]) -> None:
    spec = documents["Job"]["spec"]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    codes, disruption = spec["podFailurePolicy"]["rules"]
    assert codes["action"] == disruption["action"] == "Ignore"
    assert codes["onExitCodes"]["operator"] == "In" and codes["onExitCodes"]["values"] == [75]
    (container,) = spec["template"]["spec"]["containers"]
    assert codes["onExitCodes"]["containerName"] == container["name"]
    assert disruption["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


@pytest.mark.parametrize("index", range(3))
def test_the_shell_of_the_manifest(
    index: int, documents: dict[str, Any], commands: dict[str, str]
) -> None:
    job, service = (documents[kind]["metadata"]["name"] for kind in ("Job", "Service"))
    (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
    variables = {"WORKERS": "3", "JOB_COMPLETION_INDEX": str(index), "CODES": "0 0 75"}
    arguments = [*container["args"], "--config.data.path=a b"]
    done = run([*container["command"], *arguments], {**commands, **variables})
    assert done.returncode == (75 if index == 2 else 0), done.stderr
    (port,) = [each["port"] for each in documents["Service"]["spec"]["ports"]]
    addresses = [f"{job}-{number}.{service}:{port}" for number in range(3)]
    expected = "".join(f"[{argument}]" for argument in arguments)
    assert shown(commands) == [(config(addresses, index), "tfwd-train", expected)]


def slurm(
    commands: dict[str, str], *arguments: str, **variables: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Runs the script for Slurm. Returns its end, and the commands of scontrol that requeue."""
    environment = {
        **{**commands, "SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node[1-3]"},
        **{"HOSTS": "node1 node2 node3", **variables},
    }
    done = run(["bash", str(DEPLOY / "slurm.sh"), *arguments], environment)
    requeued = Path(commands["REQUEUED"])
    return done, requeued.read_text("utf-8").splitlines() if requeued.exists() else []


def test_the_script_for_slurm_starts_the_workers(commands: dict[str, str]) -> None:
    done, requeued = slurm(commands, "--config=quickstart", "--workdir=a b")
    assert (done.returncode, requeued) == (0, []), done.stderr
    addresses = ["node1:23456", "node2:23457", "node3:23458"]
    assert shown(commands) == [
        (config(addresses, index), "tfwd-train", "[--config=quickstart][--workdir=a b]")
        for index in range(3)
    ]
    assert Path(commands["OPTIONS"]).read_text("utf-8") == "--kill-on-bad-exit=1\n"


def test_the_script_for_slurm_runs_another_program(commands: dict[str, str]) -> None:
    slurm(commands, TFWD_PROGRAM="tfwd-finetune")
    assert {name for _, name, _ in shown(commands)} == {"tfwd-finetune"}


@pytest.mark.parametrize(
    ("codes", "restarts", "is_requeued"),
    [
        ("75 0 0", None, True),
        ("75 137 75", "3", True),
        ("75 137 75", "20", False),
        ("1 1 1", None, False),
        ("0 0 0", "3", False),
    ],
)
def test_the_script_for_slurm_requeues_after_a_lost_worker(
    codes: str, restarts: str | None, is_requeued: bool, commands: dict[str, str]
) -> None:
    variables = {} if restarts is None else {"SLURM_RESTART_COUNT": restarts}
    done, requeued = slurm(commands, CODES=codes, **variables)
    assert done.returncode == max(map(int, codes.split())), done.stderr
    assert requeued == (["requeue 123456"] if is_requeued else [])


def test_the_options_of_slurm_come_before_any_command() -> None:
    lines = (DEPLOY / "slurm.sh").read_text("utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line and line[0] != "#")
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert options == [line for line in lines[:first] if line.startswith("#SBATCH ")]
    assert "#SBATCH --requeue" in options and "#SBATCH --ntasks-per-node=1" in options
    assert run(["bash", "-n", str(DEPLOY / "slurm.sh")], dict(os.environ)).returncode == 0


def test_the_image_has_all_sources_of_the_installation() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    assert {name.partition(".")[0] for name in find_packages(str(ROOT), include=["tfwd*"])} <= kept
    assert {"configs", "layers", "optimizers"} <= kept  # setup.py installs them inside tfwd
    assert {"setup.py", "pyproject.toml", "tfwd_programs.py", "README.md"} <= kept


def test_the_image_has_the_programs_of_the_manifest(documents: dict[str, Any]) -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    pod = documents["Job"]["spec"]["template"]["spec"]
    assert f"USER {pod['securityContext']['runAsUser']}" in text.splitlines()
    (container,) = pod["containers"]
    name = container["image"].partition(":")[0]
    (built,) = [line for line in text.splitlines() if "docker build" in line]
    assert shlex.split(built.lstrip("# "))[:-1] == [
        *("docker", "build", "-f", "deploy/Dockerfile", "-t", name)
    ]
