"""A second program, of one page: its obligations to `tfwd.runs`, and its features from it."""

import hashlib
import json
import math
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from stack_marks import extended
from training_loop_runs import StopAfter

from tfwd import _keras
from tfwd._keras import training as _keras_training
from tfwd.runs import command_runner
from tfwd.runs.errors import UserError
from tfwd.runs.interfaces import Score
from tfwd.runs.program_base import Program
from tfwd.runs.settings.config import Schema
from tfwd.runs.settings.config_keys import OPTIMIZER_KEYS, TRAINING_KEYS, Key, MayChange
from tfwd.runs.settings.validators import COUNT, FLAG, NOT_NEGATIVE, SEED
from tfwd.runs.storage import trained_model
from tfwd.runs.storage.file_access import write_file
from tfwd.runs.sweeps import tune_command
from tfwd.runs.sweeps.sweep import Sweep
from tfwd.runs.training import train_command
from tfwd.runs.training.optimizer import find_averaging, make_optimizer
from tfwd.runs.training.step_variables import StepVariables
from tfwd.runs.training.stop_signals import Stopped, StopRequest
from tfwd.runs.training.trainer import Trainer
from tfwd.tuning import Float

SCHEMA = Schema(
    {
        "seed": Key(0, SEED, "of everything that is random"),
        "data.examples": Key(40, COUNT, "points on the line"),
        "model.noise": Key(0.0, NOT_NEGATIVE, "added to the targets"),
        **OPTIMIZER_KEYS,
        "optimizer.name": OPTIMIZER_KEYS["optimizer.name"]._replace(default="adam"),
        **TRAINING_KEYS,
        "report.short": Key(True, FLAG, "of no influence", MayChange.ALWAYS),
    }
)


class Names:
    """Names of the outputs, in place of a vocabulary."""

    def __init__(self, names):
        self.names = names

    def __len__(self):
        return len(self.names)

    def save(self, path):
        write_file(path, json.dumps(self.names))

    def fingerprint(self):
        return hashlib.sha256(json.dumps(self.names).encode()).hexdigest()[:16]


class Points(NamedTuple):
    name: str
    vocabulary: Names
    x: np.ndarray
    y: np.ndarray

    @property
    def size(self):
        return f"{len(self.x)} points"

    def fingerprint(self):
        return hashlib.sha256(self.x.tobytes() + self.y.tobytes()).hexdigest()[:16]


class Loss(NamedTuple):
    nats: float


class Step:
    def __init__(self, model, state, optimizer, workers):
        self.workers = workers
        self.model, self.state, self.optimizer = model, state, optimizer
        self.averaging, self.unused = find_averaging(optimizer), []
        _keras_training.build_optimizer(optimizer, model.trainable_variables)

    def __call__(self, x, y):
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.model(x) - y))
        tensors = [_keras.variables.tf_variable(v) for v in variables]
        _keras_training.set_learning_rate(self.optimizer, self.state.learning_rate)
        _keras_training.make_step(self.optimizer, tape.gradient(loss, tensors), variables)
        self.state.step.assign_add(1)
        for nats, count in (
            (self.state.epoch_nats, self.state.epoch_tokens),
            (self.state.log_nats, self.state.log_tokens),
        ):
            nats.assign_add(len(x) * tf.cast(loss, tf.float64))
            count.assign_add(len(x))

    def trace(self):
        pass

    def failure(self):
        return None

    def diagnose(self, *batch):
        raise AssertionError("no step fails")

    def resume_after_failure(self):
        raise AssertionError("no step fails")


