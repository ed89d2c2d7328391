"""A worker of `tfwd-train` for tests: it records what it reads, and fails where a test asks for it.

Run as `python train_program.py RECORD ARGUMENT...`, with `FAULT=number:place` for the worker that
sends itself a signal. The file RECORD gets the numbers of the tokens of each step, and at the end a
hash of the weights.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfwd.lm import training_step
from tfwd.lm.commands.train import run
from tfwd.lm.evaluation import Evaluator
from tfwd.lm.trainer import Trainer
from tfwd.runs.storage import checkpoint
from tfwd.runs.workers import rendezvous

RECORD = Path(sys.argv.pop(1))
NUMBER, _, PLACE = os.environ.get("FAULT", "0:nowhere").partition(":")
SEEN: collections.Counter[str] = collections.Counter()


def pass_place(place: str) -> None:
    """Sends the signal if this is the place of the fault: "step 5" is the fifth time at "step"."""
    SEEN[place] += 1
    if f"{place} {SEEN[place]}" == PLACE:
        os.kill(os.getpid(), int(NUMBER))


def before(owner: Any, name: str, place: str) -> None:
    """Lets a method pass a place before it runs."""
    stood = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        pass_place(place)
        return stood(self, *args, **kwargs)

    setattr(owner, name, method)


meet = rendezvous.meet


def meet_between(*args: Any) -> None:
    pass_place("meeting")
    meet(*args)
    pass_place("connection")


rendezvous.meet = meet_between
before(Trainer, "_restore", "restore")
before(training_step.TrainStep, "__call__", "step")
before(Evaluator, "_add", "evaluation")
before(Trainer, "_save", "save")
before(tf.train.Checkpoint, "write", "write")
sync = checkpoint._sync


def sync_file(path: Path) -> None:
    pass_place("sync")  # the files are written, and the checkpoint has not got its name
    sync(path)


checkpoint._sync = sync_file

forward = training_step.TrainStep.forward
steps: list[list[int]] = []


def record(self: Any, *batch: tf.Tensor) -> Any:
    def append(ids: tf.Tensor) -> tf.Tensor:
        steps.append(ids.numpy().ravel().tolist())
        return ids

    inputs, targets = batch
    seen = tf.ensure_shape(tf.py_function(append, [inputs], tf.int32), inputs.shape)
    return forward(self, seen, targets)


training_step.TrainStep.forward = record
train = Trainer.train


def train_and_record(self: Trainer) -> None:
    train(self)
    bits = hashlib.sha256(b"".join(weight.tobytes() for weight in self.model.get_weights()))
    record = {"steps": steps, "weights": bits.hexdigest()}
    RECORD.write_text(json.dumps(record), encoding="utf-8")


Trainer.train = train_and_record

if __name__ == "__main__":
    run()
