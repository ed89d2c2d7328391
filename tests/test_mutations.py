"""The list of planted defects fits the sources; `make test-mutations` plants them."""

from pathlib import Path

import pytest
from mutations.defects import DEFECTS
from mutations.defects.defect import Defect

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.what)
def test_the_text_stands_in_the_file_once(defect: Defect) -> None:
    source = (ROOT / defect.file).read_text("utf-8")
    assert source.count(defect.old) == 1 and defect.old != defect.new
    compile(source.replace(defect.old, defect.new), defect.file, "exec")


def test_there_are_no_two_alike() -> None:
    assert len({(defect.file, defect.old, defect.new) for defect in DEFECTS}) == len(DEFECTS) > 20