class LineTrainer(Trainer):
    def __init__(self, program, config, data, folder, display, stop, workers):
        self.points = data
        model, state = (
            program.make_model(config, data.vocabulary),
            StepVariables([], config.optimizer.learning_rate),
        )
        optimizer = make_optimizer(config.optimizer.name, config.optimizer.learning_rate)
        step = Step(model, state, optimizer, workers)
        fingerprint = data.fingerprint()
        super().__init__(
            config, model, state, step, fingerprint, folder, display, stop, program.score
        )

    def epoch_sizes(self, epoch):
        return np.full(len(self.points.x) // 4, 4)

    def epoch_batches(self, first):
        for start in range(4 * first, len(self.points.x), 4):
            yield self.points.x[start : start + 4], self.points.y[start : start + 4]

    def evaluate(self, name):
        if self.stop:
            return None
        return Loss(float(tf.reduce_mean(tf.square(self.model(self.points.x) - self.points.y))))


class Line(Program):
    command = "line-train"
    config_module = "line.config"
    schema = SCHEMA
    score = Score("error", math.sqrt, unit="point")
    data_keys = ("data.examples",)
    vocabulary_file = "names.json"
    model_name = "line"

    def read_data(self, config):
        x = np.linspace(-1, 1, config.data.examples, dtype=np.float32)[:, None]
        noise = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
        return Points("a line", Names(["y"]), x, 2 * x + 1 + config.model.noise * noise)

    def load_vocabulary(self, path, config=None):
        return Names(json.loads(path.read_text()))

    def make_model(self, config, vocabulary):
        keras.utils.set_random_seed(config.seed)
        model = keras.Sequential([keras.layers.Dense(len(vocabulary))])
        model.build((None, 1))
        return model

    def named_weights(self, model):
        return dict(zip(("slope", "offset"), model.weights, strict=True))

    def make_trainer(self, config, data, folder, display, stop, workers):
        return LineTrainer(self, config, data, folder, display, stop, workers)

    def finish(self, trainer, data):
        trainer.read_best()
        summary = {"step": trainer.progress.step, "error": trainer.evaluate_or_stop("valid").nats}
        write_file(trainer.folder.report / "summary.json", json.dumps(summary))
        return summary

    def tables(self, summary):
        return [f"error {summary['error']}"]

    def show(self, summary, folder, display):
        for table in self.tables(summary):
            display.line(table)


LINE = Line()


def configured(**training):
    config = SCHEMA.default()
    config.optimizer.learning_rate = 0.05
    config.training.update({"epochs": 3, "log_steps": 5, "tensorboard": False, **training})
    return config


def test_a_run_is_stopped_and_resumed(tmp_path, capsys):
    whole = train_command.train(LINE, configured(), str(tmp_path / "whole"), StopRequest())
    with pytest.raises(Stopped):
        train_command.train(LINE, configured(), str(tmp_path / "again"), StopAfter(14))
    capsys.readouterr()
    again = train_command.train(LINE, configured(), str(tmp_path / "again"), StopRequest())
    out = capsys.readouterr().out
    assert again == whole and again["step"] == 30
    assert "a line: 40 points for training, vocabulary of 1; model with 2 weights" in out
    assert "resuming from the checkpoint of step" in out and "  error: train " in out
    assert train_command.train(LINE, configured(), str(tmp_path / "again"), StopRequest()) == whole
    found = trained_model.load(LINE, tmp_path / "again")
    assert found.vocabulary.names == ["y"] and found.progress["step"] == 30
    with pytest.raises(UserError, match=r"model\.noise is 0\.0 in the folder and 0\.5 now"):
        other = configured()
        other.model.noise, other.report.short = 0.5, False
        train_command.train(LINE, other, str(tmp_path / "again"), StopRequest())


@extended
def test_a_sweep_over_its_keys(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.py").write_text(
        "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict(FIELDS)\n"
        .replace("FIELDS", repr(configured(epochs=1).to_dict()))
    )  # fmt: skip
    sweep = Sweep({"model.noise": Float(0, 1, step=0.5)}, method="grid")
    monkeypatch.setattr("tfwd.runs.sweeps.sweep.load_sweep", lambda given, schema: sweep)
    flags = [f"--config={tmp_path / 'config.py'}", "--sweep=any", f"--workdir={tmp_path / 'sweep'}"]
    with pytest.raises(SystemExit) as ended:
        command_runner.run(
            lambda values: tune_command.main(LINE, values),
            tune_command.define,
            "A sweep.",
            schema=SCHEMA,
            together=False,
            argv=["line-tune", *flags],
        )
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "best: trial 0000 with model.noise=0" in out
    assert (tmp_path / "sweep" / "trials.csv").read_text().startswith("trial,status,model.noise,")
    best = (tmp_path / "sweep" / "best_config.py").read_text()
    assert "line-train --config=best_config.py" in best and "from line.config import" in best
    assert "config.model.noise = 0.0  # from the sweep" in best
