"""Calls with one error in each: none ends in a traceback.

This file makes each 31st call; `python tests/lm/malformed_calls.py` makes all.
"""

import re
from pathlib import Path

import pytest
from stack_marks import once
from tables_by_make_target import with_slow_rest
from watched_processes import finish

HERE = Path(__file__).parent

PROGRAMS = ["train", "tune", "evaluate", "generate"]


@once
@pytest.mark.parametrize("program", with_slow_rest(PROGRAMS, (), {"train", "tune", "generate"}))
def test_every_call_is_served_or_refused_in_one_line(processes, program):
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import malformed_calls as calls; "
    code += f"sys.exit(calls.main([{program + ' '!r}], every=31))"
    ended, said = finish(processes.python(code))
    assert ended == 0, said
    assert int(re.search(r"^0 of (\d+) calls are wrong", said, re.MULTILINE)[1]) > 3, said
