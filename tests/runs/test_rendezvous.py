"""The meeting of workers before TensorFlow starts, and the addresses in `TF_CONFIG`.

The workers are threads here. They have sockets of their own, as processes have.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from stack_marks import extended, once

from tfwd.runs.errors import UserError
from tfwd.runs.workers import rendezvous
from tfwd.runs.workers.local_workers import free_ports
from tfwd.runs.workers.worker_addresses import Cluster, find_cluster

pytestmark = once


def addresses(count: int) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{port}" for port in free_ports(count))


def meet(clusters: list[Cluster], seconds: float = 10.0) -> list[str]:
    """Lets workers meet, and returns what each raised, as "UserError: text"; "" for nothing."""
    found = [""] * len(clusters)

    def work(place: int) -> None:
        try:
            rendezvous.meet(clusters[place], seconds)
        except (UserError, rendezvous.WorkerMissing) as error:
            found[place] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=work, args=[n]) for n in range(len(clusters))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return found


@contextlib.contextmanager
def meeting(*clusters: Cluster) -> Iterator[list[str]]:
    """Lets workers begin to meet, and then waits for their end. Gives what `meet` returns."""
    ends: list[str] = []
    thread = threading.Thread(target=lambda: ends.extend(meet(list(clusters))))
    thread.start()
    yield ends
    thread.join(timeout=60)
    assert not thread.is_alive()


def connected(address: str) -> socket.socket:
    """Returns a connection to an address at which a worker will soon listen."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_all_workers_go_on(count: int) -> None:
    those = addresses(count)
    assert meet([Cluster(those, number) for number in range(count)]) == [""] * count


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="there is no IPv6 here")
def test_addresses_of_ipv6() -> None:
    those = tuple(f"[::1]:{port}" for port in free_ports(2))
    assert meet([Cluster(those, 0), Cluster(those, 1)]) == ["", ""]


def test_the_chief_may_come_last() -> None:
    those = addresses(2)
    with meeting(Cluster(those, 1)) as ends:
        connected(those[1]).close()  # worker 1 is there
        assert meet([Cluster(those, 0)]) == [""]
    assert ends == [""]


def test_a_missing_worker_is_named_to_all() -> None:
    those = addresses(3)
    line = f"WorkerMissing: after 1 seconds, no message from worker 1 ({those[1]})"
    assert meet([Cluster(those, 0), Cluster(those, 2)], seconds=1.0) == [line, line]


@extended
def test_a_missing_chief_is_named() -> None:
    those = addresses(3)
    for found in meet([Cluster(those, 1), Cluster(those, 2)], seconds=1.0):
        assert found.startswith(
            f"WorkerMissing: after 1 seconds, no message from the chief, worker 0 ({those[0]})"
        )


@extended
def test_a_host_that_does_not_exist() -> None:
    own = addresses(1)[0]
    (found,) = meet([Cluster(("no-such-host.invalid:2222", own), 1)], seconds=1.0)
    assert "no message from the chief, worker 0 (no-such-host.invalid:2222)" in found


def test_two_workers_of_one_number_on_two_machines() -> None:
    """Both have the number 1. On another machine, the second can listen at the same port."""
    those = addresses(3)
    hello = {"number": 1, "addresses": list(those)}
    with meeting(Cluster(those, 0), Cluster(those, 1)) as ends:
        time.sleep(1.0)  # the first worker comes before the second one
        with connected(those[0]) as other:
            other.sendall(json.dumps(hello).encode() + b"\n")
            answer = other.makefile().readline()
    line = "two workers have the number 1: give each worker its own index"
    assert ends == [f"UserError: {line}"] * 2
    assert "two workers have the number 1" in answer


def test_two_workers_of_one_number_on_one_machine() -> None:
    those = addresses(2)
    with socket.socket() as taken:
        taken.bind(("", int(those[1].rpartition(":")[2])))
        taken.listen()
        (found,) = meet([Cluster(those, 1)])
    assert found.startswith(f"UserError: worker 1 ({those[1]}) cannot listen at port")


