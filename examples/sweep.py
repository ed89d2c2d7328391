"""A sweep in ten lines: which rate of weight dropout has the lowest validation loss?

    python examples/sweep.py

It needs keras-tuner: pip install '.[tune]' in a checkout of tfwd.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure

from tfwd import tuning

# 160 sequences for training, and 600 for validation. The labels are noisy.
RNG = np.random.default_rng(0)
X = RNG.normal(size=(760, 20, 6)).astype("float32")
SCORE = X[:, :, 0].sum(1) - 2 * X[:, :, 1].max(1)
Y = (SCORE - np.median(SCORE) + 0.8 * RNG.normal(size=760) > 0).astype("float32")


# The sweep begins here.
def make_model() -> keras.Model:
    """Returns the compiled model, as for training without a sweep."""
    model = keras.Sequential([keras.Input((20, 6)), keras.layers.LSTM(64), keras.layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    return model


def search(folder: str | Path):
    """Trains with each rate from 0 to 0.6, and returns the tuner."""
    space = {".*kernel": tuning.Float(0, 0.6, step=0.2)}
    hypermodel = tuning.rates(make_model, dropout=space)
    tuner = tuning.tuner(hypermodel, "val_loss", method="grid", directory=folder)
    tuner.search(X[:160], Y[:160], validation_data=(X[160:], Y[160:]), epochs=25, verbose=0)
    return tuner


# The sweep ends here.
def main(folder: str | Path = ".") -> float:
    """Returns the lowest validation loss, as a share of the loss without dropout."""
    with tempfile.TemporaryDirectory() as directory:
        tuner = search(directory)
    trials = tuner.oracle.get_best_trials(4)
    losses = {trial.hyperparameters.values["dropout/.*kernel"]: trial.score for trial in trials}
    for rate, loss in sorted(losses.items()):
        print(f"rate {rate:.1f}: validation loss {loss:.3f}")
    best = min(losses, key=losses.get)
    print(f"best rate: {best:.1f}")
    figure = Figure((6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*sorted(losses.items()), strict=True), marker="o", color="#3949ab")
    axes.set(xlabel="rate of weight dropout", ylabel="validation loss")
    figure.savefig(Path(folder, "sweep.png"), dpi=120)
    return losses[best] / losses[0.0]


if __name__ == "__main__":
    main(*sys.argv[1:])
