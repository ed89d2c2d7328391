"""Fine-tuning with Mixout: a pretrained model learns a new task from few examples.

    python examples/mixout.py

A classifier of digits learns whole images. Then it is fine-tuned in four ways on 100 images
whose left part is hidden. The 8 x 8 images are in scikit-learn: pip install scikit-learn.
"""

import sys
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

import tfwd
from tfwd import optimizers
from tfwd import parametrizations as P

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model() -> keras.Model:
    """Returns the plain model."""
    hidden = [keras.layers.Dense(128, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *hidden, keras.layers.Dense(10)])


def fine_tune(way: str, weights: list[np.ndarray], data, seed: int) -> keras.Model:
    """Returns a model that begins with the pretrained weights and is fine-tuned in one way."""
    keras.utils.set_random_seed(seed)
    model = make_model()
    model.set_weights(weights)
    optimizer = keras.optimizers.Adam(1e-3)
    if way == "Mixout":
        # The reference of each kernel is its value in the first training call.
        model = tfwd.parametrize(model, {"kernel": P.Mixout(0.95)}, seed=seed)
    elif way == "weight dropout":
        model = tfwd.parametrize(model, {"kernel": P.Dropout(0.3)}, seed=seed)
    elif way == "decay to the start":
        optimizer = optimizers.DecoupledWeightDecay(optimizer, 0.01, towards="start")
    model.compile(optimizer, LOSS)
    model.fit(*data, epochs=40, batch_size=20, verbose=0)
    return tfwd.unwrap(model) if way in ("Mixout", "weight dropout") else model


def accuracy(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Returns the share of correct predictions."""
    return float((model.predict(x, verbose=0).argmax(1) == y).mean())


def main(folder: str | Path = ".") -> float:
    """Returns the accuracy of Mixout on the new task, minus the accuracy of plain fine-tuning."""
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype("float32")
    hidden = np.where(np.arange(64) % 8 < 3, np.float32(0), x)  # three of eight columns
    keras.utils.set_random_seed(0)
    pretrained = make_model()
    pretrained.compile(keras.optimizers.Adam(1e-3), LOSS)
    pretrained.fit(x[:900], y[:900], epochs=40, verbose=0)
    few, new = slice(900, 1000), slice(1000, None)

    print("accuracy on new images       whole (old task)   hidden (new task)")
    print(
        f"{'before fine-tuning':<20} {accuracy(pretrained, x[new], y[new]):20.3f}"
        f" {accuracy(pretrained, hidden[new], y[new]):19.3f}"
    )
    figure = Figure((6, 4), layout="constrained")
    axes = figure.subplots()
    found = {}
    for way in ("plain", "weight dropout", "decay to the start", "Mixout"):
        models = [
            fine_tune(way, pretrained.get_weights(), (hidden[few], y[few]), s) for s in range(5)
        ]
        pairs = [(accuracy(m, x[new], y[new]), accuracy(m, hidden[new], y[new])) for m in models]
        found[way] = np.mean(pairs, axis=0)
        print(f"{way:<20} {found[way][0]:20.3f} {found[way][1]:19.3f}")
        axes.scatter(*zip(*pairs, strict=True), label=way)
    axes.set(xlabel="accuracy, old task", ylabel="accuracy, new task")
    axes.legend(title="each point is one of five seeds")
    figure.savefig(Path(folder, "mixout.png"), dpi=120)
    return float(found["Mixout"][1] - found["plain"][1])


if __name__ == "__main__":
    main(*sys.argv[1:])
