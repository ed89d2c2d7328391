"""Fixtures: a tiny pretrained folder, data, and one run that learnt them."""

import pytest
from finetune_tools import LEARNT, make_config, write_data, write_pretrained

from tfwd.finetune.program import PROGRAM
from tfwd.runs.training import train
from tfwd.runs.training.signals import StopRequest


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """A pretrained folder, which is only read."""
    return write_pretrained(tmp_path_factory.mktemp("pretrained") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of three files, which is only read."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def learnt(pretrained, data, tmp_path_factory):
    """The folder of a run that learnt the toy task, which is only read."""
    workdir = tmp_path_factory.mktemp("runs") / "learnt"
    config = make_config(data, pretrained, **LEARNT)
    train.train(PROGRAM, config, str(workdir), StopRequest())
    return workdir
