"""Signals as requests."""

import os
import signal
import time

import pytest

from tfwd.runs.signals import Stopped, StopRequest


@pytest.fixture
def _interruptible():
    """Ctrl-C as in a foreground process; what runs in the background may have it ignored."""
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
