"""The log, and TensorBoard's view of it."""

import json
import math

import pytest
from stack_marks import extended
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tfwd.lm.losses import PERPLEXITY
from tfwd.runs.errors import UserError
from tfwd.runs.storage import learning_curves
from tfwd.runs.storage.metrics import Metrics, read_metrics


def record(step, loss=1.0, **more):
    return {"kind": "train", "step": step, "loss": loss, **more}


def events(folder):
    accumulator = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, float(make_ndarray(e.tensor_proto))) for e in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
    }


def test_what_belongs_to_no_checkpoint_is_cut_off(tmp_path):
    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    with Metrics(path, tensorboard=board) as metrics:
        metrics.write(record(1, 4.0, norms={"model/kernel": 2.0}))
        length = metrics.sync()
        metrics.write(record(2, 3.0))
    assert length < path.stat().st_size
    with Metrics(path, keep_bytes=length, tensorboard=board) as metrics:
        metrics.write(record(2, 2.5))
        assert metrics.sync() == path.stat().st_size
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 4.0), (2, 2.5)]
    assert events(board) == {
        "train/loss": [(1, 4.0), (2, 2.5)],
        "norm/model/kernel": [(1, 2.0)],
    }


def test_numbers_that_json_has_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        metrics.write(record(1, math.inf, norms={"a": math.nan}))
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["loss"] is None
    assert read_metrics(path)[0]["norms"] == {"a": None}


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n{"kind": "tra')
    assert read_metrics(path) == [{"kind": "train", "step": 1}]


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*metrics.jsonl: Is a directory"):
        (tmp_path / "metrics.jsonl").mkdir()
        Metrics(tmp_path / "metrics.jsonl")


@extended
def test_a_damaged_log_is_reported_and_continued(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"kind": "train", "step": 1, "loss": 2.0}\n'
    other = b'{"kind": "train", "step": 2, "norms": {"a": []}}\n'
    for content, kept, words in (
        (whole + b"{no\n" + whole, 2, "line 2 is not a record"),
        (whole + b"[]\n\xff\n3\n" + whole, 2, "line 2 is not a record"),
        (other + whole, 1, "line 1 is not a record"),
        (whole + b'{"kind": "tr', 1, "has 42 of its 54 bytes"),
        (whole, 1, "has 42 of its 99 bytes"),
    ):
        path.write_bytes(content)
        lines, length = [], 99 if content == whole else len(content)
        board = tmp_path / "board"
        with Metrics(path, length, board, say=lines.append) as metrics:
            metrics.write({"kind": "valid", "step": 3, "loss": 1.0})
        assert len(lines) == 1 and words in lines[0], lines
        steps = [record["step"] for record in read_metrics(path)]
        assert steps == [1] * kept + [3]
        records = [*read_metrics(path), {"kind": "valid", "step": 3}]
        learning_curves.curves(records, tmp_path / "curves.png", PERPLEXITY)
