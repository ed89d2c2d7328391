"""Addresses of a chief, and the time that a worker waits for one."""

import socket

import pytest

from tfwd.tuning import chief_and_workers
from tfwd.tuning.oracles import make_oracle

NAMES = ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT")


@pytest.fixture
def shared(monkeypatch):
    """Returns `shared(name, address, port)`, which sets keras-tuner's variables; None unsets."""

    def set_them(*values):
        for name, value in zip(NAMES, values, strict=True):
            if value is None:
                monkeypatch.delenv(f"KERASTUNER_{name}", raising=False)
            else:
                monkeypatch.setenv(f"KERASTUNER_{name}", value)

    return set_them


@pytest.mark.parametrize("name", ["chief", "one"])
@pytest.mark.parametrize(
    ("address", "port", "words"),
    [
        ("127.0.0.1", "0", "ORACLE_PORT=0: give a whole number, 1 to 65535"),
        ("127.0.0.1", "65536", "ORACLE_PORT=65536"),
        ("127.0.0.1", "80a", "ORACLE_PORT=80a"),
        ("127.0.0.1", "-1", "ORACLE_PORT=-1"),
        ("127.0.0.1:80", "80", "give an address without a port"),
        ("::1", "80", "IPv6 in brackets"),
        ("a b", "80", "there is no such address"),
        ("\udcff", "80", "there is no such address"),
    ],
)
def test_an_address_that_cannot_be(shared, name, address, port, words):
    shared(name, address, port)
    with pytest.raises(ValueError, match=words):
        chief_and_workers.check_address(chief_and_workers.role())


def test_a_chief_listens_on_an_address_of_its_own(shared):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        shared("chief", "127.0.0.1", port)
        with pytest.raises(ValueError, match=f"cannot listen on .*PORT={port}: .*in use"):
            chief_and_workers.check_address(chief_and_workers.CHIEF)
        chief_and_workers.check_address(chief_and_workers.WORKER)
    chief_and_workers.check_address(chief_and_workers.CHIEF)
    shared("chief", "192.0.2.1", port)  # of the documentation, and of no machine
    with pytest.raises(ValueError, match="cannot listen on .*192.0.2.1"):
        chief_and_workers.check_address(chief_and_workers.CHIEF)


def test_variables_that_are_empty(shared):
    shared(None, None, None)
    assert chief_and_workers.role() == chief_and_workers.ALONE
    shared("one", None, None)
    assert chief_and_workers.role() == chief_and_workers.ALONE
    shared("", "", "")
    with pytest.raises(ValueError, match="KERASTUNER_TUNER_ID is empty"):
        chief_and_workers.role()


def test_a_worker_says_what_it_waits_for_and_gives_up(shared):
    with socket.socket() as silent:  # it listens, and is no chief
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        shared("one", "127.0.0.1", str(port))
        lines, looks = [], []
        with pytest.raises(
            chief_and_workers.NoChief, match=f"no chief answered at 127.0.0.1:{port} in 0.7"
        ):
            chief_and_workers.wait_for_chief(0.7, lines.append, lambda: looks.append(1))
        assert lines == [f"waiting for the chief at 127.0.0.1:{port}, at most 0.7 seconds"]
        assert len(looks) > 1

        def stop():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            chief_and_workers.wait_for_chief(1000, lines.append, stop)


def test_seeds_that_numpy_does_not_take():
    for seed in (-1, 2**31, 2**32):
        with pytest.raises(ValueError, match=f"seed={seed}: give a whole number"):
            make_oracle("random", "val_loss", seed=seed)
    make_oracle("random", "val_loss", seed=2**31 - 1)
