"""The fixtures of the language model's runs."""

import pytest
from language_model_runs import make_run, processes, run  # noqa: F401 (fixtures)
from training_loop_runs import write_text


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Returns the path of a text of `training_tools.WORDS`."""
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")
