"""Fixture: a folder with a small file of weights."""

import pytest
from pretrained_plan_tools import tensors_of
from safetensors.numpy import save_file


@pytest.fixture
def folder(tmp_path):
    save_file(tensors_of(), tmp_path / "model.safetensors")
    return tmp_path
