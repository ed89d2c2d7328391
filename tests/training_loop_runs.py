"""Short runs of the training loop in this process."""

import signal

import numpy as np

from tfwd.lm.config import default_config
from tfwd.runs.storage.metrics import read_metrics
from tfwd.runs.training.stop_signals import StopRequest

WORDS = np.array(["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"])


class StopAfter(StopRequest):
    """A check for stops that acts as SIGTERM does at the time of check number `looks`."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def __bool__(self):
        self.looks -= 1
        self.number = signal.SIGTERM
        return self.looks < 0


def write_text(path):
    lines = np.random.default_rng(0).choice(WORDS, (300, 4))
    path.write_text("\n".join(map(" ".join, lines)) + "\n")
    return path


def make_config(text, **changes):
    config = default_config()
    config.data.update({"path": str(text), "batch_size": 4, "eval_batch_size": 2, "window": 10})
    config.model.update({"embedding_dim": 4, "hidden_units": (4,), "hidden_dropout": 0.0})
    config.optimizer.update({"name": "adam", "learning_rate": 0.01})
    config.training.update({"epochs": 2, "log_steps": 10, "tensorboard": False})
    config.training.checkpoint_seconds = 0.0  # a slow machine would save more often
    config.sample.tokens = 0  # to trace what draws a text takes as long as the training
    for key, value in changes.items():
        group, _, name = key.partition("__")
        config[group][name] = value
    return config


def log(workdir):
    found = read_metrics(workdir / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in found]


def model_options(text):
    options = make_config(text).model.to_dict()
    for name in ("activation_regularization", "temporal_activation_regularization"):
        del options[name]
    return options
