"""Fixtures: a tiny pretrained folder, data, and one run that learned them."""

import pytest
from finetune_tools import LEARNT, make_config, write_data, write_pretrained

from tfwd.finetune.program import PROGRAM
from tfwd.runs.training import train_command
from tfwd.runs.training.stop_signals import StopRequest


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """Returns a pretrained folder, for reading only."""
    return write_pretrained(tmp_path_factory.mktemp("pretrained") / "tiny")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Returns a folder of three files, for reading only."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def learnt(pretrained, data, tmp_path_factory):
    """Returns the folder of a run that learned the toy task, for reading only."""
    workdir = tmp_path_factory.mktemp("runs") / "learnt"
    config = make_config(data, pretrained, **LEARNT)
    train_command.train(PROGRAM, config, str(workdir), StopRequest())
    return workdir
