"""Pretrained parts: the lower layers of one model, from a file, in another model.

    python examples/pretrained_parts.py

The first model learns a task with many texts, and is written to a safetensors file. The embeddings
and the LSTM of the second model are loaded from the file. It learns a related task from 60 texts.
"""

import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
from matplotlib.figure import Figure
from safetensors.numpy import save_file

import tfwd

LOSS = keras.losses.BinaryCrossentropy(from_logits=True)


def data(count: int, seed: int, other: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns texts of 12 words. Half of all words are good. The other task counts bad words."""
    ids = np.random.default_rng(seed).integers(0, 200, (count, 12))
    good = (ids % 2 == 0).sum(1)
    return ids, (good < 6 if other else good > 6).astype("float32")


def make_model(head: str) -> keras.Model:
    """Returns a compiled classifier of texts."""
    model = keras.Sequential(
        [
            keras.Input((12,), dtype="int32"),
            keras.layers.Embedding(200, 16, name="words"),
            keras.layers.LSTM(16, name="lower"),
            keras.layers.Dense(1, name=head),
        ]
    )
    model.compile(keras.optimizers.Adam(5e-3), LOSS, metrics=["accuracy"])
    return model


def main(folder: str | Path = ".") -> float:
    """Returns the accuracy with the pretrained parts, minus the accuracy without them."""
    keras.utils.set_random_seed(0)
    first = make_model("old_head")
    first.fit(*data(4000, 0), epochs=8, verbose=0)
    new = data(1000, 2, other=True)
    curves = {}
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "model.safetensors")
        save_file({f"net/{w.path}": w.numpy() for w in first.weights}, file)
        for name in ("random weights", "pretrained parts"):
            keras.utils.set_random_seed(1)
            model = make_model("head")
            if name == "pretrained parts":
                plan = tfwd.pretrained.plan(
                    model, str(file), ignore="old_head/.*", allow_missing="head/.*"
                )
                print(str(plan).replace(place, "."), "\n")
                plan.apply()
            fit = model.fit(*data(60, 1, other=True), epochs=40, validation_data=new, verbose=0)
            curves[name] = fit.history["val_accuracy"]
    figure = Figure((6, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, values in curves.items():
        print(f"{name:<17} accuracy on new texts after 60 texts: {values[-1]:.2f}")
        axes.plot(range(1, 41), values, label=name)
    axes.set(xlabel="epoch", ylabel="accuracy on new texts", ylim=(0.4, 1))
    axes.legend()
    figure.savefig(Path(folder, "pretrained_parts.png"), dpi=120)
    return curves["pretrained parts"][-1] - curves["random weights"][-1]


if __name__ == "__main__":
    main(*sys.argv[1:])
