"""Random models on effective weights give what plain Keras gives on those weights.

`TFWD_FUZZ_CASES` says how many; `tests/fuzz/run.py` goes on for as long as one likes.
"""

import os

import pytest

from fuzz import hunt, script, shrink
from fuzz.known import KNOWN

CASES = int(os.environ.get("TFWD_FUZZ_CASES", "24"))


def report(case, found):
    return "\n".join([*found, "This script shows it:", script.script(case, found)])


@pytest.mark.parametrize("name", KNOWN)
def test_a_defect_that_there_was(name: str) -> None:
    found = shrink.found_in(KNOWN[name], must_run=True)
    assert not found, report(KNOWN[name], found)


@pytest.mark.parametrize("seed", range(4))
def test_random_models(seed: int) -> None:
    now = hunt.Hunt(seed, seconds=30, again=1)
    for failure in now.run(CASES // 4):
        pytest.fail(report(failure.case, failure.found))
    assert now.ran == CASES // 4, now.no_model