def test_a_worker_with_other_addresses_is_refused() -> None:
    those = addresses(3)
    changed = (*those[:2], "elsewhere:2222")
    found = meet([Cluster(those, 0), Cluster(changed, 1)])
    assert all("another list of addresses than the chief" in each for each in found)


def test_a_worker_that_does_not_listen_at_its_address() -> None:
    those = addresses(2)
    hello = {"number": 1, "addresses": list(those)}
    with meeting(Cluster(those, 0)) as ends, connected(those[0]) as worker:
        worker.sendall(json.dumps(hello).encode() + b"\n")
        worker.makefile().readline()
    assert ends[0].startswith(f"UserError: worker 1 ({those[1]}) does not answer at its address")


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b'{"number": 1', id="a worker that dies and comes again"),
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", id="another program"),
    ],
)
def test_a_connection_without_a_message_is_ignored(said: bytes) -> None:
    those = addresses(2)
    with meeting(Cluster(those, 0)) as ends:
        with connected(those[0]) as stranger:
            stranger.sendall(said)
        assert meet([Cluster(those, 1)]) == [""]
    assert ends == [""]


def config(cluster: Any, **task: Any) -> dict[str, str]:
    task = {"type": "worker", "index": 0, **task}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


TWO = {"worker": ["a:1", "b:2"]}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (config(TWO), Cluster(("a:1", "b:2"), 0)),
        (config(TWO, index=1), Cluster(("a:1", "b:2"), 1)),
        (config({"chief": ["c:1"], **TWO}, index=1), Cluster(("c:1", "a:1", "b:2"), 2)),
        (config({"chief": ["c:1"], **TWO}, type="chief"), Cluster(("c:1", "a:1", "b:2"), 0)),
        (config({"worker": ["a:1"]}), None),
        ({"TF_CONFIG": "{}"}, None),
        ({}, None),
    ],
)
def test_the_cluster_of_tf_config(environment: dict[str, str], expected: Any) -> None:
    assert find_cluster("auto", environment) == expected
    assert find_cluster("one", environment) is None


@pytest.mark.parametrize(
    ("environment", "part"),
    [
        ({"TF_CONFIG": "{"}, "TF_CONFIG is not JSON"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "no cluster and task"),
        (config(TWO, index=2), "the index 2 of the job 'worker', outside the cluster"),
        (config(TWO, index=-1), "the index -1 of the job 'worker', outside the cluster"),
        (config(TWO, index="0"), "the index '0': give a number, without quotes"),
        (config({"worker": ["a:1", "http://b:2"]}), "'http://b:2' is not an address"),
        (config(TWO, index=True), "outside the cluster"),
        (config(TWO, type="evaluator"), "the task type 'evaluator'"),
        (config({**TWO, "ps": ["d:1"]}), "the job 'ps'"),
        (config({"worker": ["a:1", "a:1"]}), "names the address a:1 twice"),
        (config({"worker": ["a:1", "b"]}), "'b' is not an address"),
        (config({"worker": ["a:1", "b:99999"]}), "'b:99999' is not an address"),
        (config({"worker": "a:1"}), "is not a list of addresses"),
        ({}, "neither TF_CONFIG nor the variables of a Slurm step"),
    ],
)
def test_a_wrong_tf_config_is_one_line(environment: dict[str, str], part: str) -> None:
    with pytest.raises(UserError) as caught:
        find_cluster("multi_worker", environment)
    assert part in str(caught.value) and "\n" not in str(caught.value)


def test_the_cluster_of_a_slurm_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the variables that Slurm sets for the third of four tasks on three nodes."""
    variables = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "m7,n[01-02]",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
        "SLURM_PROCID": "2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert find_cluster("multi_worker") == Cluster(
        ("m7:8888", "m7:8889", "n01:8888", "n02:8888"), 2
    )
    assert find_cluster("auto") is None
