"""Checkpoints, which are whole or absent."""

import fcntl
import json
import os
import resource
import shutil
import signal

import numpy as np
import pytest
import tensorflow as tf

from tfwd.runs.errors import UserError
from tfwd.runs.storage import checkpoint
from tfwd.runs.storage.checkpoint import Checkpoints, _facts
from tfwd.runs.storage.progress import Progress


@pytest.fixture
def checkpoints(tmp_path):
    return Checkpoints(tmp_path / "checkpoints")


def save(checkpoints, step, value):
    checkpoints.save(step, {"value": tf.Variable(value)}, {"step": step})


def restored(checkpoints, lines=None):
    value = tf.Variable([0.0, 0.0])
    say = (lines if lines is not None else []).append
    progress = checkpoints.restore({"value": value}, say=say)
    return progress, value.numpy().tolist()


def test_the_newest_is_read(checkpoints):
    assert restored(checkpoints) == (None, [0.0, 0.0])
    for step in (5, 100, 20):
        save(checkpoints, step, [float(step), 1.0])
    assert checkpoints.steps() == [5, 20, 100]
    assert restored(checkpoints) == ({"step": 100}, [100.0, 1.0])
    checkpoints.keep([5, 20])
    assert checkpoints.steps() == [5, 20]
    save(checkpoints, 20, [7.0, 7.0])  # of the same step: replaced
    assert restored(checkpoints) == ({"step": 20}, [7.0, 7.0])
    assert sorted(os.listdir(checkpoints.folder)) == ["step-00000005", "step-00000020"]


def test_every_kind_of_damage_is_noticed(checkpoints, tmp_path):
    save(checkpoints, 1, [1.0, 1.0])
    save(checkpoints, 2, [2.0, 2.0])
    whole = tmp_path / "whole"
    shutil.copytree(checkpoints.path(2), whole)
    names = sorted(path.name for path in whole.iterdir())
    assert {"manifest.json", "progress.json", "tensors.index"} < set(names)
    for name in names:
        for damage in ("missing", "empty", "shorter", "changed"):
            path = checkpoints.path(2) / name
            content = path.read_bytes()
            if damage == "missing":
                path.unlink()
            elif damage == "empty":
                path.write_bytes(b"")
            elif damage == "shorter":
                path.write_bytes(content[:-1])
            elif name != "manifest.json":
                path.write_bytes(content[:3] + bytes([content[3] ^ 1]) + content[4:])
            else:
                path.write_text("[]")
            lines = []
            assert restored(checkpoints, lines) == ({"step": 1}, [1.0, 1.0]), (name, damage)
            assert len(lines) == 1 and name in lines[0] and "previous checkpoint" in lines[0]
            shutil.rmtree(checkpoints.path(2))
            shutil.copytree(whole, checkpoints.path(2))
    assert restored(checkpoints)[0] == {"step": 2}
    checkpoints.set_aside(2)
    assert checkpoints.steps() == [1]


FORMS = [b"[]", b"3", b"null", b"{}", b'{"keras": []}', b'"3"', b"\xff", b"[" * 100_000]


def test_files_of_another_form_are_passed_over_and_it_is_said(checkpoints):
    """Checks files with a valid manifest and another form, whatever wrote them."""
    for name, forms in {"written_by.json": FORMS, "progress.json": [b"[]", b"3", b"{no"]}.items():
        for content in forms:
            save(checkpoints, 1, [1.0, 1.0])
            save(checkpoints, 2, [2.0, 2.0])
            folder = checkpoints.path(2)
            (folder / name).write_bytes(content)
            facts = {p.name: _facts(p) for p in folder.iterdir() if p.name != "manifest.json"}
            (folder / "manifest.json").write_text(json.dumps(facts))
            lines = []
            assert restored(checkpoints, lines) == ({"step": 1}, [1.0, 1.0]), (name, content)
            assert len(lines) == 1 and name in lines[0] and "previous checkpoint" in lines[0]
            assert "\n" not in lines[0]


def test_progress_that_no_run_has_is_passed_over(tmp_path):
    checkpoints = Checkpoints(tmp_path, check=Progress.from_json)
    value = {"value": tf.Variable(1.0)}
    checkpoints.save(1, value, Progress(step=1).to_json())
    wrong = [{"step": "1"}, {"best_step": []}, {"epoch": -1}, {"seconds": float("nan")}, {"x": 1}]
    for change in wrong:
        checkpoints.save(2, value, {**Progress(step=2).to_json(), **change})
        lines = []
        assert checkpoints.restore(value, say=lines.append)["step"] == 1
        assert len(lines) == 1 and next(iter(change)) in lines[0]


