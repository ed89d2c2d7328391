"""Two workers train one model with `fit`, and get the losses and weights of one process.

    python examples/two_workers.py

The program starts itself twice. On two machines, each machine starts the program once, with its own
index in TF_CONFIG.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from matplotlib.figure import Figure

import tfwd

RNG = np.random.default_rng(0)
X = RNG.normal(size=(512, 10)).astype("float32")
Y = np.tanh(X @ RNG.normal(size=(10, 1))).astype("float32")


def train(strategy: tf.distribute.Strategy) -> dict[str, list[float]]:
    """Returns the losses by epoch, and the final weights."""
    keras.utils.set_random_seed(1)
    with tfwd.distribute.scope(strategy):  # instead of strategy.scope()
        hidden = tfwd.layers.WeightDropout(
            keras.layers.Dense(32, activation="relu"), 0.2, seed=1, share_across_replicas=True
        )
        model = keras.Sequential([keras.Input((10,)), hidden, keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(X, Y, batch_size=64, epochs=12, shuffle=False, verbose=0)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return {"losses": history.history["loss"], "weights": weights.tolist()}


def start_workers(folder: Path, count: int = 2) -> list[dict[str, list[float]]]:
    """Starts the processes, and returns the results of each process."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    processes = []
    for index in range(count):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, __file__, "worker", str(folder / f"{index}.json")]
        processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL))
    try:
        assert [process.wait(timeout=600) for process in processes] == [0] * count
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"{index}.json").read_text("utf-8")) for index in range(count)]


def main(folder: str | Path = ".") -> float:
    """Returns the loss of the first epoch divided by the loss of the last, on two workers."""
    with tempfile.TemporaryDirectory() as directory:
        first, second = start_workers(Path(directory))
    alone = train(tf.distribute.get_strategy())
    difference = np.abs(np.subtract(first["weights"], alone["weights"])).max()
    print(f"loss on two workers:     {first['losses'][-1]:.5f}")
    print(f"loss in one process:     {alone['losses'][-1]:.5f}")
    print(f"workers have equal bits: {first['weights'] == second['weights']}")
    print(f"difference from one process is below 1e-4: {difference < 1e-4}")
    figure = Figure((6, 3.5), layout="constrained")
    axes = figure.subplots()
    epochs = range(1, len(alone["losses"]) + 1)
    axes.plot(epochs, alone["losses"], color="#b0bec5", linewidth=6, label="one process")
    axes.plot(epochs, first["losses"], color="#3949ab", label="two workers")
    axes.set(xlabel="epoch", ylabel="training loss (mean squared error)", yscale="log")
    axes.legend()
    figure.savefig(Path(folder, "two_workers.png"), dpi=120)
    if first["weights"] != second["weights"] or difference >= 1e-4:
        return 0.0
    return first["losses"][0] / first["losses"][-1]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        found = train(tf.distribute.MultiWorkerMirroredStrategy())
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
    else:
        main(*sys.argv[1:2])
