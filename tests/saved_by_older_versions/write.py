"""Writes the files of this folder: `python tests/saved_by_older_versions/write.py`.

For each Keras the folder has a model as `.keras` file, the same model as TensorFlow checkpoint, the
numbers that the model computed, and the folder of a training run that was stopped. The files were
written before the modules of tfwd moved to the folders they stand in now. They are not written
again: `test_older_files_load.py` shows that such files still load.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfwd import _keras, layers, optimizers
from tfwd import parametrizations as P
from tfwd.layers import transformer as T

FOLDER = Path(__file__).parent / f"keras{_keras.GENERATION}"
WORDS = 12  # of the vocabulary of the model
STOPPED_AT = 20  # step of the run
WORDS_OF_TEXT = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
CONFIG = """
from tfwd.lm.config import default_config

def get_config():
    config = default_config()
    config.data.path = "text.txt"
    config.data.batch_size = 4
    config.data.eval_batch_size = 2
    config.data.window = 8
    config.model.embedding_dim = 6
    config.model.hidden_units = (6, 6)
    config.model.variational_noise = 0.01
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.01
    config.optimizer.weight_decay = 0.1
    config.training.epochs = 1
    config.training.log_steps = 5
    config.training.tensorboard = False
    config.sample.tokens = 5
    return config
"""
PROGRAM = """
import os, signal, sys
sys.argv[0] = "tfwd-train"
from tfwd.lm.trainer import Trainer
show = Trainer._show_progress
def stop(self, lengths):
    if self.progress.step == int(os.environ["STOP_AT"]):
        os.kill(os.getpid(), signal.SIGTERM)
    show(self, lengths)
Trainer._show_progress = stop
from tfwd.lm.commands.train import run
run()
"""


def make_model() -> keras.Model:
    """Returns a compiled model with one layer of each kind."""
    ids = keras.Input((5,), dtype="int32")
    embedding = layers.DropoutEmbedding(WORDS, 6, 0.1, seed=1, name="embedding")
    x = layers.WeightDropLSTM(6, 0.5, seed=2, return_sequences=True, name="lstm")(embedding(ids))
    x = layers.LockedDropout(0.1, seed=3, name="locked")(x)
    gru = keras.layers.GRU(6, return_sequences=True, name="gru")
    x = layers.VariationalNoise(gru, 0.1, seed=4, name="noise")(x)
    x = T.TransformerLayer(2, 6, 8, name="transformer")(x)
    x = layers.WeightDropout(keras.layers.Dense(6, name="dense"), 0.2, seed=5, name="dropout")(x)
    x = layers.Mixout(keras.layers.Dense(6, name="dense_2"), 0.5, seed=6, name="mixout")(x)
    chain = P.Chain([P.WeightNorm(), P.Dropout(0.1), P.GaussianNoise(0.01)])
    dense = keras.layers.Dense(6, name="dense_3")
    x = layers.Parametrized(dense, {"kernel": chain}, seed=7, name="chain")(x)
    x = layers.CheckFinite(name="check")(x)
    model = keras.Model(ids, layers.TiedDense(embedding, name="tied")(x))
    adam = keras.optimizers.Adam(0.01)
    model.compile(
        optimizers.NonMonotonicASGD(optimizers.DecoupledWeightDecay(adam, 0.01)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Returns ids and labels, [8, 5] each."""
    ids = np.arange(40).reshape(8, 5) * 7 % WORDS
    return ids.astype(np.int32), (ids * 5 % WORDS).astype(np.int32)


def numbers(model: Any) -> dict[str, np.ndarray]:
    """Returns all that a file keeps of a model, and its predictions."""
    found = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
    variables = model.optimizer.variables
    for i, variable in enumerate(variables() if callable(variables) else variables):
        found[f"optimizer {i}"] = variable.numpy()
    return {**found, "predictions": model.predict(batch()[0], verbose=0)}


def next_losses(model: Any) -> np.ndarray:
    """Returns the losses of two more training steps, which draw masks."""
    ids, labels = batch()
    losses = []
    for _ in range(2):
        model.reset_metrics()  # some releases of Keras return a mean over the calls
        losses.append(model.train_on_batch(ids, labels))
    return np.array(losses)


def write_run(folder: Path) -> None:
    """Writes the folder of a stopped run, and the records of the same run not stopped."""
    folder.mkdir()
    lines = [" ".join(WORDS_OF_TEXT[(i * i + 3 * j) % 10] for j in range(7)) for i in range(200)]
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    (folder / "config.py").write_text(CONFIG)
    command = [sys.executable, "-c", PROGRAM, "--config=config.py"]
    for name, at in (("run", STOPPED_AT), ("whole", -1)):
        environment = {**os.environ, "STOP_AT": str(at)}
        code = subprocess.call([*command, f"--workdir={name}"], cwd=folder, env=environment)
        assert code == (128 + signal.SIGTERM if at > 0 else 0)
    shutil.move(folder / "whole" / "metrics.jsonl", folder / "metrics.jsonl")
    shutil.rmtree(folder / "whole")


def main() -> None:
    """Writes the files."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    model = make_model()
    model.fit(*batch(), batch_size=4, epochs=2, verbose=0)
    model.save(FOLDER / "model.keras")
    tf.train.Checkpoint(model=model).write(str(FOLDER / "checkpoint" / "model"))
    found = numbers(model)
    np.savez_compressed(FOLDER / "numbers.npz", losses=next_losses(model), **found)
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder) / "run")
        shutil.copytree(Path(folder) / "run", FOLDER / "run")
    (FOLDER / "versions.json").write_text(
        json.dumps({"keras": keras.__version__, "tensorflow": tf.__version__}) + "\n"
    )


if __name__ == "__main__":
    main()