def test_a_file_in_place_of_a_checkpoint(checkpoints):
    save(checkpoints, 1, [1.0, 1.0])
    for name in ("step-00000009", ".writing-00000002", ".replaced-step-00000001", "step-5"):
        (checkpoints.folder / name).write_text("stray")
    lines = []
    assert restored(checkpoints, lines) == ({"step": 1}, [1.0, 1.0])
    assert len(lines) == 1 and "step-00000009: it is a file" in lines[0]
    save(checkpoints, 9, [9.0, 9.0])
    assert restored(checkpoints) == ({"step": 9}, [9.0, 9.0])
    checkpoints.keep([9])
    assert sorted(os.listdir(checkpoints.folder)) == ["step-00000009", "step-5"]


def test_none_whole_is_an_error_and_nothing_is_removed(checkpoints):
    save(checkpoints, 1, [1.0, 1.0])
    os.truncate(checkpoints.path(1) / "progress.json", 2)
    with pytest.raises(UserError, match=r"no complete checkpoint is left: .*has 2 of 11 bytes"):
        restored(checkpoints)
    assert checkpoints.steps() == [1]


def test_a_half_written_one_is_not_taken_for_whole(checkpoints):
    save(checkpoints, 1, [1.0, 1.0])
    shutil.copytree(checkpoints.path(1), checkpoints.folder / ".writing-00000002")
    assert restored(checkpoints)[0] == {"step": 1}
    save(checkpoints, 2, [2.0, 2.0])
    assert sorted(os.listdir(checkpoints.folder)) == ["step-00000001", "step-00000002"]


def test_one_that_was_to_be_replaced_is_not_lost(checkpoints):
    save(checkpoints, 1, [1.0, 1.0])
    replaced = checkpoints.folder / ".replaced-step-00000001"
    checkpoints.path(1).rename(replaced)  # killed here, before the new one had its name
    shutil.copytree(replaced, checkpoints.folder / ".writing-00000001")
    checkpoints.recover()
    assert os.listdir(checkpoints.folder) == ["step-00000001"]
    assert restored(checkpoints) == ({"step": 1}, [1.0, 1.0])
    shutil.copytree(checkpoints.path(1), replaced)  # killed after it
    checkpoints.recover()
    assert os.listdir(checkpoints.folder) == ["step-00000001"]


def test_another_shape_or_model_is_one_line(checkpoints):
    save(checkpoints, 1, [1.0, 1.0])
    with pytest.raises(UserError, match=r"step-00000001 is a checkpoint of another model") as info:
        checkpoints.restore({"value": tf.Variable([0.0, 0.0, 0.0])})
    assert "\n" not in str(info.value) and "(3,)" in str(info.value)
    with pytest.raises(UserError, match="another model"):
        checkpoints.restore({"value": tf.Variable([0.0, 0.0]), "more": tf.Variable(1.0)})


def test_a_full_disk_leaves_the_earlier_ones(checkpoints):
    save(checkpoints, 1, np.ones(100_000))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(
            UserError, match=r"cannot save .*step-00000002: .*earlier checkpoints are intact \(1\)"
        ):
            save(checkpoints, 2, np.ones(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert os.listdir(checkpoints.folder) == ["step-00000001"]
    assert checkpoints.problem(1) is None
    assert json.loads((checkpoints.path(1) / "progress.json").read_text()) == {"step": 1}


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot save the checkpoint .*Not a directory"):
        save(Checkpoints(tmp_path / "file" / "checkpoints"), 1, [1.0])


def test_a_checkpoint_is_written_where_folders_cannot_be_opened(checkpoints, monkeypatch):
    """Checks writing as on Windows, which opens no folders and syncs only files opened to write."""
    opened, synced = os.open, os.fsync

    def windows_open(path, flags, *rest, **place):
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **place)

    def windows_fsync(descriptor):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(9, "Bad file descriptor")
        synced(descriptor)

    monkeypatch.setattr(shutil, "_use_fd_functions", False)  # as on Windows
    monkeypatch.setattr(os, "open", windows_open)
    monkeypatch.setattr(os, "fsync", windows_fsync)
    with pytest.raises(UserError, match="Permission denied|Bad file descriptor"):
        save(checkpoints, 5, [1.0, 2.0])
    monkeypatch.setattr(checkpoint, "_WINDOWS", True)
    save(checkpoints, 5, [1.0, 2.0])
    assert restored(checkpoints) == ({"step": 5}, [1.0, 2.0])
