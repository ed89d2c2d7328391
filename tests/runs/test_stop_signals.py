"""Signals that request a stop, without a run.

Runs that are stopped and resumed are in `tests/lm/test_resume.py` and `tests/lm/test_train.py`
(`tfwd-train`), `tests/finetune/test_train.py` (`tfwd-finetune`), `test_another_program.py` (a
program of one page), `test_tune.py` (sweeps) and `tests/distribute/` (several workers).
"""

import os
import signal
import time

import pytest

from tfwd.runs.training.stop_signals import Stopped, StopRequest


@pytest.fixture
def _interruptible():
    """Enables Ctrl-C as in a foreground process; processes in the background may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_the_first_is_a_request_and_the_second_a_blow():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop and stop.number == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_codes(number, code):
    assert Stopped(number).exit_code == code
    assert str(Stopped(number)) == number.name


def test_a_closed_pipe_is_a_request_on_systems_without_its_signal(monkeypatch):
    """Checks a closed pipe on systems without SIGPIPE, such as Windows."""
    monkeypatch.delattr(signal, "SIGPIPE", raising=False)
    stop = StopRequest()
    stop.output_is_gone()
    assert stop
    assert stop.error().exit_code == 141 and str(stop.error()) == "SIGPIPE"
