"""Calls of `malformed_calls.py` on folders of runs and sweeps with one damaged file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from malformed_calls import Call

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "not JSON": b"{no",
    "a list": b"[]\n",
    "a number": b"3\n",
    "null": b"null\n",
    "an empty object": b"{}\n",
    "a list in an object": b'{"kind": [], "keras": [], "model": [], "step": {}, "tokens": 3}\n',
    "not UTF-8": b'{"a": "\xff"}\n',
    "deep": b"[" * 100_000,
    "a long number": b'{"step": 1' + b"0" * 5000 + b"}\n",
}


def damages() -> Iterator[tuple[str, Callable[[Path], object]]]:
    """Yields the damages to a file: (name, function)."""

    def cut(path: Path) -> None:
        os.truncate(path, path.stat().st_size * 2 // 3)

    def other(make: Callable[[Path], object]) -> Callable[[Path], object]:
        return lambda path: (path.unlink(), make(path))

    for name, content in CONTENTS.items():
        yield name, lambda path, content=content: path.write_bytes(content)
    yield "cut off", cut
    yield "gone", lambda path: path.unlink()
    yield "a folder", other(lambda path: path.mkdir())
    yield "a pipe", other(lambda path: os.mkfifo(path))
    yield "endless", other(lambda path: path.symlink_to("/dev/zero"))
    yield "a link to itself", other(lambda path: path.symlink_to(path.name))


def _newest(folder: Path) -> Path:
    return sorted(folder.glob("step-*"))[-1]


def sign(checkpoint: Path) -> None:
    """Makes the manifest valid, as a program that writes files of another form would."""
    from tfwd.runs.storage.checkpoint import _facts

    files = [path for path in sorted(checkpoint.iterdir()) if path.name != "manifest.json"]
    manifest = {path.name: _facts(path) for path in files if path.is_file()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def damaged_runs() -> Iterator[Call]:
    of_the_run = ("config.json", "vocabulary.json", "metrics.jsonl", "report/summary.json", ".lock")
    of_a_checkpoint = ("manifest.json", "progress.json", "written_by.json", "tensors.index")
    for what, damage in damages():
        for file in of_the_run:

            def prepare(box: Path, file: str = file, damage: Callable = damage) -> None:
                damage(box / "run" / file)

            read_by = (
                ("train", "evaluate", "generate")
                if file.endswith("y.json") or file[0] == "c"
                else ("train",)
            )
            for program in read_by:
                yield Call(f"{file}: {what}", program, (), prepare, served=None, new=False)
        for file in of_a_checkpoint:
            for signed in (False, True):
                # Signing writes the manifest again.
                whole = file == "manifest.json" or (file == "tensors.index" and what != "gone")
                if signed and whole:
                    continue

                def prepare(
                    box: Path, file: str = file, damage: Callable = damage, signed: bool = signed
                ) -> None:
                    checkpoint = _newest(box / "run" / "checkpoints")
                    damage(checkpoint / file)
                    if signed:
                        sign(checkpoint)

                name = f"{file}{', signed' * signed}: {what}"
                # The previous checkpoint is used, and a message says so.
                words = "previous checkpoint" if not (signed and file == "written_by.json") else ""
                yield Call(
                    name,
                    "generate",
                    ("--checkpoint=last",),
                    prepare,
                    served=None,
                    new=False,
                    words=words,
                )
                yield Call(
                    name,
                    "train",
                    ("--config.training.epochs=2",),
                    prepare,
                    served=True,
                    new=False,
                    words=words,
                )
        for file in ("progress.json", "weights.npz", "written_by.json"):

            def prepare(box: Path, file: str = file, damage: Callable = damage) -> None:
                checkpoint = _newest(box / "run" / "best")
                damage(checkpoint / file)
                sign(checkpoint)

            yield Call(f"best {file}: {what}", "evaluate", (), prepare, served=None, new=False)

    def stray(place: str, again: str = "") -> Callable[[Path], object]:
        def make(box: Path) -> None:
            path = box / "run" / place
            if path.is_dir():
                shutil.rmtree(path)
            path.parent.mkdir(exist_ok=True)
            path.write_text("stray")

        return make

    for place in (
        "checkpoints",
        "best",
        "report",
        "tensorboard",
        "checkpoints/step-99999999",
        "checkpoints/step-5",
        "checkpoints/step-99999999999999999999999",
        "checkpoints/.writing-00000001",
        "checkpoints/.replaced-step-00000001",
        "best/step-99999999",
        "checkpoints/broken-step-99999999",
    ):
        yield Call(f"a stray file for {place}", "train", (), stray(place), served=None, new=False)
        yield Call(
            f"a stray file for {place}",
            "train",
            ("--config.training.epochs=2",),
            stray(place),
            served=None,
            new=False,
        )
        yield Call(
            f"a stray file for {place}", "evaluate", (), stray(place), served=None, new=False
        )
        yield Call(
            f"a stray file for {place}",
            "generate",
            ("--checkpoint=last",),
            stray(place),
            served=None,
            new=False,
        )

    def spoil(box: Path) -> None:
        import numpy as np

        path = _newest(box / "run" / "best") / "weights.npz"
        with np.load(path) as file:
            arrays = dict(file)
        arrays["decoder/bias"][2] = np.nan
        np.savez(path, **arrays)
        sign(path.parent)

    for program in ("generate", "evaluate"):
        yield Call(
            "weights that are NaN", program, (), spoil, new=False, words="not finite.*|decoder/bias"
        )
    yield Call("no run", "evaluate", (), words="there is no run")
    yield Call("no run", "generate", (), words="there is no run")
    yield Call(
        "no checkpoint", "generate", (), lambda box: shutil.rmtree(box / "run" / "best"), new=False
    )
    yield Call(
        "another configuration",
        "train",
        ("--config.model.embedding_dim=5", "--config.model.hidden_units=5"),
        new=False,
    )
    yield Call("another text", "train", ("--config.data.path=",), new=False)


def damaged_sweeps() -> Iterator[Call]:
    for what, damage in damages():
        for file in (
            "sweep.json",
            "oracle.json",
            "tuner.json",
            "trial_0/trial.json",
            "trials.csv",
            "trial_0/error.txt",
            "trial_0/run-0/seconds.txt",
            ".lock",
        ):

            def prepare(box: Path, file: str = file, damage: Callable = damage) -> None:
                shutil.rmtree(box / "run")
                (box / "sweep").rename(box / "run")
                path = box / "run" / file
                if not path.exists():
                    path.write_text("")
                damage(path)

            yield Call(
                f"sweep's {file}: {what}",
                "tune",
                (),
                prepare,
                served=None,
                new=False,
                kept=file != "trials.csv",
            )
    yield Call("a run and no sweep", "tune", (), new=False, words="no sweep")
