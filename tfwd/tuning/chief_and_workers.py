"""Roles of the processes that share a sweep: a chief and workers, and the wait for the chief.

keras-tuner's variables define the roles: KERASTUNER_TUNER_ID (the chief's contains "chief"),
KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

CHIEF, WORKER, ALONE = "chief", "worker", "alone"
_ID, _IP, _PORT = "KERASTUNER_TUNER_ID", "KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT"
_LOOK_SECONDS = 2.0


def role() -> str:
    """Returns `CHIEF`, `WORKER` or `ALONE`, the role of this process.

    Raises:
        ValueError: some of keras-tuner's three variables are set, but not all.
    """
    names = (_ID, _IP, _PORT)
    for name in names:
        if os.environ.get(name) == "":  # keras-tuner would use it as an address
            raise ValueError(f"{name} is empty: give it a value, or unset it")
    unset = [name for name in names if name not in os.environ]
    if len(unset) == len(names) or unset == list(names[1:]):
        return ALONE
    if unset:
        raise ValueError(f"{' and '.join(unset)} must be set too, to share a sweep")
    return CHIEF if "chief" in os.environ[_ID] else WORKER


def check_address(mine: str) -> None:
    """Checks the chief's address in the variables. gRPC would only retry a wrong address.

    Args:
        mine: the role, from `role`. A chief must be able to listen at the address.

    Raises:
        ValueError: the port or the address is invalid, or another process uses it.
    """
    if mine == ALONE:
        return
    name, ip, port = (os.environ[variable] for variable in (_ID, _IP, _PORT))
    if not name.isprintable():  # bytes that are not UTF-8 are not printable
        raise ValueError(f"{_ID}={name!r}: give a printable name")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536):
        raise ValueError(f"{_PORT}={port}: give a whole number, 1 to 65535")
    if ":" in ip and not (ip.startswith("[") and ip.endswith("]")):
        raise ValueError(
            f"{_IP}={ip}: give an address without a port; put IPv6 in brackets, such as [::1]"
        )
    try:
        found = socket.getaddrinfo(ip.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"{_IP}={ip}: there is no such address ({error}); give a host name or an IP address"
        ) from error
    if mine != CHIEF:
        return
    family, kind, _, _, address = found[0]
    try:
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
            tried.listen(1)  # fails if another process listens
    except OSError as error:
        raise ValueError(
            f"the chief cannot listen on {_IP}={ip}, {_PORT}={port}: {error.strerror or error}; "
            "give an address of this machine, and a port that no process uses"
        ) from error


class NoChief(RuntimeError):
    """Error for a chief that did not answer in time. The message is for the user."""


def wait_for_chief(
    seconds: float, say: Callable[[str], object], check: Callable[[], object]
) -> None:
    """Waits until the chief answers.

    Args:
        seconds: float. The maximum time to wait.
        say: function that is called with a line if the worker must wait.
        check: function that is called regularly. An exception in it ends the wait.

    Raises:
        NoChief: the chief did not answer.
    """
    import grpc
    from keras_tuner.src import protos

    where = f"{os.environ[_IP]}:{os.environ[_PORT]}"
    end, announced = time.monotonic() + seconds, False
    with grpc.insecure_channel(where) as channel:
        stub = protos.get_service_grpc().OracleStub(channel)
        while True:
            check()
            remaining = end - time.monotonic()
            try:
                request = protos.get_service().GetSpaceRequest()
                patience = max(min(_LOOK_SECONDS, remaining), 0.01)
                stub.GetSpace(request, wait_for_ready=True, timeout=patience)
                return
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                    raise NoChief(f"the program at {where} is not the chief of a sweep") from error
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    time.sleep(patience)
            if remaining <= 0:
                raise NoChief(
                    f"no chief answered at {where} in {seconds:g} seconds: start the chief with "
                    f"the same {_IP} and {_PORT} and {_ID}=chief, or wait longer"
                )
            if not announced:
                say(f"waiting for the chief at {where}, at most {seconds:g} seconds")
                announced = True
